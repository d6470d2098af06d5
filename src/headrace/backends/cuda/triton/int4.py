"""A product with INT4 weights on the matrix units, for any number of rows, and their unpacking.

A byte holds two codes. Bytes become bf16 pairs by moving them under a fixed exponent (0x43..: 128
plus the code), then 128 and the zero point are taken off: exact, and about one instruction a
weight. A group's scale multiplies the group's sums, not its weights.
"""

from __future__ import annotations

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from headrace.backends.cuda.triton.epilogue import finish, gather_parts, multiply, prefetch


@triton.jit
def low_codes(codes, zeros, INTERPRETED: tl.constexpr):
    """The low halves of bytes, less zeros (bf16, 128 + zero point): bf16."""
    if INTERPRETED:
        return ((codes & 15).to(tl.float32) + 128.0 - zeros.to(tl.float32)).to(tl.bfloat16)
    else:
        return tl.inline_asm_elementwise(
            """
            {
            .reg .b32 c;
            and.b32 c, $2, 0x0F0F0F0F;
            prmt.b32 $0, c, 0x43434343, 0x4140;
            prmt.b32 $1, c, 0x43434343, 0x4342;
            sub.rn.bf16x2 $0, $0, $3;
            sub.rn.bf16x2 $1, $1, $4;
            }
            """,
            "=r,=r,r,r,r",
            [codes, zeros],
            dtype=tl.bfloat16,
            is_pure=True,
            pack=4,
        )


@triton.jit
def high_codes(codes, zeros, INTERPRETED: tl.constexpr):
    """The high halves of bytes, less zeros."""
    if INTERPRETED:
        return ((codes >> 4).to(tl.float32) + 128.0 - zeros.to(tl.float32)).to(tl.bfloat16)
    else:
        return tl.inline_asm_elementwise(
            """
            {
            .reg .b32 c;
            shr.u32 c, $2, 4;
            and.b32 c, c, 0x0F0F0F0F;
            prmt.b32 $0, c, 0x43434343, 0x4140;
            prmt.b32 $1, c, 0x43434343, 0x4342;
            sub.rn.bf16x2 $0, $0, $3;
            sub.rn.bf16x2 $1, $1, $4;
            }
            """,
            "=r,=r,r,r,r",
            [codes, zeros],
            dtype=tl.bfloat16,
            is_pure=True,
            pack=4,
        )


@triton.jit
def load_zeros(zeros, places, ZEROS: tl.constexpr):
    """128 + the zero point of each place, as bf16: exact up to 127."""
    if ZEROS:
        return (tl.load(zeros + places).to(tl.float32) + 128.0).to(tl.bfloat16)
    else:
        return tl.full(places.shape, 136.0, tl.float32).to(tl.bfloat16)


@triton.jit(do_not_specialize=["rows"])
def int4_kernel(
    x,  # [rows, columns]
    weight,  # [columns / GROUP, outputs, GROUP / 2] bytes
    out,
    weight_scales,  # [outputs, columns / GROUP]
    zeros,  # [outputs, columns / GROUP] bytes, with ZEROS
    bias,
    residual,
    partials,
    counters,
    rows,
    outputs,
    columns,
    x_stride,
    out_stride,
    residual_stride,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    GROUP: tl.constexpr,
    SPAN: tl.constexpr,  # groups at a time, a divisor of all groups: small ones need several
    PARTS: tl.constexpr,
    STAGES: tl.constexpr,
    SWAP: tl.constexpr,
    ZEROS: tl.constexpr,
    ACTIVATION: tl.constexpr,
    BIAS: tl.constexpr,
    ADD: tl.constexpr,
    PDL: tl.constexpr,
    PREFETCH: tl.constexpr,  # groups of weights to ask for before x is there: a power of two
    INTERPRETED: tl.constexpr,
):
    HALF: tl.constexpr = GROUP // 2
    tile, part = tl.program_id(0), tl.program_id(1)
    tiles_m = tl.cdiv(rows, BLOCK_M)
    row_start, start = (tile % tiles_m) * BLOCK_M, (tile // tiles_m) * BLOCK_N
    groups = columns // GROUP
    steps = tl.cdiv(groups // SPAN, PARTS) * SPAN
    first, last_group = part * steps, tl.minimum((part + 1) * steps, groups)

    m = row_start + tl.arange(0, BLOCK_M)
    n = start + tl.arange(0, BLOCK_N)
    n_inside = tl.minimum(n, outputs - 1)
    k = tl.arange(0, HALF)
    x_lines = x + m.to(tl.int64)[:, None] * x_stride + k[None, :]
    m_inside = (m < rows)[:, None]  # rows that aren't there cost no traffic
    w_tile = weight + n_inside[:, None] * HALF + k[None, :]
    group_stride = outputs.to(tl.int64) * HALF
    # The compiler fetches ahead only what the matrix units read. An output's scales and zero points
    # lie side by side, so that one wait brings those of the next groups to the L1 cache as well.
    factors = n_inside.to(tl.int64) * groups
    if PREFETCH > 0:
        ahead = tl.minimum(first + tl.arange(0, PREFETCH), groups - 1)
        lines = weight + n_inside[:, None] * HALF + ahead[None, :] * group_stride
        prefetch(lines, INTERPRETED)
        prefetch(weight_scales + factors + tl.minimum(first, groups - 1), INTERPRETED)
        if ZEROS:
            prefetch(zeros + factors + tl.minimum(first, groups - 1), INTERPRETED)
    if PDL:
        gdc_launch_dependents()
        gdc_wait()

    if SWAP:
        sums = tl.zeros((BLOCK_N, BLOCK_M), tl.float32)
    else:
        sums = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
    for start_group in tl.range(first, last_group, SPAN, num_stages=STAGES):
        for step in tl.static_range(SPAN):
            group = start_group + step
            scales = tl.load(weight_scales + factors + group).to(tl.float32)
            points = load_zeros(zeros, factors + group, ZEROS)[:, None]
            codes = tl.load(w_tile + group * group_stride)
            here = x_lines + group * GROUP
            low_x = tl.load(here, mask=m_inside, other=0.0).to(tl.bfloat16)
            high_x = tl.load(here + HALF, mask=m_inside, other=0.0).to(tl.bfloat16)
            low = low_codes(codes, points, INTERPRETED)
            high = high_codes(codes, points, INTERPRETED)
            fresh = tl.zeros(sums.shape, tl.float32)
            if SWAP:
                fresh = multiply(low, tl.trans(low_x), fresh, INTERPRETED)
                sums += multiply(high, tl.trans(high_x), fresh, INTERPRETED) * scales[:, None]
            else:
                fresh = multiply(low_x, tl.trans(low), fresh, INTERPRETED)
                sums += multiply(high_x, tl.trans(high), fresh, INTERPRETED) * scales[None, :]

    total = tl.trans(sums) if SWAP else sums
    last = True
    if PARTS > 1:
        total, last = gather_parts(total, partials, counters, tile, part, PARTS)
    if last:
        finish(
            total,
            out,
            bias,
            residual,
            row_start,
            start,
            rows,
            outputs,
            out_stride,
            residual_stride,
            ACTIVATION,
            BIAS,
            ADD,
        )


@triton.jit
def unpack_kernel(
    weight,  # [columns / GROUP, outputs, GROUP / 2] bytes
    weight_scales,
    zeros,
    out,  # [outputs, columns]
    outputs,
    columns,
    BLOCK_N: tl.constexpr,
    GROUP: tl.constexpr,
    ZEROS: tl.constexpr,
    PDL: tl.constexpr,
):
    """The matrix in bf16, for the library's products of many rows."""
    HALF: tl.constexpr = GROUP // 2
    group = tl.program_id(0).to(tl.int64)
    n = tl.program_id(1) * BLOCK_N + tl.arange(0, BLOCK_N)
    inside = n < outputs
    k = tl.arange(0, HALF)
    bytes_at = (group * outputs + n)[:, None] * HALF + k[None, :]
    codes = tl.load(weight + bytes_at, mask=inside[:, None], other=0)
    places = n.to(tl.int64) * (columns // GROUP) + group
    scales = tl.load(weight_scales + places, mask=inside, other=0.0).to(tl.float32)[:, None]
    low, high = (codes & 15).to(tl.float32), (codes >> 4).to(tl.float32)
    points = tl.full((BLOCK_N,), 8.0, tl.float32)
    if ZEROS:
        points = tl.load(zeros + places, mask=inside, other=0).to(tl.float32)
    low, high = (low - points[:, None]) * scales, (high - points[:, None]) * scales
    lines = out + n.to(tl.int64)[:, None] * columns + group * GROUP + k[None, :]
    if PDL:
        gdc_wait()
        gdc_launch_dependents()
    tl.store(lines, low.to(out.dtype.element_ty), mask=inside[:, None])
    tl.store(lines + HALF, high.to(out.dtype.element_ty), mask=inside[:, None])


@triton.jit
def widen_kernel(
    weight,  # [outputs, columns] fp8 or int8
    weight_scales,  # [outputs], or [outputs, columns / 128] with BLOCKED
    out,  # [outputs, columns]
    outputs,
    columns,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,  # 128 with BLOCKED
    BLOCKED: tl.constexpr,
    PDL: tl.constexpr,
):
    """An FP8 or INT8 matrix in bf16, for the library's products of many rows."""
    n = tl.program_id(1) * BLOCK_N + tl.arange(0, BLOCK_N)
    k = tl.program_id(0) * BLOCK_K + tl.arange(0, BLOCK_K)
    mask = (n < outputs)[:, None] & (k < columns)[None, :]
    places = n.to(tl.int64)[:, None] * columns + k[None, :]
    values = tl.load(weight + places, mask=mask, other=0.0).to(tl.float32)
    factors = n
    if BLOCKED:
        factors = n * tl.cdiv(columns, 128) + tl.program_id(0)
    scales = tl.load(weight_scales + factors, mask=n < outputs, other=0.0)
    if PDL:
        gdc_wait()
        gdc_launch_dependents()
    tl.store(out + places, (values * scales[:, None]).to(out.dtype.element_ty), mask=mask)
