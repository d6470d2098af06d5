"""What is measured of a runner, with a runner on a virtual clock whose costs are known."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from headrace.calibrate.host import measure_host
from headrace.calibrate.statistic import mean, spread
from headrace.calibrate.steps import CONTEXT, Point, Steps, measure, points_for
from headrace.core.clock import VirtualClock
from headrace.core.step import RunnerLimits, StepPlan
from headrace.simulate.cost import linear_cost
from headrace.simulate.curve import Curve
from headrace.simulate.runner import SimulatedRunner

LIMITS = RunnerLimits(
    max_batch_tokens=128,
    max_sequences=8,
    total_blocks=256,
    block_tokens=16,
    context_tokens=2048,
)
COST = linear_cost(base_s=0.004, per_token_s=0.001, per_context_token_s=1e-6)

limits = st.builds(
    RunnerLimits,
    max_batch_tokens=st.integers(1, 9000),
    max_sequences=st.integers(1, 300),
    total_blocks=st.integers(4, 3000),
    block_tokens=st.sampled_from([16, 64]),
    context_tokens=st.integers(64, 9000),
    padded_tokens=st.sampled_from([(), (1, 64, 128, 9000)]),
)


@given(limits)
def test_points_are_within_the_limits_and_some_decode(bounds: RunnerLimits) -> None:
    points = points_for(bounds)
    assert any(point.decode_rows for point in points)
    assert len(set(points)) == len(points)
    for point in points:
        plan = point.plan([1] * 512, bounds.block_tokens)
        used = [block for table in plan.tables for block in table]
        assert plan.batch_tokens == point.batch_tokens <= bounds.max_batch_tokens
        assert len(plan) <= bounds.max_sequences
        assert len(set(used)) == len(used) == point.blocks(bounds.block_tokens)
        assert max(used) < bounds.total_blocks
        ends = [start + n for start, n in zip(plan.starts, plan.counts, strict=True)]
        assert max(ends) <= bounds.context_tokens


def test_steps_in_flight_are_measured_from_result_to_result() -> None:
    """What the host does meanwhile is hidden behind the device, as in a server."""
    clock = VirtualClock()
    limits = replace(LIMITS, steps_in_flight=2)
    runner = SimulatedRunner(limits, cost=COST, clock=clock, host=lambda plan: 0.001)
    steps = Steps(runner, 1000, clock.now_s)
    point = Point(decode_rows=4)
    steps.fill([point])
    steps.warm_up(point)
    plan = point.plan([1] * 8, limits.block_tokens)
    assert steps.settled_seconds(point) == pytest.approx(COST(plan))


def test_tables_of_two_points_have_two_versions() -> None:
    """A runner that has seen a table keeps it by its version."""
    seen: dict[tuple[int, int], list[int]] = {}

    class Watching(SimulatedRunner):
        def submit(self, plan: StepPlan) -> None:
            for row, table in enumerate(plan.tables):
                key = plan.sequence_ids[row], plan.versions[row]
                known = seen.setdefault(key, table)
                shorter, longer = sorted([known, table], key=len)
                assert longer[: len(shorter)] == shorter
            super().submit(plan)

    steps = Steps(Watching(LIMITS, cost=COST, clock=VirtualClock()), vocab_size=1000)
    points = points_for(LIMITS)
    steps.fill(points)
    for point in [*points, *points]:
        steps.settled_seconds(point)


def test_what_is_measured_of_a_runner_is_what_it_costs() -> None:
    runner = SimulatedRunner(LIMITS, cost=COST, clock=VirtualClock())
    steps, points = Steps(runner, vocab_size=1000), points_for(LIMITS)
    steps.fill(points)
    found, is_stopped = measure(steps.settled_seconds, points, is_over=lambda rounds: rounds >= 2)
    assert not is_stopped
    assert {one.repetitions for one in found} == {2}
    assert {one.spread for one in found} == {0.0}
    curve = Curve(found)
    for point in (Point(decode_rows=5, context_tokens=300), Point(prompt_tokens=100)):
        expected = COST(point.plan([1] * 512, 16))
        context = point.context_tokens
        seconds = curve.seconds(
            decode_rows=point.decode_rows,
            context_tokens=context,
            prompt_tokens=point.prompt_tokens,
        )
        assert seconds == pytest.approx(expected, rel=0.01)


def test_means_of_points_in_turn_and_a_ctrl_c_keeps_them() -> None:
    points = [Point(decode_rows=1), Point(decode_rows=2)]
    times = iter([1.0, 2.0, 1.2, 9.0, 1.1, 2.2])
    order: list[Point] = []

    def seconds(point: Point) -> float:
        order.append(point)
        return next(times)

    (one, two), _ = measure(seconds, points, is_over=lambda rounds: rounds >= 3)
    assert order == points * 3
    assert one.seconds == pytest.approx(1.1)
    assert two.seconds == pytest.approx((2 + 2.2 + 2.5 * 2.2) / 3)  # a stall is cut
    assert one.context_tokens == CONTEXT

    def stopped(point: Point) -> float:
        if len(order) == 9:
            raise KeyboardInterrupt
        order.append(point)
        return 1.0

    kept, is_stopped = measure(stopped, points, is_over=lambda rounds: False)
    assert is_stopped
    assert [each.repetitions for each in kept] == [2, 1]

    def at_once(point: Point) -> float:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        measure(at_once, points, is_over=lambda rounds: False)


def test_the_engine_is_timed_for_as_many_rows_as_fit() -> None:
    runner = SimulatedRunner(LIMITS, cost=COST, clock=VirtualClock())
    found = measure_host(runner, (1, 4, 16))
    assert [one.decode_rows for one in found] == [1, 4]
    assert all(one.schedule_s >= 0 and one.commit_s >= 0 for one in found)


def test_spread() -> None:
    assert spread([2.0, 2.0, 2.0, 2.0]) == 0
    assert spread([1.0, 2.0, 3.0, 4.0, 5.0]) == pytest.approx(1 / 3)
    assert spread([1.0, 3.0]) == pytest.approx(0.5)


def test_a_mean_counts_slow_rounds_and_cuts_a_stall() -> None:
    assert mean([1.0, 2.0, 3.0]) == 2.0
    assert mean([0.3, 0.3, 0.6]) == pytest.approx(0.4)
    assert mean([1.0, 1.0, 1.0, 100.0]) == pytest.approx((3 + 2.5) / 4)
