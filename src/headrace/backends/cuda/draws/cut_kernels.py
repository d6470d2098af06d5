"""Kernels that find where top_k and top_p cut a row off, and sum up its weights. draw_kernels.py
describes their order.

Knows rows of logits and their parameters; nothing of the token that is drawn.
"""

from __future__ import annotations

import triton
import triton.language as tl

from headrace.backends.cuda.draws.draw_rows import (
    ALL_DEPTHS,
    ASKED,
    BEFORE,
    CUT,
    DRAW,
    FOUND,
    HIGH_EDGE,
    INVERSE,
    KIND,
    LEAST,
    LIKELIEST,
    LOW_EDGE,
    MODE,
    NONE_ALLOWED,
    PAST_RANGE,
    SEARCH,
    STATE,
    STEP_DEPTHS,
    TEMPERATURE,
    TOP_K,
    TOP_P,
    depth_of,
    sharpness_of,
    span_of,
    sum_of,
    weight_of,
)


@triton.jit(do_not_specialize=["pieces"])
def spread_kernel(
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
        largest, scale = span_of(numbers, maxima, minima, row, PIECES)
        tokens = tl.cdiv(tl.cdiv(vocab, 2 * BLOCK), pieces) * 2 * BLOCK
        first = piece * tokens
        end = tl.minimum(first + tokens, vocab)
        sharpness = sharpness_of(tl.load(numbers + INVERSE))
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
            depth = depth_of(x, largest, scale)
            weight = weight_of(x, largest, sharpness)
            weight = tl.where(weight >= least, weight, 0.0)
            if by_k:
                weight = tl.where(depth < ALL_DEPTHS, 1.0, 0.0)
            above_1 += tl.where(depth < 1 * STEP_DEPTHS, weight, 0.0)
            above_2 += tl.where(depth < 2 * STEP_DEPTHS, weight, 0.0)
            above_3 += tl.where(depth < 3 * STEP_DEPTHS, weight, 0.0)
            above_4 += tl.where(depth < 4 * STEP_DEPTHS, weight, 0.0)
            above_5 += tl.where(depth < 5 * STEP_DEPTHS, weight, 0.0)
            above_6 += tl.where(depth < 6 * STEP_DEPTHS, weight, 0.0)
            above_7 += tl.where(depth < 7 * STEP_DEPTHS, weight, 0.0)
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
    """Where the cut is, as far as `spread` can tell: the index of the depth above it, the weight
    above that depth, and the weight that the cut keeps."""
    each = tl.arange(0, MOST_PIECES)[:, None]
    steps = tl.arange(0, 8)
    at = (row * pieces + each) * 8 + steps[None, :]
    mass = tl.sum(tl.load(masses + at, mask=each < pieces, other=0.0).to(tl.float64), 0)
    left = tl.where(by_k, top_k.to(tl.float64), top_p * tl.max(mass, 0))
    step = tl.min(tl.where(mass >= left, steps, 7), 0)
    above = tl.sum(tl.where(steps == step - 1, mass, 0.0), 0)
    return step, above, left


@triton.jit(do_not_specialize=["pieces"])
def count_kernel(
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
        largest, scale = span_of(numbers, maxima, minima, row, PIECES)
        step, _above, _left = _layer(row, by_k, top_k, top_p, masses, pieces, MOST_PIECES)
        top = step * STEP_DEPTHS
        tokens = tl.cdiv(tl.cdiv(vocab, BLOCK), pieces) * BLOCK
        first = piece * tokens
        end = tl.minimum(first + tokens, vocab)
        found = tl.zeros((BINS,), tl.int32)
        for at in range(first, end, WIDE):
            ids = at + tl.arange(0, WIDE)
            x = tl.load(logits + row * vocab + ids, mask=ids < end, other=float("-inf"))
            depth = depth_of(x, largest, scale)
            place = (depth - top) * (BINS / STEP_DEPTHS)
            inside = (depth >= top) & (depth < top + STEP_DEPTHS)
            found += tl.histogram(place.to(tl.int32), BINS, mask=inside)
        bins = tl.arange(0, BINS)
        tl.store(counts + (row * pieces + piece) * BINS + bins, found)


@triton.jit
def _first(condition, bins, otherwise):
    """The first bin for which the condition holds."""
    return tl.min(tl.where(condition, bins, otherwise), 0)


@triton.jit(do_not_specialize=["pieces"])
def choose_kernel(
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
    drawn = tl.where(temperature == 0.0, LIKELIEST, tl.where(by_k | by_p, CUT, DRAW))
    drawn = tl.where(largest == float("inf"), PAST_RANGE, drawn)
    drawn = tl.where(largest == float("-inf"), NONE_ALLOWED, drawn)
    mode = tl.where(mode == DRAW, drawn, mode)
    if mode == CUT:
        largest, scale = span_of(numbers, maxima, minima, row, PIECES)
        step, above, left = _layer(row, by_k, top_k, top_p, masses, pieces, MOST_PIECES)
        top = step * STEP_DEPTHS
        bins = tl.arange(0, BINS)
        each = tl.arange(0, MOST_PIECES)
        at = (row * pieces + each[:, None]) * BINS + bins[None, :]
        by_piece = tl.load(counts + at, mask=each[:, None] < pieces, other=0)
        count = tl.sum(by_piece, 0)
        # The weight of a token at the top of its bin, at its end, and on average.
        nats = tl.load(numbers + INVERSE) / scale.to(tl.float64)
        bin_nats = (STEP_DEPTHS / BINS) * nats
        heaviest = tl.exp(-((top + bins * (STEP_DEPTHS / BINS)).to(tl.float64) * nats))
        lightest = heaviest * tl.exp(-bin_nats)
        average = (heaviest - lightest) / tl.maximum(bin_nats, 1e-6)
        average = tl.where(bin_nats > 1e-6, average, heaviest)
        heaviest = tl.where(by_k, 1.0, heaviest * (1.0 + 1e-5))
        lightest = tl.where(lightest < tl.load(numbers + LEAST), 0.0, lightest * (1.0 - 1e-5))
        lightest = tl.where(by_k, 1.0, lightest)
        many = count.to(tl.float64)
        slack = tl.where(by_k, 0.0, 1e-6 * left)  # for the rounding of float32 sums
        first = _first(above + tl.cumsum(many * heaviest, 0) >= left - slack, bins, BINS - 1)
        last = _first(above + tl.cumsum(many * lightest, 0) >= left + slack, bins, BINS - 1)
        if tl.sum(tl.where((bins >= first) & (bins <= last), count, 0), 0) > CANDIDATES:
            likely = above + tl.cumsum(many * average, 0)
            slack = tl.where(by_k, 0.0, 0.0003 * left)
            first = tl.where(by_k, first, _first(likely >= left - slack, bins, BINS - 1))
            last = tl.where(by_k, last, _first(likely >= left + slack, bins, BINS - 1))
        of_piece = tl.sum(tl.where((bins >= first) & (bins <= last), by_piece, 0), 1)
        low = top + first * (STEP_DEPTHS / BINS)
        high = top + (last + 1) * (STEP_DEPTHS / BINS)
        before = tl.where(by_k, above, 0.0).to(tl.int32)
        before += tl.sum(tl.where(bins < first, count, 0), 0)
        if by_k & by_p:  # what is above is cut again: all of it are candidates
            of_piece += tl.where(each == 0, before, 0)
            low = low * 0.0
            before = before * 0
        found = tl.sum(of_piece, 0)
        mode = tl.where(found > CANDIDATES, SEARCH, mode)
        tl.store(edges + row * 2 + LOW_EDGE, low)
        tl.store(edges + row * 2 + HIGH_EDGE, high)
        tl.store(states + row * STATE + BEFORE, before)
        tl.store(states + row * STATE + FOUND, 0)
    tl.store(states + row * STATE + MODE, mode)


@triton.jit(do_not_specialize=["pieces"])
def weigh_kernel(
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
    mode = tl.load(states + row * STATE + MODE)
    if (mode == DRAW) | (mode == CUT):
        numbers = asked_f64 + row * (ASKED // 2)
        sharpness = sharpness_of(tl.load(numbers + INVERSE))
        least = tl.load(numbers + LEAST).to(tl.float32)
        largest, scale = span_of(numbers, maxima, minima, row, PIECES)
        low = tl.load(edges + row * 2 + LOW_EDGE)
        high = tl.minimum(tl.load(edges + row * 2 + HIGH_EDGE), ALL_DEPTHS)
        next_place = states + row * STATE + FOUND
        blocks = tl.cdiv(tl.cdiv(vocab, BLOCK), pieces)
        first = piece * blocks
        all_weights = tl.zeros((BLOCK // 4,), tl.float64)
        for block in range(first, tl.minimum(first + blocks, tl.cdiv(vocab, BLOCK))):
            ids = block * BLOCK + tl.arange(0, BLOCK)
            x = tl.load(logits + row * vocab + ids, mask=ids < vocab, other=float("-inf"))
            weight = weight_of(x, largest, sharpness)
            weight = tl.where(weight >= least, weight, 0.0)
            at = row * BLOCKS + block
            if mode == DRAW:
                tl.store(sums + at, sum_of(weight, BLOCK))
            else:
                depth = depth_of(x, largest, scale)
                tl.store(sums + at, sum_of(tl.where(depth < low, weight, 0.0), BLOCK))
                all_weights += tl.sum(tl.reshape(weight, (BLOCK // 4, 4)), 1).to(tl.float64)
                # Each candidate takes the next place. The order does not matter: their weights are
                # nearly equal, so that their sums are exact.
                inside = (depth >= low) & (depth < high)
                places = tl.atomic_add(next_place + ids * 0, 1, mask=inside, sem="relaxed")
                inside = inside & (places < CANDIDATES)
                tl.store(candidates + row * CANDIDATES + places, ids, mask=inside)
        if mode == CUT:
            tl.store(totals + row * MOST_PIECES + piece, tl.sum(all_weights, 0))
