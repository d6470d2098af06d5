"""Attention's work lists from step to step: one for each window, planned again or advanced by one.

While the same sequences decode one token each, a list only changes by one more key at the end of
each sequence. So it is not planned again (plan.py) in every step, which would cost more than all
other inputs of a step. Ranges become uneven meanwhile, which costs the device a little time, so
they are planned again every few steps. Knows no tensors and no blocks.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from headrace.backends.cuda.attention.plan import (
    END,
    FIELDS,
    POSITION,
    SEQUENCE,
    Tile,
    WorkShape,
    plan_attention,
)

Ints = NDArray[np.int32]
Longs = NDArray[np.int64]

# Steps that one plan is used for. Ranges grow by at most this, which is less than one key tile.
STEPS_MOVED = 15


class WorkLists:
    def __init__(self, windows: Sequence[int | None], shape: WorkShape) -> None:
        self._lists = [_WorkList(window, shape) for window in windows]

    def write(
        self, lists: Sequence[Ints], starts: Longs, counts: Longs, table_rows: Ints, tile: Tile
    ) -> None:
        """Writes into `lists`, one for each window. `table_rows` are the sequences' rows in the
        block tables."""
        is_decode = len(counts) == int(counts.sum())
        for work, items in zip(self._lists, lists, strict=True):
            if is_decode and work.can_move(len(items), starts, table_rows, tile):
                work.move()
            else:
                work.plan(len(items), starts, counts, table_rows, tile, is_decode=is_decode)
            items[:] = work.items


class _WorkList:
    """The last step's list, and the step that it was made for."""

    def __init__(self, window: int | None, shape: WorkShape) -> None:
        self._window = window
        self._shape = shape
        self._tile: Tile | None = None
        self._next_starts: Longs = np.empty(0, np.int64)
        self._table_rows: Ints = np.empty(0, np.int32)
        self._left = 0  # steps for which it may still be advanced
        self._one_more: Ints = np.empty((0, 0), np.int32)  # what a step adds to its items
        self.items: Ints = np.empty((0, 0), np.int32)

    def can_move(self, size: int, starts: Longs, table_rows: Ints, tile: Tile) -> bool:
        return (
            self._left > 0
            and size == len(self.items)
            and tile == self._tile
            and np.array_equal(starts, self._next_starts)
            and np.array_equal(table_rows, self._table_rows)
        )

    def move(self) -> None:
        self.items[: len(self._one_more)] += self._one_more
        self._next_starts += 1
        self._left -= 1

    def plan(
        self,
        size: int,
        starts: Longs,
        counts: Longs,
        table_rows: Ints,
        tile: Tile,
        *,
        is_decode: bool,
    ) -> None:
        self._left = 0  # until it is complete
        if size != len(self.items):
            self.items = np.zeros((size, FIELDS), np.int32)
        items = self.items
        written = plan_attention(starts, counts, items, self._shape, tile, window=self._window)
        sequences = items[:, SEQUENCE].copy()
        items[:, SEQUENCE] = table_rows[sequences]
        # With a window the first key moves too: those lists are planned again in every step.
        if not is_decode or self._window is not None:
            return
        real = items[:written]
        self._one_more = np.zeros_like(real)
        self._one_more[:, POSITION] = 1
        self._one_more[:, END] = real[:, END] == starts[sequences[:written]] + 1
        self._tile, self._table_rows = tile, table_rows
        self._next_starts = starts + 1
        self._left = STEPS_MOVED
