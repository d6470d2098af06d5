"""The first kernel of a step: fills in tokens that the previous step drew, and updates the block
tables.

A token id below 0 stands for one that is already on the device: -1 - r is the token that wanted row
r of the previous step drew. Knows flat arrays; nothing of layers.
"""

from __future__ import annotations

from typing import Any

import triton
import triton.language as tl

_BLOCK = 128


@triton.jit
def _prepare_kernel(
    token_ids, drawn, tokens, rows, counts, places, blocks, tables, BLOCK: tl.constexpr
):
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    token = tl.load(token_ids + at, mask=at < rows, other=0)
    before = tl.load(drawn + (-1 - token), mask=(at < rows) & (token < 0), other=0)
    # A failed draw is below 0 too: use any token, as its sequence ends.
    tl.store(tokens + at, tl.where(token < 0, tl.maximum(before, 0), token), mask=at < rows)
    changed = at < tl.load(counts)
    place = tl.load(places + at, mask=changed, other=0)
    block = tl.load(blocks + at, mask=changed, other=0)
    tl.store(tables + place, block, mask=changed)


def launch_prepare(
    token_ids: Any,  # i32 [rows]
    drawn: Any,  # i32: tokens of the previous step
    tokens: Any,  # i32 [rows or more]: written
    counts: Any,  # i32 [1]: how many of the changes there are
    places: Any,  # i32 [most changes]: flat indexes into the tables
    blocks: Any,  # i32: the new block numbers
    tables: Any,  # i32 [sequences, width]: written
) -> None:
    rows = len(token_ids)
    grid = (triton.cdiv(max(rows, len(places)), _BLOCK),)
    _prepare_kernel[grid](
        token_ids, drawn, tokens, rows, counts, places, blocks, tables, BLOCK=_BLOCK
    )
