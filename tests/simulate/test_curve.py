"""The curve through measured steps: exact at them, never falling, never below zero."""

from __future__ import annotations

from itertools import product

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.profiles import CHUNKS, ROWS, step, steps, true_s

from headrace.core.errors import ConfigError
from headrace.core.step import DrawParams, StepPlan
from headrace.hardware.profile import StepTime
from headrace.simulate.curve import Curve, Line

GREEDY = DrawParams(temperature=0.0)


def noisy(seconds: list[float]) -> Curve:
    """The same steps with other times, in any order of size."""
    made = [
        StepTime(
            decode_rows=one.decode_rows,
            context_tokens=one.context_tokens,
            prompt_tokens=one.prompt_tokens,
            prompt_start=one.prompt_start,
            draws=one.draws,
            seconds=value,
            spread=0.0,
            repetitions=1,
        )
        for one, value in zip(steps(), seconds, strict=True)
    ]
    return Curve(made)


curves = st.lists(
    st.floats(1e-4, 1.0), min_size=len(steps()), max_size=len(steps())
).map(noisy)  # fmt: skip
rows = st.integers(0, 200)
tokens = st.integers(0, 2000)


@given(curves, rows, tokens, st.floats(0, 9000), st.integers(0, 60), st.integers(0, 60))
def test_more_work_never_takes_less_time(
    curve: Curve, n: int, p: int, context: float, more_rows: int, more_tokens: int
) -> None:
    n, p = (1, p) if n + p == 0 else (n, p)
    least = curve.seconds(decode_rows=n, context_tokens=context, prompt_tokens=p)
    assert least >= 0
    more = curve.seconds(
        decode_rows=n + more_rows if n else 0,
        context_tokens=context + 7,
        prompt_tokens=p + more_tokens if p else 0,
    )
    assert more >= least - 1e-9


@given(curves, st.lists(st.tuples(st.integers(1, 300), st.integers(0, 5000)), min_size=1))
def test_no_plan_has_a_negative_time(curve: Curve, chunks: list[tuple[int, int]]) -> None:
    plan = StepPlan()
    for number, (count, start) in enumerate(chunks):
        plan.add(number, [1] * count, start, [], draw=GREEDY if number % 2 else None)
    assert curve(plan) >= 0


def test_measured_steps_are_met_exactly_and_those_between_are_on_the_line() -> None:
    curve = Curve(steps())
    for one in steps():
        found = curve.seconds(
            decode_rows=one.decode_rows,
            context_tokens=one.context_tokens,
            prompt_tokens=one.prompt_tokens,
            attended_tokens=one.prompt_start + (one.prompt_tokens + 1) / 2,
            draws=one.draws,
        )
        assert found == pytest.approx(one.seconds, rel=1e-9)
    for n, p in product((1, 3, 40, 64), (0, 20, 100, 200)):
        found = curve.seconds(decode_rows=n, context_tokens=500, prompt_tokens=p)
        assert found == pytest.approx(true_s(n, 500, p, (p + 1) / 2), rel=0.02)


def test_a_mixed_step_is_what_was_measured_and_no_sum() -> None:
    curve = Curve(steps())
    for n, p in product(ROWS, CHUNKS):
        mixed = curve.seconds(decode_rows=n, context_tokens=32, prompt_tokens=p)
        alone = curve.seconds(decode_rows=n, context_tokens=32)
        prompt = curve.seconds(decode_rows=0, prompt_tokens=p)
        assert mixed == pytest.approx(alone + prompt - 5e-3)


def test_a_plan_is_read_as_its_rows_say() -> None:
    curve, plan = Curve(steps()), StepPlan()
    for number in range(3):
        plan.add(number, [1], 100 * (number + 1), [], draw=GREEDY)
    assert curve(plan) == pytest.approx(true_s(3, 200, 0, 0))
    plan.add(9, [1] * 64, 128, [])
    assert curve(plan) == pytest.approx(true_s(3, 200, 64, 128 + 65 / 2), rel=0.01)
    prompts = StepPlan()  # two short prompts see less than one long one
    prompts.add(0, [1] * 64, 0, [])
    prompts.add(1, [1] * 64, 0, [], draw=GREEDY)
    assert curve(prompts) == pytest.approx(true_s(0, 0, 128, 65 / 2), rel=0.01)
    chunk = StepPlan()  # the middle of a prompt draws nothing
    chunk.add(0, [1] * 16, 0, [])
    assert curve(chunk) == pytest.approx(true_s(0, 0, 16, 17 / 2) - 1e-3)


def test_a_curve_without_all_its_points_still_answers() -> None:
    """As after a Ctrl-C: decoding alone, a single size, no mixed steps."""
    single = Curve([step(2, 32, 0, 0)])
    assert single.seconds(decode_rows=2) == pytest.approx(true_s(2, 32, 0, 0))
    assert single.seconds(decode_rows=8) > single.seconds(decode_rows=2)
    few = Curve([step(n, 32, 0, 0) for n in ROWS] + [step(0, 0, p, 0) for p in CHUNKS])
    assert few.seconds(decode_rows=4, prompt_tokens=64) > few.seconds(decode_rows=4)
    with pytest.raises(ConfigError, match="no step that decodes"):
        Curve([step(0, 0, 16, 0)])


def test_a_line_goes_on_beyond_its_ends_and_never_falls() -> None:
    line = Line({1: 1.0, 3: 5.0, 5: 4.0, 6: 6.0})
    assert [line(at) for at in (0, 1, 2, 3, 4, 5, 6, 8)] == [1, 1, 3, 5, 5, 5, 6, 8]
    assert Line({2: 7.0})(100) == 7.0
    with pytest.raises(ValueError, match="a point"):
        Line({})
