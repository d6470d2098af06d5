"""The way in: whoever comes is handed on once, after its work and its delay."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from headrace.simulate.intake import Intake

seconds = st.floats(0, 10)


@given(st.lists(st.tuples(seconds, st.floats(0.001, 2), seconds), max_size=30))
def test_each_is_handed_on_once_and_the_process_is_never_idle_with_work(
    coming: list[tuple[float, float, float]],
) -> None:
    intake: Intake[int] = Intake()
    coming = sorted(coming)
    for number, (at_s, work_s, delay_s) in enumerate(coming):
        intake.offer(number, at_s, work_s=work_s, delay_s=delay_s)
    assert len(intake) == len(coming)
    ready = {item: at_s for at_s, item in intake.take(1e9)}
    assert sorted(ready) == list(range(len(coming)))
    assert not len(intake)
    # Work that is done at one time or another is the same: the last is done when a process that
    # serves one after the other would be done.
    done_s = 0.0
    for number, (at_s, work_s, delay_s) in enumerate(coming):
        done_s = max(done_s, at_s) + work_s
        assert ready[number] >= at_s + work_s + delay_s - 1e-9
    if coming:
        last = max(at_s - coming[item][2] for item, at_s in ready.items())
        assert last == pytest.approx(done_s)


def test_those_that_come_meanwhile_go_through_together() -> None:
    intake: Intake[str] = Intake()
    intake.offer("a", 0.0, work_s=1.0)
    intake.offer("b", 0.2, work_s=0.5)
    intake.offer("c", 0.3, work_s=0.25, delay_s=2.0)
    assert intake.next_s == 1.0
    assert list(intake.take(0.9)) == []
    assert list(intake.take(1.0)) == [(1.0, "a")]
    assert intake.next_s == 1.75
    assert set(intake) == {"b", "c"}
    intake.offer("d", 1.5, work_s=0.1)  # too late for their round
    assert list(intake.take(1.9)) == [(1.75, "b"), (1.85, "d")]
    assert list(intake.take(4.0)) == [(3.75, "c")]
    assert intake.next_s == math.inf


def test_without_work_nobody_waits_for_anybody() -> None:
    intake: Intake[str] = Intake()
    intake.offer("late", 5.0)
    intake.offer("early", 1.0, delay_s=0.5)
    assert intake.next_s == 1.5
    assert [item for _, item in intake.take(9.0)] == ["early", "late"]
