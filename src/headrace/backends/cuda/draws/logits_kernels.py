"""Kernels over rows of float32 logits: argmax, log-sum-exp and a soft cap.

One pass computes the argmax (of equals the first) and log(sum(exp)). A row is split into pieces
that run in parallel, as one program per row would leave a GPU idle. Knows rows; nothing of steps
and sequences.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl

from headrace.backends.cuda.draws.draw_sizes import PIECES

_BLOCK = 2048
NOT_NUMBERS = -1  # in place of a token: the row's largest logit is not finite


@triton.jit
def _pieces_kernel(
    logits,
    maxima,
    indexes,
    sums,
    minima,
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
    worst = tl.full((), float("inf"), tl.float32)
    index = first
    total = tl.zeros((), tl.float32)
    bad = tl.zeros((), tl.int32)
    for at in range(0, PIECE, BLOCK):
        offsets = first + at + tl.arange(0, BLOCK)
        x = tl.load(logits + row * vocab + offsets, mask=offsets < end, other=float("-inf"))
        bad = tl.maximum(bad, tl.max((x != x).to(tl.int32), 0))
        x = tl.where(x != x, float("-inf"), x)
        worst = tl.minimum(worst, tl.min(tl.where(x > float("-inf"), x, float("inf")), 0))
        largest = tl.max(x, 0)
        here = tl.min(tl.where(x == largest, offsets, 2147483647), 0)
        index = tl.where(largest > best, here, index)
        new = tl.maximum(best, largest)
        # inf - inf is NaN: either only -inf was seen so far, or the row fails.
        base = tl.where(tl.abs(new) == float("inf"), 0.0, new)
        total = total * tl.exp(best - base) + tl.sum(tl.exp(x - base), 0)
        best = new
    place = row * PIECES + part
    tl.store(maxima + place, tl.where(bad > 0, float("inf"), best))
    tl.store(indexes + place, index)
    tl.store(sums + place, total)
    tl.store(minima + place, worst)


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
    # tanh by one exponential of a non-positive number, which can't overflow.
    size = tl.abs(value)
    low = tl.exp(-2.0 * size)
    capped = cap * (1.0 - low) / (1.0 + low)
    tl.store(x + offsets, tl.where(value < 0, -capped, capped), mask=offsets < count)


def pieces_of(vocab: int) -> tuple[int, int]:
    """Into how many pieces a row is split, and the tokens of each."""
    pieces = min(PIECES, triton.next_power_of_2(triton.cdiv(vocab, _BLOCK)))
    return pieces, triton.cdiv(triton.cdiv(vocab, pieces), 16) * 16


def launch_largest(logits: Any, scratch: Any, tokens: Any, logprobs: Any, log_sums: Any) -> None:
    """logits [rows, vocab] -> the argmax (NOT_NUMBERS if it is not finite), its log-probability,
    and log(sum(exp)). `scratch` is float32 [4, rows or more, PIECES]: for each piece the largest
    logit, its index, the sum, and the smallest finite logit."""
    launch_pieces(logits, scratch)
    rows, vocab = logits.shape
    pieces, _ = pieces_of(vocab)
    maxima, indexes, sums = scratch[0], scratch[1].view(tokens.dtype), scratch[2]
    _join_kernel[(rows,)](maxima, indexes, sums, tokens, logprobs, log_sums, PIECES=pieces)


def launch_pieces(logits: Any, scratch: Any) -> None:
    rows, vocab = logits.shape
    pieces, piece = pieces_of(vocab)
    maxima, indexes, sums, minima = scratch[0], scratch[1].view(torch.int32), scratch[2], scratch[3]
    _pieces_kernel[(rows, pieces)](
        logits, maxima, indexes, sums, minima, vocab, PIECES=pieces, PIECE=piece, BLOCK=_BLOCK
    )


def launch_softcap(x: Any, cap: float) -> None:
    """cap * tanh(x / cap), in place."""
    count = x.numel()
    _softcap_kernel[(triton.cdiv(count, _BLOCK),)](x, count, cap, BLOCK=_BLOCK)
