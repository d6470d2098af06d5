"""Rows by number: the embedding of each token, and the rows whose logits a step wants.

    embed(token_ids, table, out, rows, scale=1.0, row_scales=None)
    select_rows(x, wanted, out, rows)

Row numbers are read on the device and clamped to the table, so that padding rows may hold anything.
Knows nothing of what the numbers mean.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from headrace.backends.cuda.launch import (
    dependent_launch,
    let_next_start,
    wait_for_previous,
)


def embed(
    token_ids: torch.Tensor,  # int32 [>= rows]
    table: torch.Tensor,  # [vocab, hidden]: float, or int8 or fp8 with row_scales
    out: torch.Tensor,  # [>= rows, hidden]
    rows: int,
    *,
    scale: float = 1.0,
    row_scales: torch.Tensor | None = None,  # float32 [vocab]: one factor per row of the table
    first: int | None = None,  # the table has only some tokens, from this one on
    dependent: bool = False,
) -> None:
    """out[i] = table[token_ids[i]] * scale * row_scales[token_ids[i]]; 0 for tokens that the table
    does not have."""
    _gather(token_ids, table, out, rows, scale, row_scales, dependent, first)


def select_rows(
    x: torch.Tensor, wanted: torch.Tensor, out: torch.Tensor, rows: int, *, dependent: bool = False
) -> None:
    """out[i] = x[wanted[i]] for i < rows; wanted is int32."""
    _gather(wanted, x, out, rows, 1.0, None, dependent)


def _gather(
    numbers: torch.Tensor,
    table: torch.Tensor,
    out: torch.Tensor,
    rows: int,
    scale: float,
    row_scales: torch.Tensor | None,
    dependent: bool,
    first: int | None = None,
) -> None:
    width = table.shape[1]
    block = min(triton.next_power_of_2(width), 1024)
    _gather_kernel[(rows, triton.cdiv(width, block))](
        numbers,
        table,
        numbers if row_scales is None else row_scales,
        out,
        scale,
        table.shape[0],
        0 if first is None else first,
        WIDTH=width,
        BLOCK=block,
        SCALED=scale != 1.0,
        ROW_SCALES=row_scales is not None,
        PART=first is not None,
        DEPENDENT=dependent,
        num_warps=max(1, min(4, block // 256)),
        **dependent_launch(dependent),
    )


@triton.jit
def _gather_kernel(
    numbers,
    table,  # [count, WIDTH]
    row_scales,  # [count]
    out,  # [rows, WIDTH]
    scale,
    count,
    first,
    WIDTH: tl.constexpr,
    BLOCK: tl.constexpr,
    SCALED: tl.constexpr,
    ROW_SCALES: tl.constexpr,
    PART: tl.constexpr,
    DEPENDENT: tl.constexpr,
):
    wait_for_previous(DEPENDENT)
    let_next_start(DEPENDENT)
    row = tl.program_id(0).to(tl.int64)
    at = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    number = tl.load(numbers + row)
    if PART:
        number -= first
    near = tl.minimum(tl.maximum(number, 0), count - 1)
    is_there = near == number
    number = near.to(tl.int64)
    x = tl.load(table + number * WIDTH + at, mask=at < WIDTH, other=0.0)
    if PART:
        x = tl.where(is_there, x, tl.zeros_like(x))
    if SCALED or ROW_SCALES:
        x = x.to(tl.float32)
        if ROW_SCALES:
            x = x * tl.load(row_scales + number)
        if SCALED:
            x = x * scale
    tl.store(out + row * WIDTH + at, x.to(out.dtype.element_ty), mask=at < WIDTH)
