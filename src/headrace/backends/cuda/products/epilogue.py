"""What a product does with its sums before it stores them: bias, gate, residual; and how the parts
of a product that was split among programs are summed, always in the same order.

Knows a tile of sums and where it is stored; not how the sums were computed.
"""

from __future__ import annotations

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

ACTIVATION_NONE = 0
ACTIVATION_SILU = 1
ACTIVATION_GELU_TANH = 2


@triton.jit
def activate(x, ACTIVATION: tl.constexpr):
    """float32 in, float32 out. tanh is computed from the sigmoid, which is faster on a GPU."""
    if ACTIVATION == 1:
        return x * tl.sigmoid(x)
    else:
        return x * tl.sigmoid(1.5957691216057308 * (x + 0.044715 * x * x * x))


@triton.jit
def multiply(a, b, total, INTERPRETED: tl.constexpr):
    """total + a @ b. The interpreter has no bf16 arithmetic, and its float8 is f16."""
    if INTERPRETED and a.dtype.is_floating():
        return tl.dot(a.to(tl.float32), b.to(tl.float32), total, input_precision="ieee")
    elif a.dtype.is_fp8():
        # The matrix units accumulate fp8 products with few bits: move sums to float32 per tile.
        return tl.dot(a, b, total, max_num_imprecise_acc=a.shape[1])
    elif a.dtype.is_int():
        return tl.dot(a, b, total, out_dtype=tl.int32)
    else:
        return tl.dot(a, b, total, input_precision="ieee")


@triton.jit
def finish(
    sums,  # [BM, BN] f32
    out,
    bias,
    residual,
    row_start,
    column_start,
    rows,
    outputs,
    out_stride,
    residual_stride,
    ACTIVATION: tl.constexpr,
    BIAS: tl.constexpr,
    ADD: tl.constexpr,
):
    BM: tl.constexpr = sums.shape[0]
    BN: tl.constexpr = sums.shape[1]
    m = row_start + tl.arange(0, BM)
    if BIAS:
        n = column_start + tl.arange(0, BN)
        sums += tl.load(bias + n, mask=n < outputs, other=0.0)[None, :]
    if ACTIVATION == 0:
        values = sums
        n_out = column_start + tl.arange(0, BN)
        width = outputs
    else:
        gate, up = tl.split(tl.reshape(sums, (BM, BN // 2, 2)))
        values = activate(gate, ACTIVATION) * up
        n_out = column_start // 2 + tl.arange(0, BN // 2)
        width = outputs // 2
    mask = (m < rows)[:, None] & (n_out < width)[None, :]
    m = m.to(tl.int64)
    if ADD:
        before = residual + m[:, None] * residual_stride + n_out[None, :]
        values += tl.load(before, mask=mask, other=0.0).to(tl.float32)
    place = out + m[:, None] * out_stride + n_out[None, :]
    tl.store(place, values.to(out.dtype.element_ty), mask=mask)


@triton.jit
def gather_parts(sums, partials, counters, tile, part, PARTS: tl.constexpr):
    """Stores this program's part of a tile. The program that finishes last gets the sum of all
    parts, added in order of their number (not of arrival), and True."""
    BM: tl.constexpr = sums.shape[0]
    BN: tl.constexpr = sums.shape[1]
    offsets = tl.arange(0, BM)[:, None] * BN + tl.arange(0, BN)[None, :]
    base = partials + tile.to(tl.int64) * (PARTS * BM * BN)
    tl.store(base + part * (BM * BN) + offsets, sums)
    tl.debug_barrier()
    last = tl.atomic_add(counters + tile, 1, sem="acq_rel") == PARTS - 1
    if last:
        sums = tl.zeros((BM, BN), tl.float32)
        if BM * BN <= 1024:  # unrolled: all loads at once, if they fit into registers
            for other in tl.static_range(PARTS):
                sums += tl.load(base + other * (BM * BN) + offsets, cache_modifier=".cg")
        else:
            for other in range(PARTS):
                sums += tl.load(base + other * (BM * BN) + offsets, cache_modifier=".cg")
        tl.store(counters + tile, 0)  # ready for the next launch
    return sums, last


@triton.jit
def prefetch(addresses, INTERPRETED: tl.constexpr):
    """Prefetches weights into the L2 cache, before the rows that they are multiplied with are
    ready."""
    if not INTERPRETED:
        tl.inline_asm_elementwise(
            "prefetch.global.L2 [$1]; mov.u32 $0, 0;",
            "=r,l",
            [addresses],
            dtype=tl.int32,
            is_pure=False,
            pack=1,
        )


@triton.jit
def finish_kernel(
    sums,  # [rows, outputs], as computed by torch
    out,
    bias,
    residual,
    rows,
    outputs,
    sums_stride,
    out_stride,
    residual_stride,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    ACTIVATION: tl.constexpr,
    BIAS: tl.constexpr,
    ADD: tl.constexpr,
    PDL: tl.constexpr,
):
    """Only the epilogue, after a product that can't do it."""
    row_start, start = tl.program_id(0) * BLOCK_M, tl.program_id(1) * BLOCK_N
    m, n = row_start + tl.arange(0, BLOCK_M), start + tl.arange(0, BLOCK_N)
    if PDL:
        gdc_wait()
        gdc_launch_dependents()
    places = m.to(tl.int64)[:, None] * sums_stride + n[None, :]
    mask = (m < rows)[:, None] & (n < outputs)[None, :]
    finish(
        tl.load(sums + places, mask=mask, other=0.0).to(tl.float32),
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
