"""Decisions again and again: what replicas report in, a number out, on a clock of our own."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from headrace.policies.scaler import ReplicaSeen, Scaler, fleet_seen
from headrace.policies.scaling import ScalingRules

RULES = ScalingRules(least=1, most=8, waiting_s=0.25, calm_s=60.0, interval_s=5.0)
IDLE = ReplicaSeen(pending_prefill_s=0.0, saturation=0.0)
FULL = ReplicaSeen(pending_prefill_s=0.0, saturation=1.0)


def test_prompts_that_wait_ask_for_so_many_replicas() -> None:
    waiting = ReplicaSeen(pending_prefill_s=0.75, saturation=1.0)
    assert Scaler(RULES).decide(0.0, [waiting], target=1) == 2  # at most twice as many
    assert Scaler(RULES).decide(0.0, [waiting, waiting], target=2) == 4
    assert Scaler(RULES).decide(0.0, [waiting] * 4, target=4) == 8


def test_between_decisions_nothing_changes() -> None:
    scaler = Scaler(RULES)
    assert scaler.decide(0.0, [FULL], target=1) == 2
    assert scaler.decide(1.0, [FULL, FULL], target=2) == 2
    assert scaler.decide(4.9, [FULL, FULL], target=2) == 2
    assert scaler.decide(5.0, [FULL, FULL], target=2) == 3


def test_replicas_that_start_count_as_if_they_were_there() -> None:
    scaler = Scaler(RULES)
    assert scaler.decide(0.0, [FULL], target=2) == 2
    assert scaler.decide(60.0, [FULL, FULL], target=2) == 3


def test_one_goes_after_a_calm_time_and_then_another() -> None:
    scaler = Scaler(RULES)
    target, changes = 3, []
    for second in range(0, 400):
        wanted = scaler.decide(float(second), [IDLE] * target, target=target)
        if wanted != target:
            changes.append(second)
            target = wanted
    assert changes == [60, 120]
    assert target == 1


def test_need_in_between_begins_the_calm_time_anew() -> None:
    scaler = Scaler(RULES)
    half = ReplicaSeen(pending_prefill_s=0.0, saturation=0.6)
    for second in range(0, 55, 5):
        assert scaler.decide(float(second), [IDLE, IDLE], target=2) == 2
    assert scaler.decide(55.0, [half, half], target=2) == 2  # one could not have it alone
    for second in range(60, 115, 5):
        assert scaler.decide(float(second), [IDLE, IDLE], target=2) == 2
    assert scaler.decide(115.0, [IDLE, IDLE], target=2) == 1


def test_requests_that_no_replica_took_ask_for_one_more() -> None:
    assert Scaler(RULES).decide(0.0, [IDLE, IDLE], target=2, unplaced=3) == 3


def test_late_answers_ask_for_one_more_only_while_prompts_wait() -> None:
    late = ReplicaSeen(pending_prefill_s=0.1, saturation=0.6, headroom=-0.5)
    assert Scaler(RULES).decide(0.0, [late, FULL], target=2) == 3
    alone = ReplicaSeen(pending_prefill_s=0.0, saturation=0.6, headroom=-0.5)
    assert Scaler(RULES).decide(0.0, [alone, alone], target=2) == 2


def test_silence_is_not_idleness() -> None:
    """Where no replica takes requests, as after all were killed, none is taken away."""
    scaler = Scaler(RULES)
    for second in range(0, 300, 5):
        assert scaler.decide(float(second), [], target=3) == 3


def test_one_that_is_on_its_way_out_is_waited_for() -> None:
    scaler = Scaler(RULES)
    assert scaler.decide(0.0, [FULL, FULL, FULL], target=2) == 2
    assert scaler.decide(0.1, [FULL, FULL], target=2) == 3


def test_what_is_not_known_is_left_out() -> None:
    seen = fleet_seen([ReplicaSeen(), FULL], starting=1, unplaced=0, calm_s=3.0)
    assert (seen.ready, seen.starting, seen.busy, seen.headroom) == (2, 1, 0.5, None)


reports = st.builds(
    ReplicaSeen,
    pending_prefill_s=st.none() | st.floats(0, 100),
    saturation=st.none() | st.floats(0, 1),
    headroom=st.none() | st.floats(-10, 1),
)


@given(st.lists(st.tuples(st.floats(0, 30), st.lists(reports, max_size=8)), max_size=30))
def test_within_bounds_and_one_fewer_at_most(events: list[tuple[float, list[ReplicaSeen]]]) -> None:
    scaler, now_s, target = Scaler(RULES), 0.0, 2
    for pause_s, seen in events:
        now_s += pause_s
        wanted = scaler.decide(now_s, seen[:target], target=target)
        assert RULES.least <= wanted <= RULES.most
        assert target - 1 <= wanted <= max(2 * target, target + 1)
        target = wanted
