"""Kernels over rows of float32 logits: the largest and the log of the sum, a soft cap, and where a
running sum crosses.

One pass gives the first index of the largest logit and log(sum(exp)); it is cut into pieces that
run beside each other, since a single row would leave a GPU idle. `crossing_kernel` finds, without
sorting, the token that a draw of backends/reference/sampling.py ends at; it is slow, and meant for
the few rows whose candidates did not suffice. Knows rows; nothing of steps and sequences.
"""

from __future__ import annotations

from typing import Any

import triton
import triton.language as tl

PIECES = 16  # of a row, in the first pass, at most
_BLOCK = 2048
NOT_NUMBERS = -1  # in place of a token: the row's largest logit is not finite


@triton.jit
def _pieces_kernel(
    logits,
    maxima,
    indexes,
    sums,
    vocab,
    PIECES: tl.constexpr,
    PIECE: tl.constexpr,
    BLOCK: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    part = tl.program_id(1)
    first = part * PIECE
    end = tl.minimum(first + PIECE, vocab)
    best = tl.full((), float("-inf"), tl.float32)
    index = first
    total = tl.zeros((), tl.float32)
    bad = tl.zeros((), tl.int32)
    for at in range(0, PIECE, BLOCK):
        offsets = first + at + tl.arange(0, BLOCK)
        x = tl.load(logits + row * vocab + offsets, mask=offsets < end, other=float("-inf"))
        bad = tl.maximum(bad, tl.max((x != x).to(tl.int32), 0))
        x = tl.where(x != x, float("-inf"), x)
        largest = tl.max(x, 0)
        here = tl.min(tl.where(x == largest, offsets, 2147483647), 0)
        index = tl.where(largest > best, here, index)
        new = tl.maximum(best, largest)
        # An infinity less itself is no number: nothing else has come so far, or the row fails.
        base = tl.where(tl.abs(new) == float("inf"), 0.0, new)
        total = total * tl.exp(best - base) + tl.sum(tl.exp(x - base), 0)
        best = new
    place = row * PIECES + part
    tl.store(maxima + place, tl.where(bad > 0, float("inf"), best))
    tl.store(indexes + place, index)
    tl.store(sums + place, total)


@triton.jit
def _join_kernel(maxima, indexes, sums, tokens, logprobs, log_sums, PIECES: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    parts = tl.arange(0, PIECES)
    best = tl.load(maxima + row * PIECES + parts)
    largest = tl.max(best, 0)
    index = tl.load(indexes + row * PIECES + parts)
    token = tl.min(tl.where(best == largest, index, 2147483647), 0)
    good = (largest > float("-inf")) & (largest < float("inf"))
    base = tl.where(good, largest, 0.0)
    total = tl.sum(
        tl.load(sums + row * PIECES + parts) * tl.exp(tl.where(good, best - base, 0.0)), 0
    )
    log_total = tl.log(tl.where(good, total, 1.0))
    tl.store(tokens + row, tl.where(good, token, -1))
    tl.store(logprobs + row, tl.where(good, -log_total, 0.0))
    tl.store(log_sums + row, base + log_total)


@triton.jit
def _softcap_kernel(x, count, cap, BLOCK: tl.constexpr):
    offsets = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    value = tl.load(x + offsets, mask=offsets < count, other=0.0).to(tl.float32) / cap
    # tanh by one exponential of a number that is not positive: it can't overflow.
    size = tl.abs(value)
    low = tl.exp(-2.0 * size)
    capped = cap * (1.0 - low) / (1.0 + low)
    tl.store(x + offsets, tl.where(value < 0, -capped, capped), mask=offsets < count)


@triton.jit
def _key(x, offsets):
    """Numbers whose order, largest first, is (logit descending, id ascending)."""
    bits = (x + 0.0).to(tl.int32, bitcast=True)  # + 0.0: there is one zero
    ordered = bits ^ ((bits >> 31) & 0x7FFFFFFF)
    return ordered.to(tl.int64) * 4294967296 + (4294967295 - offsets.to(tl.int64))


@triton.jit
def _sum_from(row, largest, temperature, least, low_key, VOCAB: tl.constexpr, BLOCK: tl.constexpr):
    """How many tokens have a key of at least `low_key`, and the sum of those weights that count."""
    total = tl.zeros((), tl.float64)
    count = tl.zeros((), tl.int32)
    for at in range(0, VOCAB, BLOCK):
        offsets = at + tl.arange(0, BLOCK)
        inside = offsets < VOCAB
        x = tl.load(row + offsets, mask=inside, other=float("-inf"))
        taken = inside & (_key(x, offsets) >= low_key)
        weight = tl.exp((x.to(tl.float64) - largest) / temperature)
        total += tl.sum(tl.where(taken & (weight >= least), weight, 0.0), 0)
        count += tl.sum(taken.to(tl.int32), 0)
    return count, total


@triton.jit
def _crossing_kernel(
    logits, params, top_ks, found, complete, VOCAB: tl.constexpr, BLOCK: tl.constexpr
):
    number = tl.program_id(0).to(tl.int64)
    if tl.load(complete + number) == 0:
        row = logits + number * VOCAB
        temperature = tl.load(params + number * 5)
        top_p = tl.load(params + number * 5 + 1)
        least = tl.load(params + number * 5 + 2)
        uniform = tl.load(params + number * 5 + 3)
        largest = tl.load(params + number * 5 + 4)
        top_k = tl.load(top_ks + number)
        lowest = tl.full((), -0x7FFFFFFFFFFFFFFF, tl.int64)
        highest = tl.full((), 0x7FFFFFFFFFFFFFFF, tl.int64)
        start = lowest  # keys from here on are kept
        if (top_k > 0) & (top_k < VOCAB):
            low = lowest
            high = highest
            while low + 1 < high:
                middle = (low >> 1) + (high >> 1) + (low & high & 1)
                count, _sum = _sum_from(row, largest, temperature, least, middle, VOCAB, BLOCK)
                low = tl.where(count >= top_k, middle, low)
                high = tl.where(count >= top_k, high, middle)
            start = low
        _taken, total = _sum_from(row, largest, temperature, least, start, VOCAB, BLOCK)
        if top_p < 1.0:
            low = start
            high = highest
            while low + 1 < high:
                middle = (low >> 1) + (high >> 1) + (low & high & 1)
                _taken, mass = _sum_from(row, largest, temperature, least, middle, VOCAB, BLOCK)
                low = tl.where(mass >= top_p * total, middle, low)
                high = tl.where(mass >= top_p * total, high, middle)
            start = low
            _taken, total = _sum_from(row, largest, temperature, least, start, VOCAB, BLOCK)
        low = start
        high = highest
        while low + 1 < high:
            middle = (low >> 1) + (high >> 1) + (low & high & 1)
            _taken, mass = _sum_from(row, largest, temperature, least, middle, VOCAB, BLOCK)
            low = tl.where(mass > uniform * total, middle, low)
            high = tl.where(mass > uniform * total, high, middle)
        tl.store(found + number, 4294967295 - (low & 4294967295))


def launch_largest(logits: Any, scratch: Any, tokens: Any, logprobs: Any, log_sums: Any) -> None:
    """logits [rows, vocab] -> the first index of the largest (NOT_NUMBERS where there is none),
    its log-probability, and log(sum(exp)). `scratch` is float32 [3, rows or more, PIECES]."""
    rows, vocab = logits.shape
    maxima, indexes, sums = scratch[0], scratch[1].view(tokens.dtype), scratch[2]
    pieces = min(PIECES, triton.next_power_of_2(triton.cdiv(vocab, _BLOCK)))
    piece = triton.cdiv(triton.cdiv(vocab, pieces), 16) * 16
    _pieces_kernel[(rows, pieces)](
        logits, maxima, indexes, sums, vocab, PIECES=pieces, PIECE=piece, BLOCK=_BLOCK
    )
    _join_kernel[(rows,)](maxima, indexes, sums, tokens, logprobs, log_sums, PIECES=pieces)


def launch_softcap(x: Any, cap: float) -> None:
    """cap * tanh(x / cap), in place."""
    count = x.numel()
    _softcap_kernel[(triton.cdiv(count, _BLOCK),)](x, count, cap, BLOCK=_BLOCK)


def launch_crossing(logits: Any, params: Any, top_ks: Any, found: Any, complete: Any) -> None:
    """For each row [rows, vocab] that is not `complete` (int32): the drawn token into `found`
    (int64). `params` is float64 [rows, 5]: temperature, top_p, the least weight that counts,
    uniform, the largest logit."""
    rows, vocab = logits.shape
    _crossing_kernel[(rows,)](logits, params, top_ks, found, complete, VOCAB=vocab, BLOCK=_BLOCK)
