"""The kernel that adjusts rows of logits before tokens are drawn: masks and penalties.

It writes adjusted copies, and the largest and smallest logit of each piece of a copy, as
logits_kernels.py does for the model's logits. A sequence's history is one number per token of the
vocabulary: how often it occurs in the output, and PROMPTED if it is in the prompt. The kernel adds
the step's own input token to it, so that the host need not know that token; or it only counts the
last few input tokens on top, if these are drafts. Knows rows, and slots of masks and histories;
nothing of sequences.
"""

from __future__ import annotations

from typing import Any

import triton
import triton.language as tl

from headrace.backends.cuda.draws.draw_rows import ASKED, KIND, NOTHING
from headrace.backends.cuda.launch import exact_floats

PROMPTED = -32768  # the sign of an int16
_MOST = tl.constexpr(32767)  # counts saturate here
_BLOCK = 512  # each lane then has the logits and counts of the same tokens: no exchange

# Offsets in a row of parameters: float32, then int32. Slot -1 means none; AHEAD is the number of
# drafts before the draw.
REPETITION, PRESENCE, FREQUENCY = (tl.constexpr(i) for i in (12, 13, 14))
HISTORY, ADVANCE, MASK, AHEAD = (tl.constexpr(i) for i in (18, 19, 20, 21))


@triton.jit
def _adjust_kernel(
    logits,
    adjusted,
    asked,
    asked_f32,
    histories,
    masks,
    wanted,
    inputs,
    maxima,
    minima,
    indexes,
    vocab,
    mask_bytes,
    PIECES: tl.constexpr,
    PIECE: tl.constexpr,
    BLOCK: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    part = tl.program_id(1)
    own = asked + row * ASKED
    if tl.load(own + KIND) != NOTHING:
        numbers = asked_f32 + row * ASKED
        repetition = tl.load(numbers + REPETITION)
        presence = tl.load(numbers + PRESENCE)
        frequency = tl.load(numbers + FREQUENCY)
        history = tl.load(own + HISTORY).to(tl.int64)
        mask = tl.load(own + MASK).to(tl.int64)
        advance = tl.load(own + ADVANCE)
        ahead = tl.load(own + AHEAD)
        newest = inputs + tl.load(wanted + row)
        said = tl.load(newest)
        said = tl.where(advance > 0, said, -1)
        first = part * PIECE
        end = tl.minimum(first + PIECE, vocab)
        # Per lane: reduced over all lanes once, at the end.
        best = tl.full((BLOCK,), float("-inf"), tl.float32)
        worst = tl.full((BLOCK,), float("inf"), tl.float32)
        index = first + tl.arange(0, BLOCK)
        bad = tl.zeros((BLOCK,), tl.int32)
        for at in range(0, PIECE, BLOCK):
            ids = first + at + tl.arange(0, BLOCK)
            inside = ids < end
            x = tl.load(logits + row * vocab + ids, mask=inside, other=float("-inf"))
            if mask >= 0:
                bits = tl.load(masks + mask * mask_bytes + (ids >> 3), mask=inside, other=0)
                x = tl.where(((bits.to(tl.int32) >> (ids & 7)) & 1) > 0, x, float("-inf"))
            if history >= 0:
                place = histories + history * vocab + ids
                known = tl.load(place, mask=inside, other=0).to(tl.int32)
                is_said = inside & (ids == said)
                often = known & 32767
                often = tl.where(is_said, tl.minimum(often + 1, _MOST), often)
                prompted = known < 0
                known = tl.where(prompted, often - 32768, often)
                tl.store(place, known.to(tl.int16), mask=is_said)
                for back in range(0, ahead):
                    drafted = ids == tl.load(newest - back)
                    often = tl.where(drafted, tl.minimum(often + 1, _MOST), often)
                again = prompted | (often > 0)
                penalized = tl.where(x > 0, tl.div_rn(x, repetition), x * repetition)
                x = tl.where(again, penalized, x)
                x = tl.where(often > 0, x - frequency * often.to(tl.float32), x)
                x = tl.where(often > 0, x - presence, x)
            tl.store(adjusted + row * vocab + ids, x, mask=inside)
            bad = tl.where(x != x, 1, bad)
            index = tl.where(x > best, ids, index)
            best = tl.maximum(best, x)
            worst = tl.minimum(worst, tl.where(x > float("-inf"), x, float("inf")))
        largest = tl.max(best, 0)
        place = row * PIECES + part
        tl.store(maxima + place, tl.where(tl.max(bad, 0) > 0, float("inf"), largest))
        tl.store(minima + place, tl.min(worst, 0))
        tl.store(indexes + place, tl.min(tl.where(best == largest, index, 2147483647), 0))


def launch_adjust(
    logits: Any,  # f32 [rows, vocab]
    adjusted: Any,  # f32 [rows, vocab]: written for rows that are adjusted
    asked: Any,  # i32 [rows, ASKED]
    histories: Any,  # i16 [slots, vocab]
    masks: Any,  # u8 [slots, bytes]: one bit per token, the lowest first
    wanted: Any,  # i32 [rows]: which row of the step each is
    inputs: Any,  # i32: the step's input tokens
    scratch: Any,  # f32 [4, rows or more, pieces]
    pieces: int,
    piece: int,
) -> None:
    rows, vocab = logits.shape
    maxima, indexes, minima = scratch[0], scratch[1].view(asked.dtype), scratch[3]
    _adjust_kernel[(rows, pieces)](
        logits,
        adjusted,
        asked,
        asked.view(logits.dtype),
        histories,
        masks,
        wanted,
        inputs,
        maxima,
        minima,
        indexes,
        vocab,
        masks.shape[1],
        PIECES=pieces,
        PIECE=piece,
        BLOCK=_BLOCK,
        **exact_floats(),
    )
