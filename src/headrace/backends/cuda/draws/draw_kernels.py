"""Kernels that draw one token per row, in the order of backends/reference/sampling.py, without
sorting and with many programs per row.

A token's depth is how far its logit is below the largest, in 2**30 steps down to the lowest that
may be drawn. If top_k or top_p cut a row off:

    spread   sums up the weights of tokens above each of 8 depths; for top_k each token weighs 1
    count    counts the tokens in each of 64 bins between the two depths that the cut is between
    choose   finds the bins that the cut can be in, by the lowest and highest weight of a bin's
             tokens; if that leaves too many tokens, by their average weight
    weigh    sums up each block of the row above those bins, and writes the tokens in them out as
             candidates
    take     finds where among the candidates the row is cut off, then the block that the draw falls
             into, in order of id, and then the token

Rows that are not cut need only `weigh` and `take`. If the candidates are not enough (more tokens of
one depth than there is space for, or top_p after a large top_k), `search` makes several passes over
the row: slow, and rare. Weights are float32, as on the CPU, and their sums float64, in a fixed
order or exact. Knows rows of logits and their parameters; nothing of steps and sequences.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl

from headrace.backends.cuda.draws.cut_kernels import (
    choose_kernel,
    count_kernel,
    spread_kernel,
    weigh_kernel,
)
from headrace.backends.cuda.draws.draw_rows import (
    ASKED,
    BEFORE,
    CUT,
    DEPTH,
    DRAW,
    FOUND,
    HIGHEST_KEY,
    INVERSE,
    LEAST,
    LIKELIEST,
    LOWEST_KEY,
    MODE,
    NOTHING,
    PAST_RANGE,
    SEARCH,
    STATE,
    TEMPERATURE,
    TOP_K,
    TOP_P,
    UNIFORM,
    key_of,
    middle_of,
    sharpness_of,
    sum_of,
    walk_block,
    weight_of,
)
from headrace.backends.cuda.draws.draw_sizes import (
    BINS,
    BLOCK,
    MOST_PIECES,
    WIDE,
    blocks_of,
    pieces_of,
)

# Warps of each kernel's programs, as measured on an H200 (benchmarks/cuda/draws.py).
WARPS = {"spread": 8, "count": 8, "choose": 4, "weigh": 8, "take": 8, "search": 16}


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
    state = states + row * STATE
    mode = tl.load(state + MODE)
    # A row whose logits are not finite has already failed.
    if (mode != NOTHING) & (mode != SEARCH) & (tl.load(tokens + row) >= 0):
        parts = row * PIECES + tl.arange(0, PIECES)
        each = tl.load(maxima + parts)
        largest = tl.max(each, 0)
        likeliest = tl.min(tl.where(each == largest, tl.load(indexes + parts), 2147483647), 0)
        token = tl.where(mode == LIKELIEST, likeliest, tl.where(mode == PAST_RANGE, -3, -2))
        if (mode == DRAW) | (mode == CUT):
            numbers = asked_f64 + row * (ASKED // 2)
            sharpness = sharpness_of(tl.load(numbers + INVERSE))
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
            start = tl.full((), LOWEST_KEY, tl.int64)  # keys from here on are kept
            decided = mode != NOTHING
            ids = tl.zeros((CANDIDATES,), tl.int32)
            weights = tl.zeros((CANDIDATES,), tl.float64)
            if mode == CUT:
                lists = row * CANDIDATES + places
                here = places < tl.load(state + FOUND)
                ids = tl.load(candidates + lists, mask=here, other=0)
                x = tl.load(logits + row * vocab + ids, mask=here, other=float("-inf"))
                light = weight_of(x, largest, sharpness)
                light = tl.where(light >= least, light, 0.0)
                weights = light.to(tl.float64)
                keys = tl.where(light > 0.0, key_of(x, ids), LOWEST_KEY)
                low = tl.min(tl.where(light > 0.0, keys, HIGHEST_KEY), 0)
                low_count = tl.sum((light > 0.0).to(tl.int32), 0)
                if by_k:
                    needed = top_k - tl.load(state + BEFORE)
                    start = tl.where(low_count >= needed, low, start)
                    if low_count > needed:
                        high = tl.max(keys, 0) + 1
                        high_count = tl.zeros((), tl.int32)
                        while (low + 1 < high) & (low_count - high_count > 1):
                            middle = middle_of(low, high)
                            count = tl.sum((keys >= middle).to(tl.int32), 0)
                            if count >= needed:
                                low = middle
                                low_count = count
                            else:
                                high = middle
                                high_count = count
                        start = tl.min(tl.where(keys >= low, keys, HIGHEST_KEY), 0)
                        weights = tl.where(keys >= start, weights, 0.0)
                        keys = tl.where(keys >= start, keys, LOWEST_KEY)
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
                            middle = middle_of(low, high)
                            inside = keys >= middle
                            count = tl.sum(inside.to(tl.int32), 0)
                            if tl.sum(tl.where(inside, weights, 0.0), 0) >= mass:
                                low = middle
                                low_count = count
                            else:
                                high = middle
                                high_count = count
                        start = tl.min(tl.where(keys >= low, keys, HIGHEST_KEY), 0)
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
                    if mode == CUT:
                        passed += tl.sum(tl.where(ids < (half + 1) * BLOCK, weights, 0.0), 0)
                    last = tl.where(passed > target, half, last)
                    block = tl.where(passed > target, block, half + 1)
                passed = tl.sum(tl.where(blocks < block, above, 0.0), 0)
                if mode == CUT:
                    passed += tl.sum(tl.where(ids < block * BLOCK, weights, 0.0), 0)
                token = walk_block(
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
        if (mode == CUT) & (token < 0):
            tl.store(state + MODE, SEARCH)
        else:
            tl.store(tokens + row, token)
            if token >= 0:
                found = tl.load(original + row * vocab + token)
                tl.store(logprobs + row, found - tl.load(log_sums + row))


@triton.jit
def _sum_from(row, largest, sharpness, least, low_key, vocab, BLOCK: tl.constexpr):
    """How many tokens of sufficient weight have a key of at least `low_key`, and their weight."""
    total = tl.zeros((BLOCK // 4,), tl.float64)
    count = tl.zeros((BLOCK,), tl.int32)
    for first in range(0, vocab, BLOCK):
        ids = first + tl.arange(0, BLOCK)
        x = tl.load(row + ids, mask=ids < vocab, other=float("-inf"))
        weight = weight_of(x, largest, sharpness)
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
    mode = tl.load(states + number * STATE + MODE)
    if (mode == SEARCH) & (tl.load(tokens + number) >= 0):
        row = logits + number * vocab
        numbers = asked_f64 + number * (ASKED // 2)
        sharpness = sharpness_of(tl.load(numbers + INVERSE))
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
                middle = middle_of(low, high)
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
                middle = middle_of(low, high)
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
        # The block that the draw falls into; the last non-empty one if rounding kept the sum below.
        passed = tl.zeros((), tl.float64)
        chosen = tl.zeros((), tl.int32)
        before = tl.zeros((), tl.float64)
        is_found = passed > target
        for first in range(0, vocab, BLOCK):
            ids = first + tl.arange(0, BLOCK)
            x = tl.load(row + ids, mask=ids < vocab, other=float("-inf"))
            weight = weight_of(x, largest, sharpness)
            kept = (ids < vocab) & (weight >= least) & (key_of(x, ids) >= start)
            here = sum_of(tl.where(kept, weight, 0.0), BLOCK)
            if (here > 0.0) & (is_found == 0):
                chosen = first
                before = passed
                is_found = passed + here > target
            passed += here
        token = walk_block(
            row, chosen, vocab, largest, sharpness, least, start, target - before, BLOCK
        )
        tl.store(tokens + number, token)
        tl.store(
            logprobs + number,
            tl.load(original + number * vocab + token) - tl.load(log_sums + number),
        )


def launch_draws(
    logits: Any,  # f32 [rows, vocab], adjusted
    original: Any,  # f32 [rows, vocab], the model's own, for logprobs
    asked: Any,  # i32 [rows, ASKED]
    scratch: Any,  # f32 [4, rows, PIECES]: of the adjusted logits
    work: Any,  # DrawWork
    log_sums: Any,
    tokens: Any,  # i32 [rows], written where asked; a failure (below 0) is kept
    logprobs: Any,  # f32 [rows], likewise
    row_pieces: int,  # of `scratch`
) -> None:
    rows, vocab = logits.shape
    asked_f64 = asked.view(torch.float64)
    maxima, minima, indexes = scratch[0], scratch[3], scratch[1].view(tokens.dtype)
    pieces, blocks = pieces_of(rows), blocks_of(vocab)
    spread_kernel[(rows, pieces)](
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
    count_kernel[(rows, pieces)](
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
    choose_kernel[(rows,)](
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
    weigh_kernel[(rows, pieces)](
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
