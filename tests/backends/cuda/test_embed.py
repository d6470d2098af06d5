"""Rows by number, against indexing."""

from __future__ import annotations

import math

import pytest
import torch

from headrace.backends.cuda.embed import embed, select_rows


@pytest.mark.parametrize("width", [1, 48, 1024, 1500])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_embeds(dtype: torch.dtype, width: int, device: torch.device) -> None:
    table = torch.randn(7, width).to(dtype).to(device)
    # Padding rows may hold anything: numbers past either end must not be read from.
    ids = torch.tensor([3, 0, 6, 6, -1, 10**9], dtype=torch.int32, device=device)
    out = torch.full((7, width), math.nan, dtype=dtype, device=device)
    embed(ids, table, out, 6, scale=2.0)
    assert torch.equal(out[:4], table[ids[:4].long()] * 2)
    assert out[6].isnan().all()


@pytest.mark.parametrize("dtype", [torch.int8, torch.float8_e4m3fn])
def test_embeds_from_one_byte_values(dtype: torch.dtype, device: torch.device) -> None:
    table = (torch.randn(5, 40) * 40).to(dtype).to(device)
    scales = torch.rand(5, device=device)
    ids = torch.tensor([4, 1, 0], dtype=torch.int32, device=device)
    out = torch.full((3, 40), math.nan, device=device)
    embed(ids, table, out, 3, scale=3.0, row_scales=scales)
    wanted = table.double()[ids.long()] * scales.double()[ids.long(), None] * 3
    assert (out.double() - wanted).norm() < 1e-6 * wanted.norm()


def test_selects_rows(device: torch.device) -> None:
    x = torch.randn(6, 130).to(torch.bfloat16).to(device)
    wanted = torch.tensor([5, 0, 5, 2], dtype=torch.int32, device=device)
    out = torch.full((4, 130), math.nan, dtype=torch.bfloat16, device=device)
    select_rows(x, wanted, out, 3)
    assert torch.equal(out[:3], x[wanted[:3].long()])
    assert out[3].isnan().all()
