"""The learnt time of steps: exact where it was seen, between neighbours elsewhere, never stuck."""

from __future__ import annotations

from itertools import pairwise
from random import Random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from headrace.speculate.step_curve import KEPT_STEPS, OUTLIER, StepCurve, cell_of

ROWS = st.integers(1, 2000)
TIMES = st.floats(1e-5, 10.0)


@given(ROWS, ROWS)
def test_cells_are_in_order_and_no_wider_than_an_eighth(a: int, b: int) -> None:
    if a <= b:
        assert cell_of(a) <= cell_of(b)
    if cell_of(a) == cell_of(b):
        assert abs(a - b) <= max(a, b) / 8


@given(st.lists(st.tuples(ROWS, st.integers(0, 10**6), TIMES), max_size=60), ROWS)
def test_any_steps_give_a_positive_time(steps: list[tuple[int, int, float]], rows: int) -> None:
    curve = StepCurve()
    assert curve.step_s(rows, 0) is None
    for drawn, attended, seconds in steps:
        curve.learn(drawn, attended, seconds)
        found = curve.step_s(rows, attended)
        assert found is not None
        assert found > 0


def test_what_was_seen_is_what_is_expected() -> None:
    curve = StepCurve()
    for _ in range(50):
        for rows in (1, 4, 8):
            curve.learn(rows, 100 * rows, 0.003 + 0.002 * rows)
    assert curve.step_s(4, 400) == pytest.approx(0.011)
    assert curve.step_s(6, 600) == pytest.approx(0.015)
    assert curve.step_s(16, 1600) == pytest.approx(0.035)
    assert curve.has_seen(8)
    assert not curve.has_seen(7)


def test_the_cost_of_attention_is_told_from_that_of_rows() -> None:
    curve, random = StepCurve(), Random(2)
    for _ in range(400):
        rows = random.choice((1, 2, 4, 8))
        attended = rows * random.randrange(10, 4000)
        noise = random.uniform(0.98, 1.02)
        curve.learn(rows, attended, noise * (0.004 + 0.001 * rows + 2e-7 * attended))
    assert curve.attended_s == pytest.approx(2e-7, rel=0.2)
    assert curve.step_s(4, 16000) == pytest.approx(0.008 + 2e-7 * 16000, rel=0.1)


def test_one_slow_step_does_not_spoil_the_curve() -> None:
    curve = StepCurve()
    for _ in range(20):
        curve.learn(1, 0, 0.005)
    curve.learn(1, 0, 5.0)
    assert (curve.step_s(1, 0) or 0) <= 0.005 * (1 + 0.2 * (OUTLIER - 1)) + 1e-9
    curve.learn(8, 0, 5.0)  # the first of its kind
    assert (curve.step_s(8, 0) or 0) < 0.1


def test_a_machine_that_got_slower_is_learnt() -> None:
    curve = StepCurve()
    for seconds in (0.005, 0.02):
        for _ in range(60):
            curve.learn(1, 0, seconds)
    assert curve.step_s(1, 0) == pytest.approx(0.02, rel=0.05)


def test_what_was_not_seen_for_long_is_forgotten() -> None:
    curve = StepCurve()
    curve.learn(9, 0, 0.5)
    for _ in range(2 * KEPT_STEPS):
        curve.learn(1, 0, 0.005)
    assert not curve.has_seen(9)
    assert len(curve) == 1


@given(st.lists(st.tuples(st.integers(1, 200), st.floats(0.001, 0.1)), min_size=1, max_size=60))
def test_more_rows_never_take_less_time(steps: list[tuple[int, float]]) -> None:
    curve = StepCurve()
    for rows, seconds in steps:
        curve.learn(rows, 0.0, seconds)
    times = [curve.step_s(rows, 0.0) or 0.0 for rows in range(1, 220)]
    assert all(more >= less * (1 - 1e-9) for less, more in pairwise(times))


def test_a_step_that_was_slow_by_chance_is_averaged_with_the_larger_ones() -> None:
    curve = StepCurve()
    for rows in (16, 24, 32, 40):
        for _ in range(20):
            curve.learn(rows, 0.0, 0.001 * rows)
    curve.learn(20, 0.0, 0.05)  # one step, in which the machine was busy
    assert (curve.step_s(20, 0.0) or 0.0) < 0.033
    assert curve.step_s(16, 0.0) == pytest.approx(0.016)
    assert curve.step_s(40, 0.0) == pytest.approx(0.04)
