"""The choice by time, against a search through all choices."""

from __future__ import annotations

from itertools import product

import pytest
from hypothesis import given
from hypothesis import strategies as st

from headrace.speculate.choosing import Candidates, StepTime, choose, needed_chance


def line(fixed_s: float, row_s: float, attended_s: float = 0.0) -> StepTime:
    return lambda rows, attended: fixed_s + row_s * rows + attended_s * attended


def falling(chances: list[float]) -> list[float]:
    gains, together = [], 1.0
    for chance in chances:
        together *= chance
        gains.append(together)
    return gains


GAINS = st.lists(st.lists(st.floats(0.01, 1.0), max_size=4).map(falling), min_size=1, max_size=4)


def candidates(gains: list[list[float]], most_rows: int = 99) -> Candidates:
    return Candidates(
        rows=len(gains), attended=0, gains=gains, contexts=[0] * len(gains), most_rows=most_rows
    )


@given(GAINS, st.floats(0.0, 0.02), st.floats(0.0005, 0.01), st.integers(1, 12))
def test_no_choice_gives_more_tokens_a_second(
    gains: list[list[float]], fixed_s: float, row_s: float, most_rows: int
) -> None:
    step, time = candidates(gains, most_rows), line(fixed_s, row_s)
    found = choose(step, time, margin=0.0)
    rows = len(gains)

    def rate(counts: tuple[int, ...]) -> float:
        tokens = rows + sum(sum(each[:k]) for each, k in zip(gains, counts, strict=True))
        return tokens / time(rows + sum(counts), 0)

    every = [
        counts
        for counts in product(*(range(len(each) + 1) for each in gains))
        if sum(counts) <= most_rows
    ]
    best = max(map(rate, every))
    assert rate(tuple(found.counts)) == pytest.approx(best)
    assert found.gain == pytest.approx(best / rate((0,) * rows))


@given(GAINS, st.floats(0.0, 0.02), st.floats(0.0005, 0.01), st.integers(0, 12))
def test_bounds_are_kept(
    gains: list[list[float]], fixed_s: float, row_s: float, most_rows: int
) -> None:
    found = choose(candidates(gains, most_rows), line(fixed_s, row_s), margin=0.05)
    assert sum(found.counts) <= most_rows
    assert all(0 <= k <= len(each) for k, each in zip(found.counts, gains, strict=True))
    assert (found.gain > 1.05) == any(found.counts)


def test_nothing_is_guessed_where_a_row_costs_what_a_token_gives() -> None:
    gains = [[0.95, 0.9]] * 16
    assert not any(choose(candidates(gains), line(0.0, 0.002), margin=0.02).counts)
    assert all(choose(candidates(gains), line(0.1, 0.002), margin=0.02).counts)


def test_a_long_context_makes_guesses_dear() -> None:
    step = Candidates(
        rows=2, attended=20_000, gains=[[0.2], [0.2]], contexts=[10_000, 10_000], most_rows=9
    )
    assert choose(step, line(0.02, 0.0001), margin=0.0).counts == [1, 1]
    assert choose(step, line(0.001, 0.0001, 1e-6), margin=0.0).counts == [0, 0]


def test_more_must_be_promised_to_begin_than_to_go_on() -> None:
    step, time = candidates([[0.5]]), line(0.0045, 0.002)
    gain = choose(step, time, margin=0.0).gain
    assert 1.02 < gain < 1.2
    assert any(choose(step, time, margin=gain - 1.01).counts)
    assert not any(choose(step, time, margin=gain - 0.99).counts)


def test_the_time_of_drafting_shortens_drafts() -> None:
    step, time = candidates([falling([0.9] * 12)]), line(0.02, 0.0002)
    counts = [
        choose(step, time, margin=0.0, draft_s=draft_s).counts[0]
        for draft_s in (0.0, 0.001, 0.004, 0.02)
    ]
    assert counts == sorted(counts, reverse=True)
    assert counts[0] == 12
    assert counts[-1] == 0


@given(st.integers(1, 64), st.floats(0, 0.1), st.floats(0.0001, 0.01))
def test_below_the_needed_chance_nothing_pays(rows: int, fixed_s: float, row_s: float) -> None:
    time = line(fixed_s, row_s)
    needed = needed_chance(rows, 0.0, time, 64)
    assert needed == pytest.approx(row_s * rows / time(rows, 0))
    gains = [[min(1.0, needed * 0.999)]] * rows
    assert not any(choose(candidates(gains), time, margin=0.001).counts)
