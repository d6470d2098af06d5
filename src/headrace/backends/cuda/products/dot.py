"""A product on the matrix units, for any number of rows: dense, FP8 and INT8 matrices.

One program computes a tile of rows x outputs, or a part of its columns (PARTS), which the last
program of the tile sums up. Rows for FP8 and INT8 weights are already quantized, with one scale per
row or per GROUP columns, unless FP8 weights are converted to bf16 (WIDEN): then rows stay bf16,
for cases where quantizing them costs more than it gains. With SWAP the weights are the left
operand: the wide side of Hopper's instruction, straight from shared memory, while the few rows are
the narrow side.
"""

from __future__ import annotations

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from headrace.backends.cuda.products.epilogue import finish, gather_parts, multiply, prefetch

SCALES_NONE = 0
SCALES_CHANNEL = 1
SCALES_BLOCK = 2


@triton.jit
def widen_fp8(codes, INTERPRETED: tl.constexpr):
    """e4m3 bytes as bf16, times 2^-120: exponent and mantissa are shifted into place, but the
    exponent's bias is not corrected. Sums stay far above float32's smallest numbers."""
    if INTERPRETED:
        return codes.to(tl.float8e4nv, bitcast=True).to(tl.bfloat16)
    else:
        return tl.inline_asm_elementwise(
            """
            {
            .reg .b32 a, b, s, t;
            prmt.b32 a, $2, 0, 0x1404;
            prmt.b32 b, $2, 0, 0x3424;
            and.b32 s, a, 0x80008000;
            and.b32 t, b, 0x80008000;
            shr.u32 a, a, 4;
            shr.u32 b, b, 4;
            lop3.b32 $0, a, 0x07F007F0, s, 0xEA;
            lop3.b32 $1, b, 0x07F007F0, t, 0xEA;
            }
            """,
            "=r,=r,r",
            [codes],
            dtype=tl.bfloat16,
            is_pure=True,
            pack=4,
        )


@triton.jit(do_not_specialize=["rows"])
def dot_kernel(
    x,  # [rows, columns]
    weight,  # [outputs, columns]; bytes with WIDEN
    out,
    row_scales,  # f32 [rows], or [columns / GROUP, rows]: with SCALES
    weight_scales,  # [outputs], or [outputs, columns / BLOCK_K] with SCALES_BLOCK
    norm_weight,  # [columns], with NORM
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
    eps,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,  # with block scales or GROUP: the columns per scale
    PARTS: tl.constexpr,
    SWAP: tl.constexpr,
    EVEN: tl.constexpr,  # columns are a multiple of BLOCK_K
    SCALES: tl.constexpr,
    GROUP: tl.constexpr,  # columns of x that share a scale; 0: one scale per row
    NORM: tl.constexpr,  # only with one part
    WIDEN: tl.constexpr,
    ACTIVATION: tl.constexpr,
    BIAS: tl.constexpr,
    ADD: tl.constexpr,
    PDL: tl.constexpr,
    PREFETCH: tl.constexpr,  # tiles of weights to prefetch before x is ready: a power of two
    INTERPRETED: tl.constexpr,
):
    # Tiles that share weights run next to each other: all but the first find them in the L2 cache.
    tile, part = tl.program_id(0), tl.program_id(1)
    tiles_m = tl.cdiv(rows, BLOCK_M)
    row_start, start = (tile % tiles_m) * BLOCK_M, (tile // tiles_m) * BLOCK_N
    steps = tl.cdiv(tl.cdiv(columns, BLOCK_K), PARTS)
    first_k, last_k = part * steps * BLOCK_K, tl.minimum((part + 1) * steps * BLOCK_K, columns)

    m = row_start + tl.arange(0, BLOCK_M)
    n = start + tl.arange(0, BLOCK_N)
    # Rows that don't exist cost no traffic. Past the last output, the last one is read again and
    # not stored, which costs less than a mask.
    x_lines = x + m.to(tl.int64)[:, None] * x_stride
    m_inside = (m < rows)[:, None]
    n_inside = tl.minimum(n, outputs - 1)
    w_lines = weight + n_inside.to(tl.int64)[:, None] * columns
    if PREFETCH > 0:
        LINE: tl.constexpr = 128 // (weight.dtype.element_ty.primitive_bitwidth // 8)
        if BLOCK_K >= LINE:
            ahead = first_k + tl.arange(0, PREFETCH * BLOCK_K // LINE) * LINE
            prefetch(w_lines + tl.minimum(ahead, columns - 1)[None, :], INTERPRETED)
    if PDL:
        gdc_launch_dependents()
        gdc_wait()

    WHOLE: tl.constexpr = x.dtype.element_ty.is_int()
    SCALED: tl.constexpr = SCALES == 2 or GROUP != 0  # scaled while summing, not afterwards
    if SWAP:
        sums = tl.zeros((BLOCK_N, BLOCK_M), tl.int32 if WHOLE and not SCALED else tl.float32)
    else:
        sums = tl.zeros((BLOCK_M, BLOCK_N), tl.int32 if WHOLE and not SCALED else tl.float32)
    squares = tl.zeros((BLOCK_M, BLOCK_K), tl.float32)
    for here in tl.range(first_k, last_k, BLOCK_K):
        k = here + tl.arange(0, BLOCK_K)
        if EVEN:
            a = tl.load(x_lines + k[None, :], mask=m_inside, other=0.0)
            w = tl.load(w_lines + k[None, :])
        else:
            inside = m_inside & (k < columns)[None, :]
            a = tl.load(x_lines + k[None, :], mask=inside, other=0.0)
            w = tl.load(w_lines + k[None, :], mask=(k < columns)[None, :], other=0.0)
        if WIDEN:
            w = widen_fp8(w, INTERPRETED)
            a = a.to(tl.bfloat16)
        if NORM:
            values = a.to(tl.float32)
            squares += values * values
            gains = tl.load(norm_weight + k, mask=k < columns, other=0.0).to(tl.float32)
            a = (values * gains[None, :]).to(a.dtype)
        if SCALED:
            fresh = tl.zeros(sums.shape, tl.int32 if WHOLE else tl.float32)
            if SWAP:
                fresh = multiply(w, tl.trans(a), fresh, INTERPRETED).to(tl.float32)
            else:
                fresh = multiply(a, tl.trans(w), fresh, INTERPRETED).to(tl.float32)
            step = here // BLOCK_K
            if GROUP != 0:
                factor = tl.load(row_scales + step * rows + m, mask=m < rows, other=0.0)
                fresh *= factor[None, :] if SWAP else factor[:, None]
            if SCALES == 2:
                block = tl.load(weight_scales + n_inside * tl.cdiv(columns, BLOCK_K) + step)
                if WIDEN and not INTERPRETED:
                    fresh *= 1329227995784915872903807060280344576.0  # 2^120
                fresh *= block[:, None] if SWAP else block[None, :]
            sums += fresh
        elif SWAP:
            sums = multiply(w, tl.trans(a), sums, INTERPRETED)
        else:
            sums = multiply(a, tl.trans(w), sums, INTERPRETED)

    total = sums.to(tl.float32)
    if SWAP:
        total = tl.trans(total)
    if WIDEN and not INTERPRETED and not SCALED:
        total *= 1329227995784915872903807060280344576.0  # 2^120
    if NORM:
        total *= tl.rsqrt(tl.sum(squares, 1) / columns + eps)[:, None]
    last = True
    if PARTS > 1:
        total, last = gather_parts(total, partials, counters, tile, part, PARTS)
    if last:
        if SCALES == 1:
            total *= tl.load(weight_scales + n_inside)[None, :]
        if SCALES != 0 and GROUP == 0 and not WIDEN:
            total *= tl.load(row_scales + m, mask=m < rows, other=0.0)[:, None]
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
