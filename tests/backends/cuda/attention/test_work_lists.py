"""Work lists that are moved on: every sequence's keys once, whatever the steps before were."""

from __future__ import annotations

from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from headrace.backends.cuda.attention.plan import (
    BEGIN,
    END,
    FIELDS,
    POSITION,
    ROW,
    SEQUENCE,
    TOKENS,
    Ints,
    Tile,
    WorkShape,
    plan_attention,
)
from headrace.backends.cuda.attention.work_lists import STEPS_MOVED, WorkLists
from headrace.core.errors import HeadraceError

SHAPE = WorkShape(kv_heads=2, group=4, multiprocessors=20, max_sequences=8)
DECODE = Tile(rows=16, keys=16)


class Lists:
    """Of steps whose sequences lie in given rows of the block tables."""

    def __init__(self, *windows: int | None, tile: Tile = DECODE) -> None:
        self._windows, self._tile = windows, tile
        self._lists = WorkLists(windows, SHAPE)

    def write(self, starts: list[int], rows: list[int], counts: list[int] | None = None) -> Ints:
        """The last window's."""
        counted = np.array(counts or [1] * len(starts), np.int64)
        size = SHAPE.capacity(int(counted.sum()), self._tile)
        items = [np.full((size, FIELDS), 9, np.int32) for _ in self._windows]
        table_rows = np.array(rows, np.int32)
        self._lists.write(items, np.array(starts, np.int64), counted, table_rows, self._tile)
        return items[-1]


def planned(starts: list[int], rows: list[int], window: int | None = None) -> Ints:
    counts = np.ones(len(starts), np.int64)
    items = np.zeros((SHAPE.capacity(len(starts), DECODE), FIELDS), np.int32)
    plan_attention(np.array(starts, np.int64), counts, items, SHAPE, DECODE, window=window)
    items[:, SEQUENCE] = np.array(rows, np.int32)[items[:, SEQUENCE]]
    return items


def check(items: Ints, starts: list[int], rows: list[int]) -> None:
    """Each sequence's token is there, with all keys up to its own, each key once."""
    for row, (start, table_row) in enumerate(zip(starts, rows, strict=True)):
        own = items[(items[:, TOKENS] > 0) & (items[:, ROW] == row)]
        assert (own[:, TOKENS] == 1).all()
        assert (own[:, POSITION] == start).all()
        assert (own[:, SEQUENCE] == table_row).all()
        ranges = sorted(zip(own[:, BEGIN].tolist(), own[:, END].tolist(), strict=True))
        assert ranges[0][0] == 0
        assert ranges[-1][1] == start + 1
        assert all(low % DECODE.keys == 0 and low < high for low, high in ranges)
        assert all(a[1] == b[0] for a, b in pairwise(ranges))
    assert np.count_nonzero(items[:, TOKENS]) >= len(starts)


STEPS = st.lists(st.sampled_from(["on", "on", "on", "on", "swap", "again", "prompt"]), max_size=60)


@settings(max_examples=60, deadline=None)
@given(st.lists(st.integers(0, 300), min_size=1, max_size=6), STEPS)
def test_every_key_once(starts: list[int], steps: list[str]) -> None:
    rows = list(range(len(starts)))
    lists = Lists(None)
    check(lists.write(starts, rows), starts, rows)
    for step in steps:
        if step == "prompt":
            lists.write(starts, rows, counts=[3] * len(starts))
            starts = [start + 3 for start in starts]
            continue
        if step == "swap":  # others in the same places
            rows = rows[1:] + rows[:1]
        starts = [start + (step != "again") for start in starts]
        check(lists.write(starts, rows), starts, rows)


def test_ranges_are_cut_anew_after_a_while() -> None:
    starts, rows = [100, 40], [3, 0]
    lists = Lists(None)
    assert (lists.write(starts, rows) == planned(starts, rows)).all()
    for _ in range(STEPS_MOVED):
        starts = [start + 1 for start in starts]
        check(lists.write(starts, rows), starts, rows)
    starts = [start + 1 for start in starts]
    assert (lists.write(starts, rows) == planned(starts, rows)).all()


def test_a_window_moves_with_its_token() -> None:
    starts, rows = [100, 40], [3, 0]
    lists = Lists(None, 24)
    for _ in range(2 * STEPS_MOVED):
        assert (lists.write(starts, rows) == planned(starts, rows, window=24)).all()
        starts = [start + 1 for start in starts]


def test_nothing_is_kept_of_a_step_that_was_refused() -> None:
    lists = Lists(None)
    lists.write([100, 40], [3, 0])
    small = [np.zeros((1, FIELDS), np.int32)]
    starts, ones, rows = np.array([101, 41]), np.ones(2, np.int64), np.array([3, 0], np.int32)
    with pytest.raises(HeadraceError, match="its work list holds"):
        lists._lists.write(small, starts, ones, rows, DECODE)
    check(lists.write([101, 41], [3, 0]), [101, 41], [3, 0])
