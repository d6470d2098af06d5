"""Work lists: every query sees every key of its own once, within the room that was promised."""

from __future__ import annotations

from itertools import pairwise

import numpy as np
import pytest

from headrace.backends.cuda.attention.plan import (
    BEGIN,
    END,
    FIELDS,
    PARTIAL,
    POSITION,
    ROW,
    SEQUENCE,
    SPLIT,
    TOKENS,
    Ints,
    Tile,
    WorkShape,
    plan_attention,
)
from headrace.core.errors import HeadraceError, UnsupportedModelError

SHAPE = WorkShape(kv_heads=8, group=4, multiprocessors=132, max_sequences=256)
DECODE = Tile(rows=16, keys=64)


def listed(
    chunks: list[tuple[int, int]],
    shape: WorkShape = SHAPE,
    tile: Tile = DECODE,
    window: int | None = None,
    padding: int = 0,
) -> Ints:
    """The real items of a step; checks that the rest is zero."""
    starts, counts = (np.array(column, np.int32) for column in zip(*chunks, strict=True))
    items = np.full((shape.capacity(int(counts.sum()) + padding, tile), FIELDS), 9, np.int32)
    found = plan_attention(starts, counts, items, shape, tile, window=window)
    assert not items[found:].any()
    return items[:found]


def check(items: Ints, chunks: list[tuple[int, int]], shape: WorkShape, tile: Tile,
          window: int | None) -> None:  # fmt: skip
    """Ranges of each row's tile are disjoint, start at multiples of a key tile, and hold all that
    the row may see; partial results have a place of their own within the workspace."""
    first_row = np.cumsum([0] + [count for _, count in chunks])
    places: set[int] = set()
    tiles: dict[int, list[Ints]] = {}
    for item in items:
        tiles.setdefault(int(item[ROW]), []).append(item)
    rows = 0
    for row, parts in tiles.items():
        head = parts[0]
        sequence, tokens = int(head[SEQUENCE]), int(head[TOKENS])
        start, count = chunks[sequence]
        rows += tokens
        assert 0 < tokens <= tile.rows // shape.group
        assert head[POSITION] == start + row - first_row[sequence]
        assert row + tokens <= first_row[sequence] + count
        parts.sort(key=lambda item: int(item[BEGIN]))
        least = 0 if window is None else max(0, int(head[POSITION]) - window + 1)
        assert parts[0][BEGIN] <= least < parts[0][BEGIN] + tile.keys
        assert parts[-1][END] == head[POSITION] + tokens
        for before, after in pairwise(parts):
            assert before[END] == after[BEGIN]
        for i, part in enumerate(parts):
            assert part[BEGIN] % tile.keys == 0
            assert part[BEGIN] < part[END]
            assert part[SPLIT] == i + 65536 * len(parts)
            if len(parts) > 1:
                place = int(part[PARTIAL]) + i
                assert place not in places
                assert place < shape.partial_rows // tile.rows
                places.add(place)
    assert rows == first_row[-1]


@pytest.mark.parametrize("seed", range(60))
def test_every_query_sees_its_keys_once(seed: int) -> None:
    rng = np.random.default_rng(seed)
    group = int(rng.integers(1, 9))
    shape = WorkShape(
        kv_heads=int(rng.integers(1, 17)),
        group=group,
        multiprocessors=int(rng.integers(1, 150)),
        max_sequences=int(rng.integers(40, 300)),
    )
    count = int(rng.integers(1, 40))
    longest = int(rng.choice([1, 4, 600]))
    chunks = [
        (int(rng.integers(0, 10 ** rng.integers(1, 5))), int(rng.integers(1, longest + 1)))
        for _ in range(count)
    ]
    tile = Tile(
        rows=max(shape.tile_rows(longest), int(rng.choice([16, 128]))),
        keys=int(rng.choice([16, 64])),
        programs_per_sm=int(rng.integers(1, 5)),
    )
    window = None if rng.random() < 0.6 else int(rng.integers(1, 700))
    items = listed(chunks, shape, tile, window, padding=int(rng.integers(0, 5)))
    check(items, chunks, shape, tile, window)


def busy(items: Ints, shape: WorkShape, tile: Tile) -> float:
    """What part of the time programs would be busy, each taken up by whoever is free."""
    slots = np.zeros(shape.multiprocessors * tile.programs_per_sm)
    work = np.repeat(items[:, END] - items[:, BEGIN], shape.kv_heads)
    for length in work:
        slots[np.argmin(slots)] += length
    return float(work.sum() / (slots.max() * len(slots)))


@pytest.mark.parametrize(
    "chunks",
    [
        [(8191, 1)],
        [(100000, 1)],
        [(8191, 1)] * 16,
        [(4095, 1)] * 64,
        [(4095, 1)] * 40,
        [(3000 + 37 * i, 1) for i in range(33)],
        [(100 + 9 * i, 1) for i in range(255)] + [(60000, 1)],
    ],
)
def test_long_work_keeps_all_programs_busy(chunks: list[tuple[int, int]]) -> None:
    assert busy(listed(chunks), SHAPE, DECODE) > 0.75


def test_short_work_is_not_cut() -> None:
    assert len(listed([(127, 1)])) == 1
    assert len(listed([(127, 1)] * 256)) == 256


def test_small_steps_launch_little() -> None:
    """Programs without work cost time too: one sequence gets no more than run at once."""
    programs = SHAPE.capacity(1, DECODE) * SHAPE.kv_heads
    assert programs <= 1.2 * SHAPE.multiprocessors * DECODE.programs_per_sm


@pytest.mark.parametrize(("tokens", "rows"), [(1, 16), (4, 16), (5, 32), (16, 64), (17, 128)])
def test_tile_holds_the_longest_chunk(tokens: int, rows: int) -> None:
    assert SHAPE.tile_rows(tokens) == rows


def test_groups_too_large_are_refused() -> None:
    shape = WorkShape(kv_heads=1, group=129, multiprocessors=132, max_sequences=1)
    with pytest.raises(UnsupportedModelError, match="129 query heads"):
        shape.tile_rows(1)


def test_too_short_a_list_is_refused() -> None:
    ones = np.ones(9, np.int32)
    with pytest.raises(HeadraceError, match="9 tiles; its work list holds 8"):
        plan_attention(ones, ones, np.zeros((8, FIELDS), np.int32), SHAPE, DECODE)


def test_an_empty_step_has_no_items() -> None:
    items = np.ones((8, FIELDS), np.int32)
    none = np.zeros(0, np.int32)
    assert plan_attention(none, none, items, SHAPE, DECODE) == 0
    assert not items.any()
