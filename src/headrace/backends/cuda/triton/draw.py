"""Kernels that draw a token of each row, in the order of backends/reference/sampling.py, without
sorting and with many programs a row.

A token's depth is how far its logit lies below the largest, in 2**30 steps down to the least that
may be drawn. Where top_k or top_p cut a row:

    count    how many tokens lie in each of BINS bins of depth, for each piece of the row
    choose   the bins in which top_k and top_p can end, by what a bin's tokens weigh at least and
             at most; where that leaves too many, by what they weigh in the middle
    weigh    what each block of the row weighs above those bins, exactly; the tokens in them are
             written out as candidates, in order of id
    take     where among the candidates the row ends; the block that the draw falls into, in order
             of id; the token

Rows that are not cut need only `weigh` and `take`. Where the candidates do not decide (more tokens
of one depth than there is room for), `search` walks the row again and again: slow, and rare. All
sums are in double precision and in a fixed order. Knows rows of logits and what is asked of each;
nothing of steps and sequences.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl

BLOCK = 2048  # tokens
BINS = 1024
MOST_PIECES = 16  # of a row: the programs that count and weigh it
CANDIDATES = 4096  # most of a cut
STATES = 8  # int32 of a row, between kernels
CUTS = 2  # top_k's candidates and top_p's

# A row of what is asked: 24 int32, of which the first 12 are 6 float64.
ASKED = tl.constexpr(24)
TEMPERATURE, INVERSE, TOP_P, LEAST, DEPTH, UNIFORM = (tl.constexpr(i) for i in range(6))
KIND, TOP_K = tl.constexpr(16), tl.constexpr(17)

# What becomes of a row; the first three are said by whoever asks (KIND).
NOTHING, DRAW = tl.constexpr(0), tl.constexpr(1)
_LIKELIEST = tl.constexpr(2)
_CUT = tl.constexpr(3)
_SEARCH = tl.constexpr(4)
_NONE_ALLOWED = tl.constexpr(5)
_PAST_RANGE = tl.constexpr(6)

_MODE, _FIRST_P, _LAST_P, _AT_K, _BEFORE_K, _COUNT_K, _COUNT_P = (tl.constexpr(i) for i in range(7))
_STATES = tl.constexpr(STATES)
_DEPTHS = tl.constexpr(1073741824.0)
_BIN_DEPTHS = tl.constexpr(1048576.0)
_SHIFT = tl.constexpr(20)
_LOWEST = tl.constexpr(-0x7FFFFFFFFFFFFFFF)
_HIGHEST = tl.constexpr(0x7FFFFFFFFFFFFFFF)


@triton.jit
def _key(x, offsets):
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
def _bin(depth):
    return tl.minimum(depth, _DEPTHS - 64.0).to(tl.int32) >> _SHIFT


@triton.jit(do_not_specialize=["pieces"])
def _count_kernel(
    logits,
    asked_f64,
    asked,
    maxima,
    minima,
    counts,
    vocab,
    pieces,
    PIECES: tl.constexpr,
    BLOCK: tl.constexpr,
    BINS: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    piece = tl.program_id(1)
    numbers = asked_f64 + row * (ASKED // 2)
    kind = tl.load(asked + row * ASKED + KIND)
    temperature = tl.load(numbers + TEMPERATURE)
    top_k = tl.load(asked + row * ASKED + TOP_K)
    is_cut = ((top_k > 0) & (top_k < vocab)) | (tl.load(numbers + TOP_P) < 1.0)
    if (kind == DRAW) & (temperature > 0.0) & is_cut:
        parts = row * PIECES + tl.arange(0, PIECES)
        largest = tl.max(tl.load(maxima + parts), 0)
        smallest = tl.min(tl.load(minima + parts), 0)
        scale = _scale(largest, smallest, temperature, tl.load(numbers + DEPTH))
        blocks = tl.cdiv(tl.cdiv(vocab, BLOCK), pieces)
        found = tl.zeros((BINS,), tl.int32)
        for block in range(piece * blocks, (piece + 1) * blocks):
            offsets = block * BLOCK + tl.arange(0, BLOCK)
            x = tl.load(logits + row * vocab + offsets, mask=offsets < vocab, other=float("-inf"))
            depth = _depth(x, largest, scale)
            found += tl.histogram(_bin(depth), BINS, mask=depth < _DEPTHS)
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
    counts,
    states,
    offsets,
    vocab,
    pieces,
    PIECES: tl.constexpr,
    MOST_PIECES: tl.constexpr,
    BINS: tl.constexpr,
    CANDIDATES: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    numbers = asked_f64 + row * (ASKED // 2)
    state = states + row * _STATES
    temperature = tl.load(numbers + TEMPERATURE)
    top_k = tl.load(asked + row * ASKED + TOP_K)
    top_p = tl.load(numbers + TOP_P)
    mode = tl.load(asked + row * ASKED + KIND)
    parts = row * PIECES + tl.arange(0, PIECES)
    largest = tl.max(tl.load(maxima + parts), 0)
    is_cut = ((top_k > 0) & (top_k < vocab)) | (top_p < 1.0)
    drawn = tl.where(temperature == 0.0, _LIKELIEST, tl.where(is_cut, _CUT, DRAW))
    drawn = tl.where(largest == float("inf"), _PAST_RANGE, drawn)
    drawn = tl.where(largest == float("-inf"), _NONE_ALLOWED, drawn)
    mode = tl.where(mode == DRAW, drawn, mode)
    if mode == _CUT:
        smallest = tl.min(tl.load(minima + parts), 0)
        scale = _scale(largest, smallest, temperature, tl.load(numbers + DEPTH))
        bins = tl.arange(0, BINS)
        each = tl.arange(0, MOST_PIECES)
        at = (row * pieces + each[:, None]) * BINS + bins[None, :]
        by_piece = tl.load(counts + at, mask=each[:, None] < pieces, other=0)
        count = tl.sum(by_piece, 0)
        running = tl.cumsum(count, 0)

        # The bin in which the k-th token lies, and each bin's tokens among the first k.
        limit = tl.where((top_k > 0) & (top_k < vocab), top_k, vocab)
        at_k = tl.min(tl.where(running >= limit, bins, BINS), 0)
        taken = tl.minimum(tl.maximum(limit - (running - count), 0), count).to(tl.float64)

        # What a token weighs at the top of its bin, at its end, and on the average.
        step = _BIN_DEPTHS / scale.to(tl.float64) * tl.load(numbers + INVERSE)
        top = tl.exp(-(bins.to(tl.float64) * step))
        end = tl.exp(-((bins + 1).to(tl.float64) * step))
        middle = tl.where(step > 1e-6, (top - end) / tl.maximum(step, 1e-6), top)
        end = tl.where(end < tl.load(numbers + LEAST), 0.0, end * (1.0 - 1e-5))
        most = tl.cumsum(taken * (top * (1.0 + 1e-5)), 0)
        least = tl.cumsum(taken * end, 0)
        whole_most = tl.max(most, 0)
        whole_least = tl.max(least, 0)
        first_p = _first(most >= top_p * whole_least, bins, BINS - 1)
        last_p = _first(least >= top_p * whole_most, bins, BINS - 1)
        count_p = tl.sum(tl.where((bins >= first_p) & (bins <= last_p), count, 0), 0)
        if count_p > CANDIDATES:
            likely = tl.cumsum(taken * middle, 0)
            target = top_p * tl.max(likely, 0)
            first_p = _first(likely >= target * (1.0 - 0.0005), bins, BINS - 1)
            last_p = _first(likely >= target * (1.0 + 0.0005), bins, BINS - 1)
            count_p = tl.sum(tl.where((bins >= first_p) & (bins <= last_p), count, 0), 0)
        is_by_k = top_p >= 1.0  # the row ends where top_k ends it
        first_p = tl.where(is_by_k, at_k, first_p)
        last_p = tl.where(is_by_k, -1, last_p)
        count_p = tl.where(is_by_k, 0, count_p)
        count_k = tl.sum(tl.where(bins == at_k, count, 0), 0)
        mode = tl.where(tl.maximum(count_p, count_k) > CANDIDATES, _SEARCH, mode)
        tl.store(state + _FIRST_P, first_p)
        tl.store(state + _LAST_P, last_p)
        tl.store(state + _AT_K, at_k)
        tl.store(state + _BEFORE_K, tl.sum(tl.where(bins < at_k, count, 0), 0))
        tl.store(state + _COUNT_K, count_k)
        tl.store(state + _COUNT_P, count_p)
        # Where each piece's candidates begin.
        in_k = bins[None, :] == at_k
        in_p = (bins[None, :] >= first_p) & (bins[None, :] <= last_p)
        of_k = tl.sum(tl.where(in_k, by_piece, 0), 1)
        of_p = tl.sum(tl.where(in_p, by_piece, 0), 1)
        places = row * 2 * MOST_PIECES + each
        tl.store(offsets + places, tl.cumsum(of_k, 0) - of_k)
        tl.store(offsets + places + MOST_PIECES, tl.cumsum(of_p, 0) - of_p)
    tl.store(state + _MODE, mode)


@triton.jit
def _weight(x, largest, inverse):
    return tl.exp((x.to(tl.float64) - largest.to(tl.float64)) * inverse)


@triton.jit(do_not_specialize=["pieces"])
def _weigh_kernel(
    logits,
    asked_f64,
    maxima,
    minima,
    states,
    offsets,
    sums,
    candidate_logits,
    candidate_ids,
    vocab,
    pieces,
    most_rows,
    PIECES: tl.constexpr,
    MOST_PIECES: tl.constexpr,
    BLOCKS: tl.constexpr,
    BLOCK: tl.constexpr,
    CANDIDATES: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    piece = tl.program_id(1)
    state = states + row * _STATES
    mode = tl.load(state + _MODE)
    if (mode == DRAW) | (mode == _CUT):
        numbers = asked_f64 + row * (ASKED // 2)
        inverse = tl.load(numbers + INVERSE)
        least = tl.load(numbers + LEAST)
        parts = row * PIECES + tl.arange(0, PIECES)
        largest = tl.max(tl.load(maxima + parts), 0)
        smallest = tl.min(tl.load(minima + parts), 0)
        temperature = tl.load(numbers + TEMPERATURE)
        scale = _scale(largest, smallest, temperature, tl.load(numbers + DEPTH))
        first_p = tl.load(state + _FIRST_P)
        last_p = tl.load(state + _LAST_P)
        at_k = tl.load(state + _AT_K)
        next_k = tl.load(offsets + row * 2 * MOST_PIECES + piece)
        next_p = tl.load(offsets + row * 2 * MOST_PIECES + MOST_PIECES + piece)
        lists_k = row * 2 * CANDIDATES
        lists_p = lists_k + CANDIDATES
        blocks = tl.cdiv(tl.cdiv(vocab, BLOCK), pieces)
        for block in range(piece * blocks, tl.minimum((piece + 1) * blocks, tl.cdiv(vocab, BLOCK))):
            ids = block * BLOCK + tl.arange(0, BLOCK)
            x = tl.load(logits + row * vocab + ids, mask=ids < vocab, other=float("-inf"))
            weight = _weight(x, largest, inverse)
            weight = tl.where(weight >= least, weight, 0.0)
            at = row * BLOCKS + block
            if mode == DRAW:
                tl.store(sums + at, tl.sum(weight, 0))
            else:
                depth = _depth(x, largest, scale)
                found = _bin(depth)
                tl.store(sums + at, tl.sum(tl.where(found < first_p, weight, 0.0), 0))
                tl.store(
                    sums + most_rows * BLOCKS + at, tl.sum(tl.where(found < at_k, weight, 0.0), 0)
                )
                inside = depth < _DEPTHS
                in_k = (inside & (found == at_k)).to(tl.int32)
                many = tl.sum(in_k, 0)
                if many > 0:
                    places = lists_k + next_k + tl.cumsum(in_k, 0) - 1
                    tl.store(candidate_logits + places, x, mask=in_k > 0)
                    tl.store(candidate_ids + places, ids, mask=in_k > 0)
                    next_k += many
                in_p = (inside & (found >= first_p) & (found <= last_p)).to(tl.int32)
                many = tl.sum(in_p, 0)
                if many > 0:
                    places = lists_p + next_p + tl.cumsum(in_p, 0) - 1
                    tl.store(candidate_logits + places, x, mask=in_p > 0)
                    tl.store(candidate_ids + places, ids, mask=in_p > 0)
                    next_p += many


@triton.jit
def _middle(low, high):
    return (low >> 1) + (high >> 1) + (low & high & 1)


@triton.jit
def _take_kernel(
    logits,
    original,
    asked_f64,
    asked,
    maxima,
    indexes,
    states,
    sums,
    candidate_logits,
    candidate_ids,
    log_sums,
    tokens,
    logprobs,
    vocab,
    most_rows,
    PIECES: tl.constexpr,
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
            inverse = tl.load(numbers + INVERSE)
            least = tl.load(numbers + LEAST)
            top_p = tl.load(numbers + TOP_P)
            blocks = tl.arange(0, BLOCKS)
            block_count = tl.cdiv(vocab, BLOCK)
            above = tl.load(sums + row * BLOCKS + blocks, mask=blocks < block_count, other=0.0)
            places = tl.arange(0, CANDIDATES)
            start = tl.full((), _LOWEST, tl.int64)  # keys from here on are kept
            decided = mode != NOTHING
            ids = tl.zeros((CANDIDATES,), tl.int32)
            weights = tl.zeros((CANDIDATES,), tl.float64)
            if mode == _CUT:
                count_k = tl.load(state + _COUNT_K)
                count_p = tl.load(state + _COUNT_P)
                above_k = tl.load(
                    sums + (most_rows + row) * BLOCKS + blocks, mask=blocks < block_count, other=0.0
                )
                whole = tl.sum(above_k, 0)
                lists = row * 2 * CANDIDATES + places
                here = places < count_k
                x = tl.load(candidate_logits + lists, mask=here, other=float("-inf"))
                ids = tl.load(candidate_ids + lists, mask=here, other=0)
                weights = _weight(x, largest, inverse)
                weights = tl.where(weights >= least, weights, 0.0)
                keys = tl.where(weights > 0.0, _key(x, ids), _LOWEST)
                if count_k > 0:
                    needed = tl.load(asked + row * ASKED + TOP_K) - tl.load(state + _BEFORE_K)
                    low = tl.full((), _LOWEST + 1, tl.int64)
                    high = tl.max(keys, 0) + 1
                    low_count = tl.sum((keys >= low).to(tl.int32), 0)
                    high_count = tl.zeros((), tl.int32)
                    if low_count >= needed:
                        low = tl.min(tl.where(keys >= low, keys, _HIGHEST), 0)
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
                    whole += tl.sum(weights, 0)
                if top_p < 1.0:
                    lists += CANDIDATES
                    here = places < count_p
                    x = tl.load(candidate_logits + lists, mask=here, other=float("-inf"))
                    ids = tl.load(candidate_ids + lists, mask=here, other=0)
                    weights = _weight(x, largest, inverse)
                    weights = tl.where(weights >= least, weights, 0.0)
                    keys = tl.where(weights > 0.0, _key(x, ids), _LOWEST)
                    weights = tl.where(keys >= start, weights, 0.0)
                    keys = tl.where(weights > 0.0, keys, _LOWEST)
                    mass = top_p * whole - tl.sum(above, 0)
                    low = tl.full((), _LOWEST + 1, tl.int64)
                    high = tl.max(keys, 0) + 1
                    low_count = tl.sum((keys >= low).to(tl.int32), 0)
                    high_count = tl.zeros((), tl.int32)
                    decided = (mass > 0.0) & (tl.sum(weights, 0) >= mass)
                    if decided:
                        low = tl.min(tl.where(keys >= low, keys, _HIGHEST), 0)
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
            if decided:
                whole = tl.sum(above, 0) + tl.sum(weights, 0)
                target = tl.load(numbers + UNIFORM) * whole
                target = tl.minimum(target, whole * (1.0 - 2.220446049250313e-16))
                # The first block whose end lies past the target.
                block = tl.zeros((), tl.int32)
                last = block_count - 1
                while block < last:
                    half = (block + last) // 2
                    passed = tl.sum(tl.where(blocks <= half, above, 0.0), 0)
                    passed += tl.sum(tl.where(ids < (half + 1) * BLOCK, weights, 0.0), 0)
                    last = tl.where(passed > target, half, last)
                    block = tl.where(passed > target, block, half + 1)
                passed = tl.sum(tl.where(blocks < block, above, 0.0), 0)
                passed += tl.sum(tl.where(ids < block * BLOCK, weights, 0.0), 0)
                token = _walk(
                    logits + row * vocab,
                    block * BLOCK,
                    vocab,
                    largest,
                    inverse,
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
def _walk(row, first, vocab, largest, inverse, least, start, target, BLOCK: tl.constexpr):
    """The token of a block at which the running sum of what is kept, by id, passes the target."""
    ids = first + tl.arange(0, BLOCK)
    x = tl.load(row + ids, mask=ids < vocab, other=float("-inf"))
    weight = _weight(x, largest, inverse)
    kept = (ids < vocab) & (weight >= least) & (_key(x, ids) >= start)
    running = tl.cumsum(tl.where(kept, weight, 0.0), 0)
    token = tl.min(tl.where(kept & (running > target), ids, 2147483647), 0)
    # Not passed only by rounding: then it is the last.
    return tl.where(token == 2147483647, tl.max(tl.where(kept, ids, -1), 0), token)


@triton.jit
def _sum_from(row, largest, inverse, least, low_key, vocab, BLOCK: tl.constexpr):
    """How many tokens that count have a key of at least `low_key`, and what they weigh."""
    total = tl.zeros((), tl.float64)
    count = tl.zeros((), tl.int32)
    for first in range(0, vocab, BLOCK):
        ids = first + tl.arange(0, BLOCK)
        x = tl.load(row + ids, mask=ids < vocab, other=float("-inf"))
        weight = _weight(x, largest, inverse)
        taken = (ids < vocab) & (weight >= least) & (_key(x, ids) >= low_key)
        total += tl.sum(tl.where(taken, weight, 0.0), 0)
        count += tl.sum(taken.to(tl.int32), 0)
    return count, total


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
        inverse = tl.load(numbers + INVERSE)
        top_p = tl.load(numbers + TOP_P)
        least = tl.load(numbers + LEAST)
        top_k = tl.load(asked + number * ASKED + TOP_K)
        largest = tl.max(tl.load(maxima + number * PIECES + tl.arange(0, PIECES)), 0)
        start = tl.full((), _LOWEST, tl.int64)  # keys from here on are kept
        count, whole = _sum_from(row, largest, inverse, least, start, vocab, BLOCK)
        if (top_k > 0) & (top_k < count):
            low = start
            high = tl.full((), _HIGHEST, tl.int64)
            while (low + 1 < high) & (count != top_k):
                middle = _middle(low, high)
                found, mass = _sum_from(row, largest, inverse, least, middle, vocab, BLOCK)
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
            high = tl.full((), _HIGHEST, tl.int64)
            high_count = tl.zeros((), tl.int32)
            while (low + 1 < high) & (count - high_count > 1):
                middle = _middle(low, high)
                found, sum_from = _sum_from(row, largest, inverse, least, middle, vocab, BLOCK)
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
            weight = _weight(x, largest, inverse)
            kept = (ids < vocab) & (weight >= least) & (_key(x, ids) >= start)
            here = tl.sum(tl.where(kept, weight, 0.0), 0)
            if (here > 0.0) & (is_found == 0):
                chosen = first
                before = passed
                is_found = passed + here > target
            passed += here
        token = _walk(
            row, chosen, vocab, largest, inverse, least, start, target - before, BLOCK
        )
        tl.store(tokens + number, token)
        tl.store(
            logprobs + number,
            tl.load(original + number * vocab + token) - tl.load(log_sums + number),
        )


def pieces_of(rows: int) -> int:
    """Programs for each row: enough for a GPU, and no more tables of bins than are worth it."""
    return MOST_PIECES if rows <= 64 else 8 if rows <= 128 else 4


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
    shared = {"PIECES": row_pieces}
    _count_kernel[(rows, pieces)](
        logits,
        asked_f64,
        asked,
        maxima,
        minima,
        work.counts,
        vocab,
        pieces,
        BLOCK=BLOCK,
        BINS=BINS,
        **shared,
    )
    _choose_kernel[(rows,)](
        asked_f64,
        asked,
        maxima,
        minima,
        work.counts,
        work.states,
        work.offsets,
        vocab,
        pieces,
        MOST_PIECES=MOST_PIECES,
        BINS=BINS,
        CANDIDATES=work.candidates,
        num_warps=8,
        **shared,
    )
    _weigh_kernel[(rows, pieces)](
        logits,
        asked_f64,
        maxima,
        minima,
        work.states,
        work.offsets,
        work.sums,
        work.candidate_logits,
        work.candidate_ids,
        vocab,
        pieces,
        work.rows,
        MOST_PIECES=MOST_PIECES,
        BLOCKS=blocks,
        BLOCK=BLOCK,
        CANDIDATES=work.candidates,
        **shared,
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
        work.candidate_logits,
        work.candidate_ids,
        log_sums,
        tokens,
        logprobs,
        vocab,
        work.rows,
        BLOCKS=blocks,
        BLOCK=BLOCK,
        CANDIDATES=work.candidates,
        num_warps=8,
        **shared,
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
        BLOCK=BLOCK * 2,
        num_warps=16,
        **shared,
    )
