"""A product with INT4 weights on the matrix units, for any number of rows, and their unpacking.

Weights are stored in chunks of 128 columns, 32 words of 16 bits per output: part j of a word (bits
4j to 4j + 3) is a column of the j-th quarter. A part is turned into bf16 in place by a fixed
exponent (0x43..: 128 plus the code), two words per register; then 128 and the zero point are
subtracted: exact, and 1.4 instructions per weight. Words are in the order in which the matrix units
read 16-bit values, so that nothing has to be shuffled, and their rows are the outputs: up to 8 rows
of x cost no more than one. A group's scale multiplies the group's sums, not its weights.

A group's scale and zero point are stored in one number, so that both are loaded ahead of use,
together with the weights: the compiler only pipelines loads of what the matrix units read, which
the zero point is part of.
"""

from __future__ import annotations

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from headrace.backends.cuda.products.epilogue import finish, gather_parts, multiply, prefetch

SCALE_F16 = tl.constexpr(0)
SCALE_BF16 = tl.constexpr(1)
SCALE_F32 = tl.constexpr(2)

# c - point as c + point * -1: before capability 9.0 there is no subtraction of bf16 pairs, and from
# then on both compile to this instruction.
_TAKE = (
    "{{ .reg .b32 c, minus; {} lop3.b32 c, c, 0x000F000F, 0x43004300, 0xEA; "
    "mov.b32 minus, 0xBF80BF80; fma.rn.bf16x2 $0, $2, minus, c; }}"
)
_TAKE_0 = tl.constexpr(_TAKE.format("mov.b32 c, $1;"))
_TAKE_1 = tl.constexpr(_TAKE.format("shr.u32 c, $1, 4;"))
_TAKE_2 = tl.constexpr(_TAKE.format("shr.u32 c, $1, 8;"))
_TAKE_3 = tl.constexpr(_TAKE.format("shr.u32 c, $1, 12;"))


@triton.jit
def _taken(words, points, ASM: tl.constexpr):
    return tl.inline_asm_elementwise(
        ASM, "=r,r,r", [words, points], dtype=tl.bfloat16, is_pure=True, pack=2
    )


@triton.jit
def take_codes(words, points, PART: tl.constexpr, INTERPRETED: tl.constexpr):
    """The codes in one part of the words minus the zero points, in bf16. `points` are 128 + zero
    point, in bf16."""
    if INTERPRETED:
        codes = ((words.to(tl.int32) >> (4 * PART)) & 15).to(tl.float32)
        return (codes + 128.0 - points.to(tl.float32)).to(tl.bfloat16)
    elif PART == 0:
        return _taken(words, points, _TAKE_0)
    elif PART == 1:
        return _taken(words, points, _TAKE_1)
    elif PART == 2:
        return _taken(words, points, _TAKE_2)
    else:
        return _taken(words, points, _TAKE_3)


@triton.jit
def split_factors(both, SCALE: tl.constexpr):
    """A group's scale (f32) and 128 + its zero point (bf16)."""
    points = (both & 0xFFFF).to(tl.uint16).to(tl.bfloat16, bitcast=True)
    if SCALE == SCALE_F16:
        scales = (both >> 16).to(tl.int16).to(tl.float16, bitcast=True).to(tl.float32)
    elif SCALE == SCALE_BF16:
        scales = ((both >> 16) << 16).to(tl.float32, bitcast=True)
    else:
        scales = (both >> 32).to(tl.int32).to(tl.float32, bitcast=True)
    return scales, points


@triton.jit(do_not_specialize=["rows"])
def int4_kernel(
    x,  # [rows, columns]
    weight,  # [chunks, outputs, 32] words; a chunk: 128 columns
    factors,  # [groups, outputs]: scale and zero point, for whole chunks
    out,
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
    SCALE: tl.constexpr,
    PARTS: tl.constexpr,
    STAGES: tl.constexpr,
    EVEN: tl.constexpr,  # columns are whole chunks
    ACTIVATION: tl.constexpr,
    BIAS: tl.constexpr,
    ADD: tl.constexpr,
    PDL: tl.constexpr,
    LATE: tl.constexpr,  # with PDL: the next kernel may start only when the sums are complete
    PREFETCH: tl.constexpr,  # chunks of weights to prefetch before x is ready: a power of two
    INTERPRETED: tl.constexpr,
):
    WORDS: tl.constexpr = 32
    GROUPS: tl.constexpr = 128 // GROUP  # in a chunk
    QUARTERS: tl.constexpr = 4 // GROUPS  # of a chunk, in a group
    tile, part = tl.program_id(0), tl.program_id(1)
    tiles_m = tl.cdiv(rows, BLOCK_M)
    row_start, start = (tile % tiles_m) * BLOCK_M, (tile // tiles_m) * BLOCK_N
    chunks = tl.cdiv(columns, 128)
    steps = tl.cdiv(chunks, PARTS)
    first, end = part * steps, tl.minimum((part + 1) * steps, chunks)

    m = row_start + tl.arange(0, BLOCK_M)
    # Past the last output, other outputs are read again and not stored: cheaper than a mask, and
    # the compiler still sees that addresses are contiguous.
    n = (start + tl.arange(0, BLOCK_N)) % outputs
    k = tl.arange(0, WORDS)
    x_lines = x + m.to(tl.int64)[:, None] * x_stride + k[None, :]
    m_inside = (m < rows)[:, None]  # rows that don't exist cost no traffic
    w_tile = weight + n[:, None] * WORDS + k[None, :]
    f_tile = factors + n
    group_stride = outputs.to(tl.int64)
    chunk_stride = group_stride * WORDS
    if PREFETCH > 0:
        ahead = tl.minimum(first + tl.arange(0, PREFETCH), tl.maximum(end - 1, 0))
        # Two outputs per cache line of 128 bytes.
        pairs = (start + tl.arange(0, BLOCK_N // 2) * 2) % outputs
        lines = weight + pairs[:, None] * WORDS + ahead[None, :] * chunk_stride
        prefetch(lines, INTERPRETED)
        each = (start + tl.arange(0, BLOCK_N // 16) * 16) % outputs
        prefetch(factors + each[:, None] + (ahead * GROUPS)[None, :] * group_stride, INTERPRETED)
    if PDL:
        if not LATE:
            gdc_launch_dependents()
        gdc_wait()

    sums = tl.zeros((BLOCK_N, BLOCK_M), tl.float32)
    for chunk in tl.range(first, end, num_stages=STAGES):
        words = tl.load(w_tile + chunk * chunk_stride)
        for quarter in tl.static_range(4):
            if quarter % QUARTERS == 0:
                both = tl.load(f_tile + (chunk * GROUPS + quarter // QUARTERS) * group_stride)
                scales, points = split_factors(both, SCALE)
                fresh = tl.zeros((BLOCK_N, BLOCK_M), tl.float32)
            column = chunk * 128 + quarter * WORDS
            if EVEN:
                a = tl.load(x_lines + column, mask=m_inside, other=0.0)
            else:
                inside = m_inside & (k < columns - column)[None, :]
                a = tl.load(x_lines + column, mask=inside, other=0.0)
            w = take_codes(words, points[:, None], quarter, INTERPRETED)
            fresh = multiply(w, tl.trans(a.to(tl.bfloat16)), fresh, INTERPRETED)
            if quarter % QUARTERS == QUARTERS - 1:
                sums += fresh * scales[:, None]

    if PDL and LATE:
        gdc_launch_dependents()
    total = tl.trans(sums)
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
    weight,  # [chunks, outputs, 32] words
    factors,  # [groups, outputs]
    out,  # [outputs, columns]
    outputs,
    columns,
    BLOCK_N: tl.constexpr,
    GROUP: tl.constexpr,
    SCALE: tl.constexpr,
    PDL: tl.constexpr,
):
    """The matrix in bf16, for torch's product of many rows."""
    GROUPS: tl.constexpr = 128 // GROUP
    chunk = tl.program_id(0).to(tl.int64)
    n = tl.program_id(1) * BLOCK_N + tl.arange(0, BLOCK_N)
    inside = n < outputs
    k = tl.arange(0, 32)
    words = tl.load(
        weight + (chunk * outputs + n)[:, None] * 32 + k[None, :], mask=inside[:, None], other=0
    )
    if PDL:
        gdc_wait()
        gdc_launch_dependents()
    for quarter in tl.static_range(4):
        group = chunk * GROUPS + quarter // (4 // GROUPS)
        both = tl.load(factors + group * outputs + n, mask=inside, other=0)
        scales, points = split_factors(both, SCALE)
        points = points.to(tl.float32) - 128.0
        codes = ((words.to(tl.int32) >> (4 * quarter)) & 15).to(tl.float32)
        values = (codes - points[:, None]) * scales[:, None]
        column = chunk * 128 + quarter * 32 + k
        lines = out + n.to(tl.int64)[:, None] * columns + column[None, :]
        kept = inside[:, None] & (column < columns)[None, :]
        tl.store(lines, values.to(out.dtype.element_ty), mask=kept)


@triton.jit
def widen_kernel(
    weight,  # [outputs, columns] fp8 or int8
    weight_scales,  # [outputs], or [outputs, columns / BLOCK_K] with BLOCKED
    out,  # [outputs, columns]
    outputs,
    columns,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    BLOCKED: tl.constexpr,
    PDL: tl.constexpr,
):
    """An FP8 or INT8 matrix in bf16, for torch's product of many rows."""
    n = tl.program_id(1) * BLOCK_N + tl.arange(0, BLOCK_N)
    k = tl.program_id(0) * BLOCK_K + tl.arange(0, BLOCK_K)
    mask = (n < outputs)[:, None] & (k < columns)[None, :]
    places = n.to(tl.int64)[:, None] * columns + k[None, :]
    values = tl.load(weight + places, mask=mask, other=0.0).to(tl.float32)
    factors = n
    if BLOCKED:
        factors = n * tl.cdiv(columns, BLOCK_K) + tl.program_id(0)
    scales = tl.load(weight_scales + factors, mask=n < outputs, other=0.0)
    if PDL:
        gdc_wait()
        gdc_launch_dependents()
    tl.store(out + places, (values * scales[:, None]).to(out.dtype.element_ty), mask=mask)
