"""Kernels that find the likeliest few tokens of rows, of equals the lower id first.

For each piece of a row, the kernel repeatedly takes the largest that was not yet taken; a second
kernel does the same with the results of all pieces. For up to MOST tokens: for more, sorting is
cheaper. Knows rows of logits; nothing of what the tokens are for.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl

from headrace.backends.cuda.draws.draw_rows import key_of
from headrace.backends.cuda.draws.logits_kernels import pieces_of

MOST = 32
_NONE = tl.constexpr(-0x7FFFFFFFFFFFFFFF)


@triton.jit(do_not_specialize=["count"])
def _piece_tops_kernel(
    logits,
    rows,
    found,
    vocab,
    count,
    PIECES: tl.constexpr,
    PIECE: tl.constexpr,
    BLOCK: tl.constexpr,
    MOST: tl.constexpr,
):
    number = tl.program_id(0).to(tl.int64)
    part = tl.program_id(1)
    ids = part * PIECE + tl.arange(0, BLOCK)
    inside = ids < tl.minimum((part + 1) * PIECE, vocab)
    row = tl.load(rows + number)
    x = tl.load(logits + row * vocab + ids, mask=inside, other=0.0)
    keys = tl.where(inside, key_of(x, ids), _NONE)
    for at in range(0, count):
        largest = tl.max(keys, 0)
        tl.store(found + (number * PIECES + part) * MOST + at, largest)
        keys = tl.where(keys == largest, _NONE, keys)


@triton.jit(do_not_specialize=["count"])
def _join_tops_kernel(
    logits,
    rows,
    found,
    log_sums,
    tokens,
    logprobs,
    vocab,
    count,
    PIECES: tl.constexpr,
    MOST: tl.constexpr,
):
    number = tl.program_id(0).to(tl.int64)
    row = tl.load(rows + number)
    log_sum = tl.load(log_sums + row)
    places = tl.arange(0, PIECES * MOST)
    keys = tl.load(found + number * PIECES * MOST + places, mask=places % MOST < count, other=_NONE)
    for at in range(0, count):
        largest = tl.max(keys, 0)
        token = 4294967295 - (largest & 4294967295)
        tl.store(tokens + number * count + at, token)
        logit = tl.load(logits + row * vocab + token)
        tl.store(logprobs + number * count + at, logit - log_sum)
        keys = tl.where(keys == largest, _NONE, keys)


def launch_tops(logits: Any, rows: Any, log_sums: Any, count: int) -> tuple[Any, Any]:
    """For the rows with these indexes (i64): tokens (i64) and logprobs (f32), [rows, count]."""
    vocab = logits.shape[1]
    pieces, piece = pieces_of(vocab)
    block = int(triton.next_power_of_2(piece))
    found = torch.empty((len(rows), pieces, MOST), dtype=torch.int64, device=logits.device)
    tokens = torch.empty((len(rows), count), dtype=torch.int64, device=logits.device)
    logprobs = torch.empty((len(rows), count), dtype=torch.float32, device=logits.device)
    _piece_tops_kernel[(len(rows), pieces)](
        logits,
        rows,
        found,
        vocab,
        count,
        PIECES=pieces,
        PIECE=piece,
        BLOCK=block,
        MOST=MOST,
        num_warps=8 if block <= 8192 else 16,
    )
    _join_tops_kernel[(len(rows),)](
        logits,
        rows,
        found,
        log_sums,
        tokens,
        logprobs,
        vocab,
        count,
        PIECES=pieces,
        MOST=MOST,
    )
    return tokens, logprobs
