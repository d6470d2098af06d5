"""How many replicas: more when work waits, never for what more of them can't help."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from headrace.core.errors import ConfigError
from headrace.policies.scaling import FleetSeen, ScalingRules, wanted_replicas

RULES = ScalingRules(least=1, most=10, waiting_s=0.5, busy=0.9, idle=0.5, calm_s=60)
QUIET = FleetSeen(ready=4, starting=0, waiting_prefill_s=0.0, busy=0.7, headroom=0.5)


def test_a_fleet_with_enough_to_do_stays_as_it_is() -> None:
    assert wanted_replicas(RULES, QUIET) == 4


def test_work_that_waits_adds_replicas_at_most_twice_as_many() -> None:
    assert wanted_replicas(RULES, replace(QUIET, waiting_prefill_s=2.6)) == 6
    assert wanted_replicas(RULES, replace(QUIET, waiting_prefill_s=1000.0)) == 8


def test_those_that_start_count_as_if_they_were_there() -> None:
    seen = replace(QUIET, starting=2, waiting_prefill_s=2.6)
    assert wanted_replicas(RULES, seen) == 6


def test_a_late_first_token_adds_one_only_if_something_waits() -> None:
    late = replace(QUIET, headroom=-0.5)
    assert wanted_replicas(RULES, late) == 4  # too slow by itself: no number of replicas helps
    assert wanted_replicas(RULES, replace(late, waiting_prefill_s=0.4)) == 5


def test_full_places_add_one() -> None:
    assert wanted_replicas(RULES, replace(QUIET, busy=0.95)) == 5
    assert wanted_replicas(RULES, replace(QUIET, busy=0.95, starting=1)) == 5


def test_one_is_taken_away_after_a_calm_time_if_the_rest_has_room() -> None:
    idle = replace(QUIET, busy=0.3)
    assert wanted_replicas(RULES, idle) == 3
    assert wanted_replicas(RULES, replace(idle, calm_s=59.0)) == 4
    assert wanted_replicas(RULES, replace(idle, busy=0.4)) == 4  # 0.53 of three
    assert wanted_replicas(RULES, replace(idle, starting=1)) == 5


@given(
    ready=st.integers(0, 20),
    starting=st.integers(0, 20),
    waiting=st.floats(0, 1e6),
    busy=st.floats(0, 1),
    headroom=st.none() | st.floats(-10, 1),
    calm=st.floats(0, 1e6),
)
def test_the_number_stays_within_its_bounds(
    ready: int, starting: int, waiting: float, busy: float, headroom: float | None, calm: float
) -> None:
    seen = FleetSeen(
        ready=ready,
        starting=starting,
        waiting_prefill_s=waiting,
        busy=busy,
        headroom=headroom,
        calm_s=calm,
    )
    wanted = wanted_replicas(RULES, seen)
    there = max(1, ready + starting)
    assert 1 <= wanted <= 10
    assert min(there - 1, 10) <= wanted <= max(1, 2 * there)


@pytest.mark.parametrize(
    ("wrong", "says"),
    [
        ({"least": 5, "most": 4}, "most"),
        ({"idle": 0.95}, "idle"),
        ({"waiting_s": 0.0}, "waiting_s"),
        ({"least": 0}, "least"),
    ],
)
def test_rules_that_can_not_work_are_refused(wrong: dict[str, float], says: str) -> None:
    with pytest.raises(ConfigError, match=says):
        ScalingRules(**wrong)  # type: ignore[arg-type]
