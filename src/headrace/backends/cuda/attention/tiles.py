"""Parts of attention kernels: a tile of queries against ranges of keys, and writing the results.

Only device functions. A tile is BLOCK_M queries of one sequence and one key/value head; scores are
in base 2. They know where keys are (blocks of a table) and what partial results are; not which
queries they compute.
"""

from __future__ import annotations

import triton
import triton.language as tl

from headrace.backends.cuda.products.epilogue import prefetch


@triton.jit
def tanh(x):
    return 2 * tl.sigmoid(2 * x) - 1


@triton.jit
def _load_tile(
    pool,
    lines,  # [BLOCK_N] of HEAD_DIM values; with DESCRIPTOR only the first
    exists,  # [BLOCK_N]
    MASKED: tl.constexpr,
    DESCRIPTOR: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    HEAD_PAD: tl.constexpr,
):
    """Keys or values [BLOCK_N, HEAD_PAD]. With MASKED, those that don't exist are 0: they were
    never written and may be NaN, and 0 * NaN is NaN."""
    dims = tl.arange(0, HEAD_PAD)[None, :]
    if DESCRIPTOR:
        tile = pool.load([lines, 0])
        if MASKED:
            tile = tl.where(exists[:, None], tile, 0.0)
    else:
        pointers = pool + lines.to(tl.int64)[:, None] * HEAD_DIM + dims
        if MASKED:
            tile = tl.load(pointers, mask=exists[:, None] & (dims < HEAD_DIM), other=0.0)
        elif HEAD_PAD == HEAD_DIM:
            tile = tl.load(pointers)
        else:
            tile = tl.load(pointers, mask=dims < HEAD_DIM, other=0.0)
    return tile


@triton.jit
def _find_lines(
    table,
    at,
    n,
    exists,
    head,
    DESCRIPTOR: tl.constexpr,
    KV_HEADS: tl.constexpr,
    BLOCK_TOKENS: tl.constexpr,
    BLOCK_N: tl.constexpr,
):
    """The line (of HEAD_DIM values) of each key n = at, at + 1, ... of the sequence."""
    if BLOCK_TOKENS >= BLOCK_N:  # tiles begin at multiples of BLOCK_N: one block holds them
        block = tl.load(table + at // BLOCK_TOKENS)
        line = (block * KV_HEADS + head) * BLOCK_TOKENS + at % BLOCK_TOKENS
        lines = line if DESCRIPTOR else line + tl.arange(0, BLOCK_N)
    else:
        blocks = tl.load(table + n // BLOCK_TOKENS, mask=exists, other=0)
        lines = (blocks * KV_HEADS + head) * BLOCK_TOKENS + n % BLOCK_TOKENS
    return lines


@triton.jit
def prefetch_keys(
    pool,
    value_lines,
    table,
    head,
    at,
    end,
    KV_HEADS: tl.constexpr,
    WIDTH: tl.constexpr,  # of a line, in the pool's elements
    BLOCK_TOKENS: tl.constexpr,
    BLOCK_N: tl.constexpr,
    INTERPRETED: tl.constexpr,
):
    """Prefetches the keys and values of a tile into the L2 cache."""
    STEP: tl.constexpr = 128 // (pool.dtype.element_ty.primitive_bitwidth // 8)
    if at < end:
        n = tl.minimum(at + tl.arange(0, BLOCK_N), end - 1)
        blocks = tl.load(table + n // BLOCK_TOKENS)
        lines = (blocks * KV_HEADS + head) * BLOCK_TOKENS + n % BLOCK_TOKENS
        parts = tl.arange(0, triton.next_power_of_2(triton.cdiv(WIDTH, STEP))) * STEP
        parts = tl.minimum(parts, WIDTH - 1)[None, :]
        keys = pool + lines.to(tl.int64)[:, None] * WIDTH + parts
        prefetch(keys, INTERPRETED)
        prefetch(keys + value_lines.to(tl.int64) * WIDTH, INTERPRETED)


@triton.jit
def _capped(scores, score_scale, SOFTCAP: tl.constexpr):
    """The scores, and a factor still to be applied in the exponent, where it costs nothing."""
    factor = score_scale
    if SOFTCAP > 0:
        scores = tanh(scores * score_scale)
        factor = SOFTCAP * 1.4426950408889634
    return scores, factor


@triton.jit
def _hidden(scores, n, exists, positions, WINDOW: tl.constexpr):
    """Scores of keys that a row does not see become -inf."""
    seen = (n[None, :] <= positions[:, None]) & exists[None, :]
    if WINDOW > 0:
        seen = seen & (n[None, :] > positions[:, None] - WINDOW)
    return tl.where(seen, scores, float("-inf"))


@triton.jit
def _weigh(scores, factor, best):
    """The weights of this tile's keys, the new maximum score, and the factor for older sums."""
    new_best = tl.maximum(best, tl.max(scores, 1) * factor)
    return tl.exp2(scores * factor - new_best[:, None]), new_best, tl.exp2(best - new_best)


@triton.jit
def attend_keys(
    total,  # [BLOCK_M, HEAD_PAD]: sum of weighted values
    best,  # [BLOCK_M]: greatest score so far, base 2
    weight,  # [BLOCK_M]: sum of weights relative to `best`
    q,  # [BLOCK_M, HEAD_PAD]
    positions,  # [BLOCK_M]: of the rows' tokens
    pool,
    value_lines,  # from a key's line to its value's
    table,  # the sequence's blocks
    head,
    first,
    last,
    end,  # keys from here on don't exist
    score_scale,
    MASKED: tl.constexpr,
    DESCRIPTOR: tl.constexpr,
    KV_HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    HEAD_PAD: tl.constexpr,
    BLOCK_TOKENS: tl.constexpr,
    BLOCK_N: tl.constexpr,
    WINDOW: tl.constexpr,
    SOFTCAP: tl.constexpr,
    DOT_TYPE: tl.constexpr,
    STAGES: tl.constexpr,
):
    """Attends to keys [first, last), tile by tile; MASKED if some rows may not see all of them."""
    for at in tl.range(first, last, BLOCK_N, num_stages=STAGES):
        n = at + tl.arange(0, BLOCK_N)
        exists = n < end
        lines = _find_lines(table, at, n, exists, head, DESCRIPTOR, KV_HEADS, BLOCK_TOKENS, BLOCK_N)
        k = _load_tile(pool, lines, exists, MASKED, DESCRIPTOR, HEAD_DIM, HEAD_PAD)
        scores = tl.dot(q, tl.trans(k.to(DOT_TYPE)), input_precision="ieee")
        scores, factor = _capped(scores, score_scale, SOFTCAP)
        if MASKED:
            scores = _hidden(scores, n, exists, positions, WINDOW)
        p, new_best, shrink = _weigh(scores, factor, best)
        weight = weight * shrink + tl.sum(p, 1)
        total = total * shrink[:, None]
        v = _load_tile(pool, lines + value_lines, exists, MASKED, DESCRIPTOR, HEAD_DIM, HEAD_PAD)
        total = tl.dot(p.to(DOT_TYPE), v.to(DOT_TYPE), total, input_precision="ieee")
        best = new_best
    return total, best, weight


@triton.jit
def _halves_of(pairs, INTERPRETED: tl.constexpr):
    """Splits int16 with two e4m3 values each into two float16 tensors: low bytes and high bytes.

    The conversion instruction takes two adjacent bytes; the compiler's own conversion would load
    them one by one.
    """
    if INTERPRETED:  # shifts the bits: float16's exponent bias is larger by 8
        low = ((pairs & 0x80) << 8) | ((pairs & 0x7F) << 7)
        high = (pairs & -0x8000) | ((pairs & 0x7F00) >> 1)
        low = (low.to(tl.int16).to(tl.float16, bitcast=True).to(tl.float32) * 256).to(tl.float16)
        high = (high.to(tl.int16).to(tl.float16, bitcast=True).to(tl.float32) * 256).to(tl.float16)
    else:
        low = tl.inline_asm_elementwise(
            "{ .reg .b32 a; .reg .b16 l, h; prmt.b32 a, $1, 0, 0x0020; mov.b32 {l, h}, a; "
            "cvt.rn.f16x2.e4m3x2 $0, l; }",
            "=r,r", [pairs], dtype=tl.float16, is_pure=True, pack=2,
        )  # fmt: skip
        high = tl.inline_asm_elementwise(
            "{ .reg .b32 a; .reg .b16 l, h; prmt.b32 a, $1, 0, 0x0031; mov.b32 {l, h}, a; "
            "cvt.rn.f16x2.e4m3x2 $0, l; }",
            "=r,r", [pairs], dtype=tl.float16, is_pure=True, pack=2,
        )  # fmt: skip
    return low, high


@triton.jit
def attend_pairs(
    total,
    best,
    weight,
    q,
    positions,
    pool,  # int16: two e4m3 values each
    value_lines,
    table,
    head,
    first,
    last,
    end,
    score_scale,
    KV_HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    HEAD_PAD: tl.constexpr,
    BLOCK_TOKENS: tl.constexpr,
    BLOCK_N: tl.constexpr,
    WINDOW: tl.constexpr,
    SOFTCAP: tl.constexpr,
    STAGES: tl.constexpr,
    INTERPRETED: tl.constexpr,
):
    """attend_keys for one-byte keys and values, MASKED: even and odd dimensions are separate."""
    BLOCK_M: tl.constexpr = q.shape[0]
    WIDTH: tl.constexpr = HEAD_PAD // 2
    q_even, q_odd = tl.split(tl.reshape(q.to(tl.float16), [BLOCK_M, WIDTH, 2]))
    even, odd = tl.split(tl.reshape(total, [BLOCK_M, WIDTH, 2]))
    for at in tl.range(first, last, BLOCK_N, num_stages=STAGES):
        n = at + tl.arange(0, BLOCK_N)
        exists = n < end
        lines = _find_lines(table, at, n, exists, head, False, KV_HEADS, BLOCK_TOKENS, BLOCK_N)
        k = _load_tile(pool, lines, exists, True, False, HEAD_DIM // 2, WIDTH)
        k_even, k_odd = _halves_of(k, INTERPRETED)
        scores = tl.dot(q_even, tl.trans(k_even))
        scores = tl.dot(q_odd, tl.trans(k_odd), scores)
        scores, factor = _capped(scores, score_scale, SOFTCAP)
        scores = _hidden(scores, n, exists, positions, WINDOW)
        p, new_best, shrink = _weigh(scores, factor, best)
        weight = weight * shrink + tl.sum(p, 1)
        p = p.to(tl.float16)
        v = _load_tile(pool, lines + value_lines, exists, True, False, HEAD_DIM // 2, WIDTH)
        v_even, v_odd = _halves_of(v, INTERPRETED)
        even = tl.dot(p, v_even, even * shrink[:, None])
        odd = tl.dot(p, v_odd, odd * shrink[:, None])
        best = new_best
    return tl.reshape(tl.join(even, odd), [BLOCK_M, HEAD_PAD]), best, weight


@triton.jit
def _join(
    sums,
    weights,
    splits,
    rows,
    HEAD_DIM: tl.constexpr,
    HEAD_PAD: tl.constexpr,
    KV_HEADS: tl.constexpr,
    BLOCK_M: tl.constexpr,
):
    """Adds up the partial results of one tile and key/value head, starting at its first."""
    r = tl.arange(0, BLOCK_M)
    dims = tl.arange(0, HEAD_PAD)
    total = tl.zeros([BLOCK_M, HEAD_PAD], tl.float32)
    best = tl.full([BLOCK_M], -1.0e30, tl.float32)
    weight = tl.zeros([BLOCK_M], tl.float32)
    mine = r < rows
    held = mine[:, None] & (dims < HEAD_DIM)[None, :]
    cells = r[:, None] * HEAD_DIM + dims[None, :]
    # As many loads at once as the registers allow.
    for split in tl.range(0, splits, loop_unroll_factor=4 if BLOCK_M * HEAD_PAD <= 2048 else 1):
        at = split * KV_HEADS * BLOCK_M
        # From the L2 cache: other multiprocessors wrote these.
        b = tl.load(weights + 2 * at + r, mask=mine, other=-1.0e30, cache_modifier=".cg")
        w = tl.load(weights + 2 * at + BLOCK_M + r, mask=mine, other=0.0, cache_modifier=".cg")
        part = tl.load(sums + at * HEAD_DIM + cells, mask=held, other=0.0, cache_modifier=".cg")
        new_best = tl.maximum(best, b)
        old = tl.exp2(best - new_best)
        new = tl.exp2(b - new_best)
        weight = weight * old + w * new
        total = total * old[:, None] + part * new[:, None]
        best = new_best
    return total, weight


@triton.jit
def _write(answer, total, weight, kv_scale, held):
    total = total * (kv_scale / tl.where(weight > 0, weight, 1.0))[:, None]
    tl.store(answer, total.to(answer.dtype.element_ty), mask=held)


@triton.jit
def finish(
    total,
    best,
    weight,
    answer,  # [BLOCK_M, HEAD_PAD] pointers to where results go
    rows,  # of the tile that are real
    partial,
    split,
    splits,
    head,
    kv_scale,
    sums,  # [partials, KV_HEADS, BLOCK_M, HEAD_DIM]
    weights,  # [partials, KV_HEADS, 2, BLOCK_M]: greatest score, sum of weights
    counters,  # [partials, KV_HEADS]
    KV_HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    HEAD_PAD: tl.constexpr,
    BLOCK_M: tl.constexpr,
):
    """Write a tile's results. If it was split, store this range's partial result, and if this is
    the last range, add up all of them."""
    r = tl.arange(0, BLOCK_M)
    dims = tl.arange(0, HEAD_PAD)
    held = (r < rows)[:, None] & (dims < HEAD_DIM)[None, :]
    if splits > 1:
        at = ((partial + split) * KV_HEADS + head) * BLOCK_M
        cells = r[:, None] * HEAD_DIM + dims[None, :]
        tl.store(sums + at * HEAD_DIM + cells, total, mask=held)
        tl.store(weights + 2 * at + r, best)
        tl.store(weights + 2 * at + BLOCK_M + r, weight)
        tl.debug_barrier()  # all warps must have stored before the counter changes
        counter = counters + partial * KV_HEADS + head
        before = tl.atomic_add(counter, 1, sem="acq_rel", scope="gpu")
        if before == splits - 1:
            tl.store(counter, 0)
            at = (partial * KV_HEADS + head) * BLOCK_M
            total, weight = _join(
                sums + at * HEAD_DIM, weights + 2 * at, splits, rows,
                HEAD_DIM, HEAD_PAD, KV_HEADS, BLOCK_M,
            )  # fmt: skip
            _write(answer, total, weight, kv_scale, held)
    else:
        _write(answer, total, weight, kv_scale, held)
