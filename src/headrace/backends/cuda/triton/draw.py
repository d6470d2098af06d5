"""Kernels that draw a token of each row, in the order of backends/reference/sampling.py, without
sorting and with many programs a row.

A token's depth is how far its logit lies below the largest, in 2**30 steps down to the least that
may be drawn. Where top_k or top_p cut a row:

    spread   what the tokens weigh above each of 8 depths; for top_k each weighs 1
    count    how many tokens lie in each of 64 bins between the two depths where the cut must lie
    choose   the bins in which it lies, by what a bin's tokens weigh at least and at most; where
             that leaves too many, by what they weigh on the average
    weigh    what each block of the row weighs above those bins; the tokens in them are written out
             as candidates
    take     where among the candidates the row ends; the block that the draw falls into, in order
             of id; the token

Rows that are not cut need only `weigh` and `take`. Where the candidates do not decide (more tokens
of one depth than there is room for; top_p after a large top_k), `search` walks the row again and
again: slow, and rare. Weights are float32, as on the CPU, and their sums float64, in a fixed
order or exact. Knows rows of logits and what is asked of each; nothing of steps and sequences.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl

BLOCK = 2048  # tokens
BINS = 64
DEPTHS = 8
WIDE = 4 * BLOCK  # tokens that are counted together: a histogram costs much by itself
MOST_PIECES = 16  # of a row: the programs that count and weigh it
CANDIDATES = 2048  # most of a cut; twice as many where a vocabulary is large
LARGE_VOCAB = 1 << 17
STATES = 4  # int32 of a row, between kernels
EDGES = 2  # float32 likewise
# Of each kernel's programs, as measured on an H200 (benchmarks/cuda/draws.py).
WARPS = {"spread": 8, "count": 8, "choose": 4, "weigh": 8, "take": 8, "search": 16}

# A row of what is asked: 24 int32, of which the first 12 are 6 float64.
ASKED = tl.constexpr(24)
TEMPERATURE, INVERSE, TOP_P, LEAST, DEPTH, UNIFORM = (tl.constexpr(i) for i in range(6))
KIND, TOP_K = tl.constexpr(16), tl.constexpr(17)

# What becomes of a row; the first two are said by whoever asks (KIND).
NOTHING, DRAW = tl.constexpr(0), tl.constexpr(1)
_LIKELIEST = tl.constexpr(2)
_CUT = tl.constexpr(3)
_SEARCH = tl.constexpr(4)
_NONE_ALLOWED = tl.constexpr(5)
_PAST_RANGE = tl.constexpr(6)

_MODE, _BEFORE, _FOUND = (tl.constexpr(i) for i in range(3))
_STATES = tl.constexpr(STATES)
_LOW, _HIGH = tl.constexpr(0), tl.constexpr(1)
_DEPTHS = tl.constexpr(1073741824.0)  # 2**30
_STEP_DEPTHS = tl.constexpr(134217728.0)  # between the 8 depths
_LOWEST = tl.constexpr(-0x7FFFFFFFFFFFFFFF)
_HIGHEST = tl.constexpr(0x7FFFFFFFFFFFFFFF)


@triton.jit
def key_of(x, offsets):
    """Numbers whose order, largest first, is (logit descending, id ascending)."""
    bits = (x + 0.0).to(tl.int32, bitcast=True)  # + 0.0: there is one zero
    ordered = bits ^ ((bits >> 31) & 0x7FFFFFFF)
    return ordered.to(tl.int64) * 4294967296 + (4294967295 - offsets.to(tl.int64))


@triton.jit
def _scale(largest, smallest, temperature, depth):
    """Depths a logit: down to the least weight, or to the smallest logit where that is nearer."""
    width = tl.minimum(depth * temperature, largest.to(tl.float64) - smallest.to(tl.float64))
    # A little less than all of them: rounding takes nothing that may be drawn past the last bin.
    scale = 1072693248.0 / tl.maximum(width, 1e-30)
    return tl.minimum(scale, 1e30).to(tl.float32)


@triton.jit
def _depth(x, largest, scale):
    """Of each logit; _DEPTHS or more if it lies too deep to be drawn. The same in every kernel."""
    return tl.minimum((largest - x) * scale, 2.0 * _DEPTHS)


@triton.jit
def _sharpness(inverse):
    """What logits are multiplied with to be exponents of 2. One next to infinity must not become
    it: 0 * infinity is no number."""
    return tl.minimum(inverse * 1.4426950408889634, 1e30).to(tl.float32)


@triton.jit
def _weight(x, largest, sharpness):
    return tl.exp2((x - largest) * sharpness)


@triton.jit
def _sum(weights, BLOCK: tl.constexpr):
    """In float64, after four at a time in float32: conversions cost more than sums."""
    return tl.sum(tl.sum(tl.reshape(weights, (BLOCK // 4, 4)), 1).to(tl.float64), 0)


@triton.jit(do_not_specialize=["pieces"])
def _spread_kernel(
    logits,
    asked_f64,
    asked,
    maxima,
    minima,
    masses,
    vocab,
    pieces,
    PIECES: tl.constexpr,
    BLOCK: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    piece = tl.program_id(1)
    numbers = asked_f64 + row * (ASKED // 2)
    kind = tl.load(asked + row * ASKED + KIND)
    temperature = tl.load(numbers + TEMPERATURE)
    top_k = tl.load(asked + row * ASKED + TOP_K)
    by_k = (top_k > 0) & (top_k < vocab)
    by_p = tl.load(numbers + TOP_P) < 1.0
    if (kind == DRAW) & (temperature > 0.0) & (by_k | by_p):
        parts = row * PIECES + tl.arange(0, PIECES)
        largest = tl.max(tl.load(maxima + parts), 0)
        smallest = tl.min(tl.load(minima + parts), 0)
        scale = _scale(largest, smallest, temperature, tl.load(numbers + DEPTH))
        tokens = tl.cdiv(tl.cdiv(vocab, 2 * BLOCK), pieces) * 2 * BLOCK
        first = piece * tokens
        end = tl.minimum(first + tokens, vocab)
        sharpness = _sharpness(tl.load(numbers + INVERSE))
        least = tl.load(numbers + LEAST).to(tl.float32)
        above_1 = tl.zeros((BLOCK,), tl.float32)
        above_2 = tl.zeros((BLOCK,), tl.float32)
        above_3 = tl.zeros((BLOCK,), tl.float32)
        above_4 = tl.zeros((BLOCK,), tl.float32)
        above_5 = tl.zeros((BLOCK,), tl.float32)
        above_6 = tl.zeros((BLOCK,), tl.float32)
        above_7 = tl.zeros((BLOCK,), tl.float32)
        whole = tl.zeros((BLOCK,), tl.float32)
        for at in range(first, end, BLOCK):
            ids = at + tl.arange(0, BLOCK)
            x = tl.load(logits + row * vocab + ids, mask=ids < end, other=float("-inf"))
            depth = _depth(x, largest, scale)
            weight = _weight(x, largest, sharpness)
            weight = tl.where(weight >= least, weight, 0.0)
            if by_k:
                weight = tl.where(depth < _DEPTHS, 1.0, 0.0)
            above_1 += tl.where(depth < 1 * _STEP_DEPTHS, weight, 0.0)
            above_2 += tl.where(depth < 2 * _STEP_DEPTHS, weight, 0.0)
            above_3 += tl.where(depth < 3 * _STEP_DEPTHS, weight, 0.0)
            above_4 += tl.where(depth < 4 * _STEP_DEPTHS, weight, 0.0)
            above_5 += tl.where(depth < 5 * _STEP_DEPTHS, weight, 0.0)
            above_6 += tl.where(depth < 6 * _STEP_DEPTHS, weight, 0.0)
            above_7 += tl.where(depth < 7 * _STEP_DEPTHS, weight, 0.0)
            whole += weight
        place = masses + (row * pieces + piece) * 8
        tl.store(place, tl.sum(above_1, 0))
        tl.store(place + 1, tl.sum(above_2, 0))
        tl.store(place + 2, tl.sum(above_3, 0))
        tl.store(place + 3, tl.sum(above_4, 0))
        tl.store(place + 4, tl.sum(above_5, 0))
        tl.store(place + 5, tl.sum(above_6, 0))
        tl.store(place + 6, tl.sum(above_7, 0))
        tl.store(place + 7, tl.sum(whole, 0))


@triton.jit
def _layer(row, by_k, top_k, top_p, masses, pieces, MOST_PIECES: tl.constexpr):
    """Where the cut lies, as far as `spread` can say: the number of the depth above it, what weighs
    more than that, and what the cut leaves."""
    each = tl.arange(0, MOST_PIECES)[:, None]
    steps = tl.arange(0, 8)
    at = (row * pieces + each) * 8 + steps[None, :]
    mass = tl.sum(tl.load(masses + at, mask=each < pieces, other=0.0).to(tl.float64), 0)
    left = tl.where(by_k, top_k.to(tl.float64), top_p * tl.max(mass, 0))
    step = tl.min(tl.where(mass >= left, steps, 7), 0)
    above = tl.sum(tl.where(steps == step - 1, mass, 0.0), 0)
    return step, above, left


@triton.jit(do_not_specialize=["pieces"])
def _count_kernel(
    logits,
    asked_f64,
    asked,
    maxima,
    minima,
    masses,
    counts,
    vocab,
    pieces,
    PIECES: tl.constexpr,
    MOST_PIECES: tl.constexpr,
    BLOCK: tl.constexpr,
    WIDE: tl.constexpr,
    BINS: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    piece = tl.program_id(1)
    numbers = asked_f64 + row * (ASKED // 2)
    kind = tl.load(asked + row * ASKED + KIND)
    temperature = tl.load(numbers + TEMPERATURE)
    top_k = tl.load(asked + row * ASKED + TOP_K)
    top_p = tl.load(numbers + TOP_P)
    by_k = (top_k > 0) & (top_k < vocab)
    if (kind == DRAW) & (temperature > 0.0) & (by_k | (top_p < 1.0)):
        parts = row * PIECES + tl.arange(0, PIECES)
        largest = tl.max(tl.load(maxima + parts), 0)
        smallest = tl.min(tl.load(minima + parts), 0)
        scale = _scale(largest, smallest, temperature, tl.load(numbers + DEPTH))
        step, _above, _left = _layer(row, by_k, top_k, top_p, masses, pieces, MOST_PIECES)
        top = step * _STEP_DEPTHS
        tokens = tl.cdiv(tl.cdiv(vocab, BLOCK), pieces) * BLOCK
        first = piece * tokens
        end = tl.minimum(first + tokens, vocab)
        found = tl.zeros((BINS,), tl.int32)
        for at in range(first, end, WIDE):
            ids = at + tl.arange(0, WIDE)
            x = tl.load(logits + row * vocab + ids, mask=ids < end, other=float("-inf"))
            depth = _depth(x, largest, scale)
            place = (depth - top) * (BINS / _STEP_DEPTHS)
            inside = (depth >= top) & (depth < top + _STEP_DEPTHS)
            found += tl.histogram(place.to(tl.int32), BINS, mask=inside)
        bins = tl.arange(0, BINS)
        tl.store(counts + (row * pieces + piece) * BINS + bins, found)


@triton.jit
def _first(condition, bins, otherwise):
    """The first bin for which it holds."""
    return tl.min(tl.where(condition, bins, otherwise), 0)


@triton.jit(do_not_specialize=["pieces"])
def _choose_kernel(
    asked_f64,
    asked,
    maxima,
    minima,
    masses,
    counts,
    states,
    edges,
    vocab,
    pieces,
    PIECES: tl.constexpr,
    MOST_PIECES: tl.constexpr,
    BINS: tl.constexpr,
    CANDIDATES: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    numbers = asked_f64 + row * (ASKED // 2)
    temperature = tl.load(numbers + TEMPERATURE)
    top_k = tl.load(asked + row * ASKED + TOP_K)
    top_p = tl.load(numbers + TOP_P)
    mode = tl.load(asked + row * ASKED + KIND)
    parts = row * PIECES + tl.arange(0, PIECES)
    largest = tl.max(tl.load(maxima + parts), 0)
    by_k = (top_k > 0) & (top_k < vocab)
    by_p = top_p < 1.0
    drawn = tl.where(temperature == 0.0, _LIKELIEST, tl.where(by_k | by_p, _CUT, DRAW))
    drawn = tl.where(largest == float("inf"), _PAST_RANGE, drawn)
    drawn = tl.where(largest == float("-inf"), _NONE_ALLOWED, drawn)
    mode = tl.where(mode == DRAW, drawn, mode)
    if mode == _CUT:
        smallest = tl.min(tl.load(minima + parts), 0)
        scale = _scale(largest, smallest, temperature, tl.load(numbers + DEPTH))
        step, above, left = _layer(row, by_k, top_k, top_p, masses, pieces, MOST_PIECES)
        top = step * _STEP_DEPTHS
        bins = tl.arange(0, BINS)
        each = tl.arange(0, MOST_PIECES)
        at = (row * pieces + each[:, None]) * BINS + bins[None, :]
        by_piece = tl.load(counts + at, mask=each[:, None] < pieces, other=0)
        count = tl.sum(by_piece, 0)
        # What a token weighs at the top of its bin, at its end, and on the average.
        nats = tl.load(numbers + INVERSE) / scale.to(tl.float64)
        bin_nats = (_STEP_DEPTHS / BINS) * nats
        heaviest = tl.exp(-((top + bins * (_STEP_DEPTHS / BINS)).to(tl.float64) * nats))
        lightest = heaviest * tl.exp(-bin_nats)
        average = (heaviest - lightest) / tl.maximum(bin_nats, 1e-6)
        average = tl.where(bin_nats > 1e-6, average, heaviest)
        heaviest = tl.where(by_k, 1.0, heaviest * (1.0 + 1e-5))
        lightest = tl.where(lightest < tl.load(numbers + LEAST), 0.0, lightest * (1.0 - 1e-5))
        lightest = tl.where(by_k, 1.0, lightest)
        many = count.to(tl.float64)
        slack = tl.where(by_k, 0.0, 1e-6 * left)  # float32 sums were compared with
        first = _first(above + tl.cumsum(many * heaviest, 0) >= left - slack, bins, BINS - 1)
        last = _first(above + tl.cumsum(many * lightest, 0) >= left + slack, bins, BINS - 1)
        if tl.sum(tl.where((bins >= first) & (bins <= last), count, 0), 0) > CANDIDATES:
            likely = above + tl.cumsum(many * average, 0)
            slack = tl.where(by_k, 0.0, 0.0003 * left)
            first = tl.where(by_k, first, _first(likely >= left - slack, bins, BINS - 1))
            last = tl.where(by_k, last, _first(likely >= left + slack, bins, BINS - 1))
        of_piece = tl.sum(tl.where((bins >= first) & (bins <= last), by_piece, 0), 1)
        low = top + first * (_STEP_DEPTHS / BINS)
        high = top + (last + 1) * (_STEP_DEPTHS / BINS)
        before = tl.where(by_k, above, 0.0).to(tl.int32)
        before += tl.sum(tl.where(bins < first, count, 0), 0)
        if by_k & by_p:  # whatever lies above is to be cut once more: all are candidates
            of_piece += tl.where(each == 0, before, 0)
            low = low * 0.0
            before = before * 0
        found = tl.sum(of_piece, 0)
        mode = tl.where(found > CANDIDATES, _SEARCH, mode)
        tl.store(edges + row * 2 + _LOW, low)
        tl.store(edges + row * 2 + _HIGH, high)
        tl.store(states + row * _STATES + _BEFORE, before)
        tl.store(states + row * _STATES + _FOUND, 0)
    tl.store(states + row * _STATES + _MODE, mode)


@triton.jit(do_not_specialize=["pieces"])
def _weigh_kernel(
    logits,
    asked_f64,
    maxima,
    minima,
    states,
    edges,
    sums,
    totals,
    candidates,
    vocab,
    pieces,
    PIECES: tl.constexpr,
    MOST_PIECES: tl.constexpr,
    BLOCKS: tl.constexpr,
    BLOCK: tl.constexpr,
    CANDIDATES: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    piece = tl.program_id(1)
    mode = tl.load(states + row * _STATES + _MODE)
    if (mode == DRAW) | (mode == _CUT):
        numbers = asked_f64 + row * (ASKED // 2)
        sharpness = _sharpness(tl.load(numbers + INVERSE))
        least = tl.load(numbers + LEAST).to(tl.float32)
        parts = row * PIECES + tl.arange(0, PIECES)
        largest = tl.max(tl.load(maxima + parts), 0)
        smallest = tl.min(tl.load(minima + parts), 0)
        temperature = tl.load(numbers + TEMPERATURE)
        scale = _scale(largest, smallest, temperature, tl.load(numbers + DEPTH))
        low = tl.load(edges + row * 2 + _LOW)
        high = tl.minimum(tl.load(edges + row * 2 + _HIGH), _DEPTHS)
        next_place = states + row * _STATES + _FOUND
        blocks = tl.cdiv(tl.cdiv(vocab, BLOCK), pieces)
        first = piece * blocks
        all_weights = tl.zeros((BLOCK // 4,), tl.float64)
        for block in range(first, tl.minimum(first + blocks, tl.cdiv(vocab, BLOCK))):
            ids = block * BLOCK + tl.arange(0, BLOCK)
            x = tl.load(logits + row * vocab + ids, mask=ids < vocab, other=float("-inf"))
            weight = _weight(x, largest, sharpness)
            weight = tl.where(weight >= least, weight, 0.0)
            at = row * BLOCKS + block
            if mode == DRAW:
                tl.store(sums + at, _sum(weight, BLOCK))
            else:
                depth = _depth(x, largest, scale)
                tl.store(sums + at, _sum(tl.where(depth < low, weight, 0.0), BLOCK))
                all_weights += tl.sum(tl.reshape(weight, (BLOCK // 4, 4)), 1).to(tl.float64)
                # Each candidate takes the next place. In which order does not matter: what they
                # weigh is much the same, so that sums of it are exact.
                inside = (depth >= low) & (depth < high)
                places = tl.atomic_add(next_place + ids * 0, 1, mask=inside, sem="relaxed")
                inside = inside & (places < CANDIDATES)
                tl.store(candidates + row * CANDIDATES + places, ids, mask=inside)
        if mode == _CUT:
            tl.store(totals + row * MOST_PIECES + piece, tl.sum(all_weights, 0))


@triton.jit
def _middle(low, high):
    return (low >> 1) + (high >> 1) + (low & high & 1)


@triton.jit(do_not_specialize=["pieces"])
def _take_kernel(
    logits,
    original,
    asked_f64,
    asked,
    maxima,
    indexes,
    states,
    sums,
    totals,
    candidates,
    log_sums,
    tokens,
    logprobs,
    vocab,
    pieces,
    PIECES: tl.constexpr,
    MOST_PIECES: tl.constexpr,
    BLOCKS: tl.constexpr,
    BLOCK: tl.constexpr,
    CANDIDATES: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    state = states + row * _STATES
    mode = tl.load(state + _MODE)
    # A row of logits that are not numbers has failed before.
    if (mode != NOTHING) & (mode != _SEARCH) & (tl.load(tokens + row) >= 0):
        parts = row * PIECES + tl.arange(0, PIECES)
        each = tl.load(maxima + parts)
        largest = tl.max(each, 0)
        likeliest = tl.min(tl.where(each == largest, tl.load(indexes + parts), 2147483647), 0)
        token = tl.where(mode == _LIKELIEST, likeliest, tl.where(mode == _PAST_RANGE, -3, -2))
        if (mode == DRAW) | (mode == _CUT):
            numbers = asked_f64 + row * (ASKED // 2)
            sharpness = _sharpness(tl.load(numbers + INVERSE))
            least = tl.load(numbers + LEAST).to(tl.float32)
            top_p = tl.load(numbers + TOP_P)
            top_k = tl.load(asked + row * ASKED + TOP_K)
            by_k = (top_k > 0) & (top_k < vocab)
            blocks = tl.arange(0, BLOCKS)
            block_count = tl.cdiv(vocab, BLOCK)
            mine = blocks < block_count
            above = tl.load(sums + row * BLOCKS + blocks, mask=mine, other=0.0)
            whole = tl.sum(above, 0)
            places = tl.arange(0, CANDIDATES)
            start = tl.full((), _LOWEST, tl.int64)  # keys from here on are kept
            decided = mode != NOTHING
            ids = tl.zeros((CANDIDATES,), tl.int32)
            weights = tl.zeros((CANDIDATES,), tl.float64)
            if mode == _CUT:
                lists = row * CANDIDATES + places
                here = places < tl.load(state + _FOUND)
                ids = tl.load(candidates + lists, mask=here, other=0)
                x = tl.load(logits + row * vocab + ids, mask=here, other=float("-inf"))
                light = _weight(x, largest, sharpness)
                light = tl.where(light >= least, light, 0.0)
                weights = light.to(tl.float64)
                keys = tl.where(light > 0.0, key_of(x, ids), _LOWEST)
                low = tl.min(tl.where(light > 0.0, keys, _HIGHEST), 0)
                low_count = tl.sum((light > 0.0).to(tl.int32), 0)
                if by_k:
                    needed = top_k - tl.load(state + _BEFORE)
                    start = tl.where(low_count >= needed, low, start)
                    if low_count > needed:
                        high = tl.max(keys, 0) + 1
                        high_count = tl.zeros((), tl.int32)
                        while (low + 1 < high) & (low_count - high_count > 1):
                            middle = _middle(low, high)
                            count = tl.sum((keys >= middle).to(tl.int32), 0)
                            if count >= needed:
                                low = middle
                                low_count = count
                            else:
                                high = middle
                                high_count = count
                        start = tl.min(tl.where(keys >= low, keys, _HIGHEST), 0)
                        weights = tl.where(keys >= start, weights, 0.0)
                        keys = tl.where(keys >= start, keys, _LOWEST)
                        low = start
                        low_count = needed
                if top_p < 1.0:
                    if by_k:
                        whole = tl.sum(weights, 0)
                    else:
                        every = tl.arange(0, MOST_PIECES)
                        total = totals + row * MOST_PIECES + every
                        whole = tl.sum(tl.load(total, mask=every < pieces, other=0.0), 0)
                    mass = top_p * whole - tl.sum(above, 0)
                    decided = (mass > 0.0) & (tl.sum(weights, 0) >= mass)
                    if decided:
                        high = tl.max(keys, 0) + 1
                        high_count = tl.zeros((), tl.int32)
                        while (low + 1 < high) & (low_count - high_count > 1):
                            middle = _middle(low, high)
                            inside = keys >= middle
                            count = tl.sum(inside.to(tl.int32), 0)
                            if tl.sum(tl.where(inside, weights, 0.0), 0) >= mass:
                                low = middle
                                low_count = count
                            else:
                                high = middle
                                high_count = count
                        start = tl.min(tl.where(keys >= low, keys, _HIGHEST), 0)
                        weights = tl.where(keys >= start, weights, 0.0)
                whole = tl.sum(above, 0) + tl.sum(weights, 0)
            if decided:
                target = tl.load(numbers + UNIFORM) * whole
                target = tl.minimum(target, whole * (1.0 - 2.220446049250313e-16))
                # The first block whose end lies past the target.
                block = tl.zeros((), tl.int32)
                last = block_count - 1
                while block < last:
                    half = (block + last) // 2
                    passed = tl.sum(tl.where(blocks <= half, above, 0.0), 0)
                    if mode == _CUT:
                        passed += tl.sum(tl.where(ids < (half + 1) * BLOCK, weights, 0.0), 0)
                    last = tl.where(passed > target, half, last)
                    block = tl.where(passed > target, block, half + 1)
                passed = tl.sum(tl.where(blocks < block, above, 0.0), 0)
                if mode == _CUT:
                    passed += tl.sum(tl.where(ids < block * BLOCK, weights, 0.0), 0)
                token = _walk(
                    logits + row * vocab,
                    block * BLOCK,
                    vocab,
                    largest,
                    sharpness,
                    least,
                    start,
                    target - passed,
                    BLOCK,
                )
        if (mode == _CUT) & (token < 0):
            tl.store(state + _MODE, _SEARCH)
        else:
            tl.store(tokens + row, token)
            if token >= 0:
                found = tl.load(original + row * vocab + token)
                tl.store(logprobs + row, found - tl.load(log_sums + row))


@triton.jit
def _walk(row, first, vocab, largest, sharpness, least, start, target, BLOCK: tl.constexpr):
    """The token of a block at which the running sum of what is kept, by id, passes the target."""
    ids = first + tl.arange(0, BLOCK)
    x = tl.load(row + ids, mask=ids < vocab, other=float("-inf"))
    weight = _weight(x, largest, sharpness)
    kept = (ids < vocab) & (weight >= least) & (key_of(x, ids) >= start)
    running = tl.cumsum(tl.where(kept, weight, 0.0).to(tl.float64), 0)
    token = tl.min(tl.where(kept & (running > target), ids, 2147483647), 0)
    # Not passed only by rounding: then it is the last.
    return tl.where(token == 2147483647, tl.max(tl.where(kept, ids, -1), 0), token)


@triton.jit
def _sum_from(row, largest, sharpness, least, low_key, vocab, BLOCK: tl.constexpr):
    """How many tokens that count have a key of at least `low_key`, and what they weigh."""
    total = tl.zeros((BLOCK // 4,), tl.float64)
    count = tl.zeros((BLOCK,), tl.int32)
    for first in range(0, vocab, BLOCK):
        ids = first + tl.arange(0, BLOCK)
        x = tl.load(row + ids, mask=ids < vocab, other=float("-inf"))
        weight = _weight(x, largest, sharpness)
        taken = (ids < vocab) & (weight >= least) & (key_of(x, ids) >= low_key)
        weight = tl.where(taken, weight, 0.0)
        total += tl.sum(tl.reshape(weight, (BLOCK // 4, 4)), 1).to(tl.float64)
        count += taken.to(tl.int32)
    return tl.sum(count, 0), tl.sum(total, 0)


@triton.jit
def _search_kernel(
    logits,
    original,
    asked_f64,
    asked,
    maxima,
    states,
    log_sums,
    tokens,
    logprobs,
    vocab,
    PIECES: tl.constexpr,
    BLOCK: tl.constexpr,
):
    number = tl.program_id(0).to(tl.int64)
    mode = tl.load(states + number * _STATES + _MODE)
    if (mode == _SEARCH) & (tl.load(tokens + number) >= 0):
        row = logits + number * vocab
        numbers = asked_f64 + number * (ASKED // 2)
        sharpness = _sharpness(tl.load(numbers + INVERSE))
        top_p = tl.load(numbers + TOP_P)
        least = tl.load(numbers + LEAST).to(tl.float32)
        top_k = tl.load(asked + number * ASKED + TOP_K)
        largest = tl.max(tl.load(maxima + number * PIECES + tl.arange(0, PIECES)), 0)
        # Keys from `start` on are kept.
        highest = key_of(largest, tl.zeros((), tl.int32)) + 1
        width = tl.load(numbers + DEPTH) * tl.load(numbers + TEMPERATURE) * 1.001
        deepest = tl.maximum(largest.to(tl.float64) - width, -3.4e38).to(tl.float32)
        start = key_of(deepest, tl.full((), 2147483647, tl.int32))
        count, whole = _sum_from(row, largest, sharpness, least, start, vocab, BLOCK)
        if (top_k > 0) & (top_k < count):
            low = start
            high = highest
            while (low + 1 < high) & (count != top_k):
                middle = _middle(low, high)
                found, mass = _sum_from(row, largest, sharpness, least, middle, vocab, BLOCK)
                if found >= top_k:
                    low = middle
                    count = found
                    whole = mass
                else:
                    high = middle
            start = low
        if top_p < 1.0:
            mass = top_p * whole
            low = start
            high = highest
            high_count = tl.zeros((), tl.int32)
            while (low + 1 < high) & (count - high_count > 1):
                middle = _middle(low, high)
                found, sum_from = _sum_from(row, largest, sharpness, least, middle, vocab, BLOCK)
                if sum_from >= mass:
                    low = middle
                    count = found
                    whole = sum_from
                else:
                    high = middle
                    high_count = found
            start = low
        target = tl.load(numbers + UNIFORM) * whole
        target = tl.minimum(target, whole * (1.0 - 2.220446049250313e-16))
        # The block that the draw falls into; the last that has anything if rounding kept it below.
        passed = tl.zeros((), tl.float64)
        chosen = tl.zeros((), tl.int32)
        before = tl.zeros((), tl.float64)
        is_found = passed > target
        for first in range(0, vocab, BLOCK):
            ids = first + tl.arange(0, BLOCK)
            x = tl.load(row + ids, mask=ids < vocab, other=float("-inf"))
            weight = _weight(x, largest, sharpness)
            kept = (ids < vocab) & (weight >= least) & (key_of(x, ids) >= start)
            here = _sum(tl.where(kept, weight, 0.0), BLOCK)
            if (here > 0.0) & (is_found == 0):
                chosen = first
                before = passed
                is_found = passed + here > target
            passed += here
        token = _walk(row, chosen, vocab, largest, sharpness, least, start, target - before, BLOCK)
        tl.store(tokens + number, token)
        tl.store(
            logprobs + number,
            tl.load(original + number * vocab + token) - tl.load(log_sums + number),
        )


def pieces_of(rows: int) -> int:
    """Programs for each row: enough for a GPU, and no more tables than are worth it."""
    return MOST_PIECES if rows <= 64 else 8 if rows <= 128 else 4


def candidates_of(vocab: int) -> int:
    return CANDIDATES if vocab <= LARGE_VOCAB else 2 * CANDIDATES


def most_pieces(rows: int) -> int:
    """Of all rows together, of as many as that or fewer."""
    return max(some * pieces_of(some) for some in (64, 128, rows) if some <= max(rows, 64))


def blocks_of(vocab: int) -> int:
    """Of a row, rounded up to a power of two."""
    return int(triton.next_power_of_2(triton.cdiv(vocab, BLOCK)))


def launch_draws(
    logits: Any,  # f32 [rows, vocab], adjusted
    original: Any,  # f32 [rows, vocab], as the model gave them: logprobs are of these
    asked: Any,  # i32 [rows, ASKED]
    scratch: Any,  # f32 [4, rows, PIECES]: of the adjusted logits
    work: Any,  # DrawWork
    log_sums: Any,
    tokens: Any,  # i32 [rows], written where asked; one below 0 stays
    logprobs: Any,  # f32 [rows], likewise
    row_pieces: int,  # of `scratch`
) -> None:
    rows, vocab = logits.shape
    asked_f64 = asked.view(torch.float64)
    maxima, minima, indexes = scratch[0], scratch[3], scratch[1].view(tokens.dtype)
    pieces, blocks = pieces_of(rows), blocks_of(vocab)
    _spread_kernel[(rows, pieces)](
        logits,
        asked_f64,
        asked,
        maxima,
        minima,
        work.masses,
        vocab,
        pieces,
        PIECES=row_pieces,
        BLOCK=BLOCK // 2,
        num_warps=WARPS["spread"],
    )
    _count_kernel[(rows, pieces)](
        logits,
        asked_f64,
        asked,
        maxima,
        minima,
        work.masses,
        work.counts,
        vocab,
        pieces,
        PIECES=row_pieces,
        MOST_PIECES=MOST_PIECES,
        BLOCK=BLOCK,
        WIDE=WIDE,
        BINS=BINS,
        num_warps=WARPS["count"],
    )
    _choose_kernel[(rows,)](
        asked_f64,
        asked,
        maxima,
        minima,
        work.masses,
        work.counts,
        work.states,
        work.edges,
        vocab,
        pieces,
        PIECES=row_pieces,
        MOST_PIECES=MOST_PIECES,
        BINS=BINS,
        CANDIDATES=work.most_candidates,
        num_warps=WARPS["choose"],
    )
    _weigh_kernel[(rows, pieces)](
        logits,
        asked_f64,
        maxima,
        minima,
        work.states,
        work.edges,
        work.sums,
        work.totals,
        work.candidates,
        vocab,
        pieces,
        PIECES=row_pieces,
        MOST_PIECES=MOST_PIECES,
        BLOCKS=blocks,
        BLOCK=BLOCK,
        CANDIDATES=work.most_candidates,
        num_warps=WARPS["weigh"],
    )
    _take_kernel[(rows,)](
        logits,
        original,
        asked_f64,
        asked,
        maxima,
        indexes,
        work.states,
        work.sums,
        work.totals,
        work.candidates,
        log_sums,
        tokens,
        logprobs,
        vocab,
        pieces,
        PIECES=row_pieces,
        MOST_PIECES=MOST_PIECES,
        BLOCKS=blocks,
        BLOCK=BLOCK,
        CANDIDATES=work.most_candidates,
        num_warps=WARPS["take"],
    )
    _search_kernel[(rows,)](
        logits,
        original,
        asked_f64,
        asked,
        maxima,
        work.states,
        log_sums,
        tokens,
        logprobs,
        vocab,
        PIECES=row_pieces,
        BLOCK=BLOCK * 2,
        num_warps=WARPS["search"],
    )
