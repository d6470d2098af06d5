"""A step's work list for attention: which program of a launch computes what, in numpy.

A work list is int32 [capacity, FIELDS], one row per item; rows past the last item are zero and
their programs end at once, so that a launch's size depends only on `capacity`. An item is a tile of
queries (some tokens of one sequence times the heads that share a key/value head) against a range of
the sequence's keys; every item is computed once for each key/value head. If a tile's keys are split
into several items, they leave partial results, which the last of them adds up.

Knows starts and counts of sequences and how many programs run at once; knows no tensors, no blocks
and no layers. Layers that differ in `window` need a list each.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from headrace.core.errors import HeadraceError, UnsupportedModelError
from headrace.models.spec import ModelSpec

Ints = NDArray[np.int32]
Longs = NDArray[np.int64]

FIELDS = 8  # of an item, as below
# ROW: first of the step's rows; TOKENS of the tile; POSITION of its first token; SEQUENCE: row of
# the block tables; BEGIN, END: keys (positions) of the range; PARTIAL: number of the tile's first
# partial result; SPLIT: this range's number, plus 65536 times how many ranges the tile has.
ROW, TOKENS, POSITION, SEQUENCE, BEGIN, END, PARTIAL, SPLIT = range(FIELDS)

_WHOLE = 65536  # SPLIT of a tile that was not split

_TILE_ROWS = (16, 32, 64, 128)
_INVARIANT_ROWS = 64
LONG_TOKENS = 1024  # the chunk length from which on the largest tile is faster
_ITEM_COST = 1.5  # of starting and ending an item, in units of one key tile
_JOIN_COST = 0.2  # of adding up one partial result, in units of one key tile
# Numbers of ranges to try for the longest tile: dense where one more or less decides whether the
# last programs run alone.
_CUTS = np.array([1, 2, 3, 4, 5, 6, 7, 8, 10, 12, 14, 16, 20, 24, 28, 32, 40, 48, 56, 64])


@dataclass(frozen=True, slots=True, kw_only=True)
class Tile:
    """The tile sizes of one attention kernel."""

    rows: int  # queries (tokens times heads of a group): a power of two, 16 or more
    keys: int  # a power of two, 16 or more
    warps: int = 4
    stages: int = 3
    programs_per_sm: int = 2  # that run at once on one multiprocessor
    descriptor: bool = False  # fetch by tensor descriptor, if a block holds `keys` or more


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkShape:
    """What the work lists of all steps have in common."""

    kv_heads: int
    group: int  # query heads of one key/value head
    multiprocessors: int
    max_sequences: int
    # Use the same tile for every query and never split its keys, so that a result does not depend
    # on what else is in the step.
    batch_invariant: bool = False

    @property
    def partial_rows(self) -> int:
        """Rows of partial results that a launch may leave, per key/value head: enough to split a
        decode step into four times as many items as programs run at once."""
        return 16 * 16 * -(-self.multiprocessors // self.kv_heads)

    def workspace(self, head_dim: int) -> tuple[int, int, int]:
        """Numbers of partial sums, of their weights and of counters, four bytes each."""
        rows = self.partial_rows * self.kv_heads
        return rows * head_dim, 2 * rows, self.partial_rows // 16 * self.kv_heads

    def tile_rows(self, most_tokens: int) -> int:
        """The rows of the tile for a step whose longest chunk has this many tokens."""
        least = max(16, 1 << (self.group - 1).bit_length())
        if least > _TILE_ROWS[-1]:
            raise UnsupportedModelError(
                f"{self.group} query heads share a key/value head; at most {_TILE_ROWS[-1]} can.",
                "Run this model with --device cpu.",
            )
        if self.batch_invariant:
            return max(_INVARIANT_ROWS, least)
        wanted = most_tokens * self.group
        # The largest tile is only faster for long chunks: decode rows would fill little of it.
        most = _TILE_ROWS[-1] if most_tokens >= LONG_TOKENS else _TILE_ROWS[-2]
        return next(
            (rows for rows in _TILE_ROWS if least <= rows and wanted <= rows), max(most, least)
        )

    def extra_items(self, rows: int, tile: Tile) -> int:
        """How many more items than tiles a step of `rows` rows may have, due to splitting."""
        wave = -(-self.multiprocessors * tile.programs_per_sm // self.kv_heads)
        # One more wave is enough to balance any lengths; every empty item still costs a program.
        return min(wave + 3 * min(rows, wave // 8), self.partial_rows // tile.rows // 2)

    def capacity(self, rows: int, tile: Tile) -> int:
        """The most items of any step of up to `rows` rows."""
        tile_tokens = tile.rows // self.group
        sequences = min(rows, self.max_sequences)
        return sequences + (rows - sequences) // tile_tokens + self.extra_items(rows, tile)


def work_shape(
    spec: ModelSpec, max_sequences: int, multiprocessors: int, batch_invariant: bool = False
) -> WorkShape:
    first = spec.attention[0]
    return WorkShape(
        kv_heads=first.kv_heads,
        group=first.heads // first.kv_heads,
        multiprocessors=multiprocessors,
        max_sequences=max_sequences,
        batch_invariant=batch_invariant,
    )


def attention_windows(spec: ModelSpec) -> list[int | None]:
    """The distinct windows: layers with the same window share a work list."""
    return list(dict.fromkeys(attention.window for attention in spec.attention))


# By rows, for head_dim up to 128: the fastest on an H200 in benchmarks/cuda/attention.py.
_TILES = {
    16: Tile(rows=16, keys=64, warps=4, stages=3, programs_per_sm=4),
    32: Tile(rows=32, keys=64, warps=4, stages=3, programs_per_sm=2),
    64: Tile(rows=64, keys=64, warps=4, stages=3, programs_per_sm=2),
    128: Tile(rows=128, keys=64, warps=4, stages=3, programs_per_sm=2, descriptor=True),
}
_WIDE_TILES = {  # head_dim over 128: half as many keys, so that stages fit into shared memory
    rows: Tile(rows=rows, keys=32, warps=tile.warps, stages=2, programs_per_sm=1)
    for rows, tile in _TILES.items()
}


def default_tile(rows: int, head_dim: int) -> Tile:
    """The tile for 16, 32, 64 or 128 rows."""
    return (_TILES if head_dim <= 128 else _WIDE_TILES)[rows]


def plan_attention(
    starts: NDArray[np.integer],
    counts: NDArray[np.integer],
    items: Ints,
    shape: WorkShape,
    tile: Tile,
    *,
    window: int | None = None,
) -> int:
    """Write the work list of a step into `items` [capacity, FIELDS]; returns how many are real.

    starts, counts: each sequence's first position in this step and how many of its tokens the step
    computes, in the order of the step's rows and of the block tables.
    """
    tiles = _cut_into_tiles(starts, counts, tile.rows // shape.group)
    _, tokens, position, _ = tiles
    total = len(tokens)
    end = position + tokens
    begin = np.zeros_like(end)
    if window is not None:
        begin = np.maximum(0, position - window + 1) // tile.keys * tile.keys
    room = min(len(items) - total, shape.extra_items(int(counts.sum()), tile))
    if room < 0:
        raise HeadraceError(
            f"A step's attention has {total} tiles; its work list holds {len(items)}.",
            "This is a mistake in Headrace: please report it.",
        )
    key_tiles = -(-(end - begin) // tile.keys)
    splits = None
    if not shape.batch_invariant:
        splits = _choose_splits(key_tiles, room, shape.kv_heads, tile, shape.multiprocessors)
    if splits is None:
        written, nothing = total, np.zeros_like(end)
        columns: tuple[Longs, ...] = (*tiles, begin, end, nothing, nothing + _WHOLE)
    else:
        written = int(splits.sum())
        of = np.repeat(np.arange(total), splits)
        split = np.arange(written) - np.repeat(np.cumsum(splits) - splits, splits)
        length = (-(-key_tiles // splits) * tile.keys)[of]
        low = begin[of] + split * length
        high = np.minimum(low + length, end[of])
        partials = np.where(splits > 1, splits, 0)
        partial = (np.cumsum(partials) - partials)[of]
        number = split + _WHOLE * splits[of]
        columns = (*(column[of] for column in tiles), low, high, partial, number)
    real = items[:written]
    for field, column in enumerate(columns):
        real[:, field] = column
    items[written:] = 0
    if written > 1:  # longest first, so that the last ones to finish are short
        real[:] = real[np.argsort(real[:, BEGIN] - real[:, END], kind="stable")]
    return written


def _cut_into_tiles(
    starts: NDArray[np.integer], counts: NDArray[np.integer], tile_tokens: int
) -> tuple[Longs, Longs, Longs, Longs]:
    """For each tile: its first row, its tokens, its first token's position, its sequence."""
    start, count = starts.astype(np.int64), counts.astype(np.int64)
    first_row = np.cumsum(count) - count
    sequence = np.arange(len(count), dtype=np.int64)
    if count.max(initial=0) <= tile_tokens:
        return first_row, count, start, sequence
    tiles = -(-count // tile_tokens)
    sequence = np.repeat(sequence, tiles)
    first = (np.arange(len(sequence)) - np.repeat(np.cumsum(tiles) - tiles, tiles)) * tile_tokens
    tokens = np.minimum(tile_tokens, count[sequence] - first)
    return first_row[sequence] + first, tokens, start[sequence] + first, sequence


def _choose_splits(
    key_tiles: Longs, room: int, kv_heads: int, tile: Tile, multiprocessors: int
) -> Longs | None:
    """Into how many ranges each tile is split, if any: the fastest of a few ways, by estimate.

    Each way limits the length of a range. Items run in waves of `slots`; the time is estimated from
    full-length ranges and from the average.
    """
    longest = int(key_tiles.max(initial=0))
    if longest <= 2 or room < 1:
        return None
    slots = multiprocessors * tile.programs_per_sm
    caps = np.unique(-(-longest // _CUTS))[:, None]
    ways = -(-key_tiles // caps)  # [caps, tiles]
    # With even lengths, the last ranges of a tile may be empty: count only those that are not.
    even = -(-key_tiles // ways)
    ways = -(-key_tiles // even)
    items = ways.sum(axis=1)
    full = (key_tiles // caps).sum(axis=1)
    waves_full = -(-full * kv_heads // slots) * caps[:, 0]
    mean = key_tiles.sum() / items + _ITEM_COST
    cost = np.maximum(waves_full + _ITEM_COST, -(-items * kv_heads // slots) * mean)
    most = ways.max(axis=1)
    cost = cost + np.where(most > 1, 1.0 + _JOIN_COST * most, 0.0)
    cost[items - len(key_tiles) > room] = np.inf
    best = int(np.argmin(cost))  # the first of `caps` splits most, the last nothing
    return None if most[best] == 1 else ways[best]
