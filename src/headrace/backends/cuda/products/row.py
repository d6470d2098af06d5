"""A product with one row: each weight is read once, multiplied and summed in float32.

For dense and FP8 matrices (FP8 values are converted to float32 in registers; the row is not
quantized). The norm costs nothing here: its factor is known at the end, and applied to the sum.
"""

from __future__ import annotations

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from headrace.backends.cuda.products.epilogue import finish, prefetch


@triton.jit
def row_kernel(
    x,  # [columns]
    weight,  # [outputs, columns]
    out,
    weight_scales,  # [outputs] f32, with SCALED
    norm_weight,  # [columns], with NORM
    bias,
    residual,
    outputs,
    columns,
    eps,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    STAGES: tl.constexpr,
    EVEN: tl.constexpr,  # columns are a multiple of BLOCK_K
    SCALED: tl.constexpr,
    NORM: tl.constexpr,
    ACTIVATION: tl.constexpr,
    BIAS: tl.constexpr,
    ADD: tl.constexpr,
    PDL: tl.constexpr,
    PREFETCH: tl.constexpr,  # tiles of weights to prefetch before x is ready: a power of two
    INTERPRETED: tl.constexpr,
):
    start = tl.program_id(0) * BLOCK_N
    n = start + tl.arange(0, BLOCK_N)
    # Past the last output, the last one is read again and not stored: cheaper than a mask.
    lines = weight + tl.minimum(n, outputs - 1).to(tl.int64)[:, None] * columns
    if PREFETCH > 0:
        LINE: tl.constexpr = 128 // (weight.dtype.element_ty.primitive_bitwidth // 8)
        ahead = tl.arange(0, PREFETCH * BLOCK_K // LINE) * LINE
        prefetch(lines + tl.minimum(ahead, columns - 1)[None, :], INTERPRETED)
    if PDL:
        gdc_launch_dependents()
        gdc_wait()
    sums = tl.zeros((BLOCK_N, BLOCK_K), tl.float32)
    squares = tl.zeros((BLOCK_K,), tl.float32)
    for first in tl.range(0, columns, BLOCK_K, num_stages=STAGES):
        k = first + tl.arange(0, BLOCK_K)
        if EVEN:
            w = tl.load(lines + k[None, :], eviction_policy="evict_first")
            values = tl.load(x + k).to(tl.float32)
        else:
            inside = k < columns
            w = tl.load(lines + k[None, :], mask=inside[None, :], other=0.0)
            values = tl.load(x + k, mask=inside, other=0.0).to(tl.float32)
        if NORM:
            squares += values * values
            if EVEN:
                values *= tl.load(norm_weight + k).to(tl.float32)
            else:
                values *= tl.load(norm_weight + k, mask=k < columns, other=0.0).to(tl.float32)
        sums += w.to(tl.float32) * values[None, :]
    total = tl.sum(sums, 1)
    if NORM:
        total *= tl.rsqrt(tl.sum(squares, 0) / columns + eps)
    if SCALED:
        total *= tl.load(weight_scales + n, mask=n < outputs, other=0.0)
    finish(total[None, :], out, bias, residual, 0, start, 1, outputs, 0, 0, ACTIVATION, BIAS, ADD)
