"""The collector is kept from steps, and left as it was found."""

from __future__ import annotations

import gc
from collections.abc import Iterator

import pytest

from headrace.core.collector import YOUNG_OBJECTS, rarely, settle, unsettle


@pytest.fixture(autouse=True)
def _as_found() -> Iterator[None]:
    before = gc.get_threshold()
    yield
    gc.set_threshold(*before)


def passes_of(steps: int, objects: int) -> int:
    """Of the collector, while so many objects come and go in every step, the last two's alive."""
    passes: list[str] = []

    def note(phase: str, _: dict[str, int]) -> None:
        passes.append(phase)

    gc.collect()
    gc.callbacks.append(note)
    try:
        flight: list[list[list[int]]] = [[], []]
        for _ in range(steps):
            flight = [flight[1], [[] for _ in range(objects)]]
    finally:
        gc.callbacks.remove(note)
    return passes.count("start")


def test_objects_that_come_and_go_make_no_pass_due() -> None:
    gc.set_threshold(700, 10, 10)
    assert passes_of(steps=50, objects=2000) > 0
    with rarely():
        assert passes_of(steps=50, objects=2000) == 0


def test_thresholds_are_what_they_were() -> None:
    gc.set_threshold(700, 10, 10)
    with rarely():
        assert gc.get_threshold() == (YOUNG_OBJECTS, 10, 10)
    assert gc.get_threshold() == (700, 10, 10)
    with pytest.raises(KeyError), rarely():
        raise KeyError
    assert gc.get_threshold() == (700, 10, 10)


@pytest.mark.parametrize("first", [0, 10 * YOUNG_OBJECTS])
def test_who_asked_for_less_still_gets_less(first: int) -> None:
    gc.set_threshold(first, 10, 10)
    with rarely():
        assert gc.get_threshold() == (first, 10, 10)


def test_what_is_settled_is_not_looked_at() -> None:
    before = gc.get_freeze_count()
    settle()
    try:
        assert gc.get_freeze_count() > before
    finally:
        unsettle()
    assert gc.get_freeze_count() == 0
