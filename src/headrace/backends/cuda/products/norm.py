"""Prepares rows for a product: RMS norm, permutation and quantization, one program per row.

Quantized rows have one scale per row, or one per group of columns. Knows rows and vectors only, not
what they are for. A program holds its whole row in registers.
"""

from __future__ import annotations

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

QUANTIZE_NONE = 0
QUANTIZE_FP8 = 1
QUANTIZE_INT8 = 2


@triton.jit
def store_quantized(values, peak, out, scales, row, columns, mask, QUANTIZE: tl.constexpr):
    """Stores values / scale, rounded, with scale = peak / largest code, and the row's scale."""
    peak = tl.maximum(peak, 1e-10)  # for rows of zeros: the inverse of the scale must be finite
    if QUANTIZE == 1:
        scaled = tl.minimum(tl.maximum(values * (448.0 / peak), -448.0), 448.0)
        tl.store(out + columns, scaled.to(out.dtype.element_ty), mask=mask)
        tl.store(scales + row, peak / 448.0)
    else:
        scaled = tl.minimum(tl.maximum(values * (127.0 / peak), -127.0), 127.0)
        tl.store(out + columns, tl.floor(scaled + 0.5).to(tl.int8), mask=mask)
        tl.store(scales + row, peak / 127.0)


@triton.jit
def store_grouped(
    values, out, scales, row, rows, width, mask, GROUP: tl.constexpr, QUANTIZE: tl.constexpr
):
    """As store_quantized, with one scale per GROUP columns: scales [groups, rows]."""
    GROUPS: tl.constexpr = values.shape[0] // GROUP
    grouped = tl.reshape(values, (GROUPS, GROUP))
    LARGEST: tl.constexpr = 448.0 if QUANTIZE == 1 else 127.0
    peaks = tl.maximum(tl.max(tl.abs(grouped), 1), 1e-10)
    scaled = grouped * (LARGEST / peaks)[:, None]
    scaled = tl.reshape(tl.minimum(tl.maximum(scaled, -LARGEST), LARGEST), values.shape)
    columns = tl.arange(0, values.shape[0])
    if QUANTIZE == 1:
        tl.store(out + columns, scaled.to(out.dtype.element_ty), mask=mask)
    else:
        tl.store(out + columns, tl.floor(scaled + 0.5).to(tl.int8), mask=mask)
    group = tl.arange(0, GROUPS)
    tl.store(scales + group * rows + row, peaks / LARGEST, mask=group * GROUP < width)


@triton.jit
def prepare_kernel(
    x,  # [rows, width]
    weight,  # [width]
    permutation,  # [width] i32: value j of the result is value permutation[j] of the row
    out,  # [rows, width]
    scales,  # [rows] f32, or [groups, rows]: with QUANTIZE
    width,
    x_stride,
    out_stride,
    eps,
    BLOCK: tl.constexpr,  # power of two >= width
    NORM: tl.constexpr,
    PERMUTE: tl.constexpr,
    QUANTIZE: tl.constexpr,
    GROUP: tl.constexpr,  # columns that share a scale; 0: all of them
    PDL: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    columns = tl.arange(0, BLOCK)
    mask = columns < width
    x += row * x_stride
    out += row * out_stride
    if NORM:
        gains = tl.load(weight + columns, mask=mask, other=0.0).to(tl.float32)
    if PDL:
        gdc_wait()
        gdc_launch_dependents()
    values = tl.load(x + columns, mask=mask, other=0.0).to(tl.float32)
    if NORM:
        values = values * tl.rsqrt(tl.sum(values * values, 0) / width + eps) * gains
    if PERMUTE:
        # Through memory: a program can't permute its registers by a table.
        tl.store(out + columns, values.to(out.dtype.element_ty), mask=mask)
        tl.debug_barrier()
        source = tl.load(permutation + columns, mask=mask, other=0)
        moved = tl.load(out + source, mask=mask, other=0.0)
        tl.debug_barrier()
        tl.store(out + columns, moved, mask=mask)
    elif QUANTIZE != 0 and GROUP != 0:
        rows = tl.num_programs(0)
        store_grouped(values, out, scales, row, rows, width, mask, GROUP, QUANTIZE)
    elif QUANTIZE != 0:
        store_quantized(
            values, tl.max(tl.abs(values), 0), out, scales, row, columns, mask, QUANTIZE
        )
    else:
        tl.store(out + columns, values.to(out.dtype.element_ty), mask=mask)


@triton.jit
def add_normed_kernel(
    y,  # [rows, width]
    weight,  # [width]
    residual,  # [rows, width]: residual += norm(y)
    width,
    y_stride,
    residual_stride,
    eps,
    BLOCK: tl.constexpr,
    PDL: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    columns = tl.arange(0, BLOCK)
    mask = columns < width
    gains = tl.load(weight + columns, mask=mask, other=0.0).to(tl.float32)
    residual += row * residual_stride
    if PDL:
        gdc_wait()
        gdc_launch_dependents()
    values = tl.load(y + row * y_stride + columns, mask=mask, other=0.0).to(tl.float32)
    values = values * tl.rsqrt(tl.sum(values * values, 0) / width + eps) * gains
    before = tl.load(residual + columns, mask=mask, other=0.0).to(tl.float32)
    tl.store(residual + columns, (before + values).to(residual.dtype.element_ty), mask=mask)
