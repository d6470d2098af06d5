"""Norms of rows against float64, quantized or not, into poisoned outputs."""

from __future__ import annotations

import pytest
import torch

from headrace.backends.cuda.products import launches
from headrace.backends.cuda.products.norm import QUANTIZE_FP8, QUANTIZE_INT8

EPS = 1e-6


def normed(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    x = x.double()
    return x / (x.square().mean(1, keepdim=True) + EPS).sqrt() * weight.double()


def poisoned(shape: tuple[int, int], dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    if dtype == torch.int8:
        return torch.full(shape, 99, dtype=dtype, device=device)
    return torch.full(shape, torch.nan, device=device).to(dtype)


def dequantized(codes: torch.Tensor, scales: torch.Tensor) -> torch.Tensor:
    return codes.to(torch.float64) * scales.double()[: codes.shape[0], None]


# Codes of the interpreter are cut off, not rounded, and so is its bf16.
TWICE = 1 if torch.cuda.is_available() else 2


@pytest.mark.parametrize("width", [64, 100, 1000])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_norm(device: torch.device, width: int, dtype: torch.dtype) -> None:
    rows = 3
    x = torch.randn(rows, width, device=device).to(dtype)
    weight = torch.rand(width, device=device) + 0.5
    out = poisoned((rows, width), dtype, device)
    launches.prepare(x, out, weight=weight, eps=EPS)
    want = normed(x, weight)
    tolerance = 1e-5 if dtype == torch.float32 else 1e-2 * TWICE
    assert (out.double() - want).norm() / want.norm() < tolerance


@pytest.mark.parametrize("quantize", [QUANTIZE_FP8, QUANTIZE_INT8])
@pytest.mark.parametrize("norm", [False, True])
def test_quantized(device: torch.device, quantize: int, norm: bool) -> None:
    rows, width = 4, 200
    x = torch.randn(rows, width, device=device) * torch.tensor([[1e-3], [1.0], [50.0], [0.0]]).to(
        device
    )
    weight = torch.rand(width, device=device) + 0.5 if norm else None
    dtype = torch.float8_e4m3fn if quantize == QUANTIZE_FP8 else torch.int8
    out = poisoned((rows, width), dtype, device)
    scales = torch.full((rows + 1,), torch.nan, device=device)
    launches.prepare(x, out, scales=scales, weight=weight, eps=EPS, quantize=quantize)
    want = x.double() if weight is None else normed(x, weight)
    found = dequantized(out, scales)
    largest = 448.0 if quantize == QUANTIZE_FP8 else 127.0
    peaks = want.abs().amax(1)
    torch.testing.assert_close(
        scales[:3].double(), peaks[:3] / largest, rtol=1e-5, atol=0.0, check_device=False
    )
    tolerance = (0.05 if quantize == QUANTIZE_FP8 else 0.012) * TWICE
    for row in range(3):
        assert (found[row] - want[row]).norm() / want[row].norm() < tolerance
    assert (found[3] == 0).all()  # a row of zeros is no division by zero
    assert scales[rows:].isnan().all()


@pytest.mark.parametrize("quantize", [QUANTIZE_FP8, QUANTIZE_INT8])
@pytest.mark.parametrize(("width", "group"), [(200, 32), (192, 64), (96, 128), (600, 128)])
def test_quantized_in_groups(device: torch.device, quantize: int, width: int, group: int) -> None:
    """Each group has the scale of its own largest value, also the last one, which may be short."""
    rows, groups = 3, -(-width // group)
    x = torch.randn(rows, width, device=device)
    x[:, :group] *= 1000.0
    x[1, -1] = 0.0
    x[2] = 0.0
    dtype = torch.float8_e4m3fn if quantize == QUANTIZE_FP8 else torch.int8
    out = poisoned((rows, width), dtype, device)
    scales = torch.full((groups * rows + 1,), torch.nan, device=device)
    launches.prepare(x, out, scales=scales, quantize=quantize, group=group)
    assert scales[groups * rows :].isnan().all()
    each = scales[: groups * rows].reshape(groups, rows).T.repeat_interleave(group, 1)[:, :width]
    largest = 448.0 if quantize == QUANTIZE_FP8 else 127.0
    filled = torch.nn.functional.pad(x, (0, groups * group - width)).reshape(rows, groups, group)
    peaks = filled.abs().amax(2)[:2].double()
    found = scales[: groups * rows].reshape(groups, rows).T[:2].double()
    torch.testing.assert_close(found, peaks / largest, rtol=1e-5, atol=0.0)
    values = out.to(torch.float64) * each.double()
    tolerance = (0.05 if quantize == QUANTIZE_FP8 else 0.012) * TWICE
    for start in range(0, width, group):
        part = slice(start, start + group)
        want = x[:2, part].double()
        assert (values[:2, part] - want).norm() / want.norm() < tolerance
    assert (values[2] == 0).all()


def test_permuted(device: torch.device) -> None:
    rows, width = 2, 96
    x = torch.randn(rows, width, device=device)
    weight = torch.rand(width, device=device) + 0.5
    order = torch.randperm(width).to(torch.int32).to(device)
    out = poisoned((rows, width), torch.float32, device)
    launches.prepare(x, out, weight=weight, eps=EPS, permutation=order)
    want = normed(x, weight)[:, order.long()]
    assert (out.double() - want).norm() / want.norm() < 1e-5


def test_add_normed(device: torch.device) -> None:
    rows, width = 3, 72
    y = torch.randn(rows, width, device=device)
    weight = torch.rand(width, device=device)
    residual = torch.randn(rows + 1, width, device=device)
    before = residual.clone()
    launches.add_normed(y, weight, EPS, residual, rows=rows)
    want = before[:rows].double() + normed(y, weight)
    assert (residual[:rows].double() - want).norm() / want.norm() < 1e-5
    assert torch.equal(residual[rows:], before[rows:])
