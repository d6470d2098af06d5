"""The circuit breaker: opens after failures in a row, tries one request, and never stays shut."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from headrace.policies.breaker import Breaker, BreakerRules, Circuit

RULES = BreakerRules(failures=3, open_s=2.0, most_open_s=16.0)
EVENTS = st.lists(
    st.tuples(st.sampled_from(["send", "ok", "fail", "left"]), st.floats(0.0, 5.0)), max_size=60
)


def failed(breaker: Breaker, times: int, now_s: float = 0.0) -> Breaker:
    for _ in range(times):
        breaker = breaker.failed(now_s)
    return breaker


def test_failures_in_a_row_open_it() -> None:
    breaker = failed(Breaker(rules=RULES), 2)
    assert breaker.may_send(0.0)
    assert failed(breaker.succeeded(), 2).may_send(0.0)  # in a row: a success starts anew
    opened = breaker.failed(10.0)
    assert (opened.state, opened.until_s) == (Circuit.OPEN, 12.0)
    assert not opened.may_send(11.9)
    assert opened.may_send(12.0)
    assert opened.failed(11.0) == opened  # sent before it opened


def test_one_trial_decides() -> None:
    trial = failed(Breaker(rules=RULES), 3).sent(2.0)
    assert trial.state is Circuit.HALF_OPEN
    assert not trial.may_send(2.0)
    assert trial.succeeded() == Breaker(rules=RULES)
    again = trial.failed(3.0)
    assert (again.state, again.until_s) == (Circuit.OPEN, 7.0)  # twice as long
    assert trial.unknown(3.0).may_send(3.0)  # its client left: another may try


def test_waiting_has_a_most() -> None:
    breaker, now_s = failed(Breaker(rules=RULES), 3), 0.0
    for _ in range(10):
        now_s = breaker.until_s
        breaker = breaker.sent(now_s).failed(now_s)
    assert breaker.until_s - now_s == RULES.most_open_s


@given(EVENTS)
def test_whatever_happens(events: list[tuple[str, float]]) -> None:
    breaker, now_s, trials = Breaker(rules=RULES), 0.0, 0
    for what, passed_s in events:
        now_s += passed_s
        before = breaker
        if what == "send":
            if not breaker.may_send(now_s):
                continue
            breaker = breaker.sent(now_s)
            trials += breaker.state is Circuit.HALF_OPEN
        elif what == "ok":
            breaker = breaker.succeeded()
            assert breaker.may_send(now_s)
        elif what == "fail":
            breaker = breaker.failed(now_s)
            assert before.state is not Circuit.CLOSED or breaker.state is not Circuit.HALF_OPEN
        else:
            breaker = breaker.unknown(now_s)
            assert breaker.state is not Circuit.HALF_OPEN
        # It opens only where enough failed in a row, or a trial did.
        if breaker.state is Circuit.OPEN and before.state is Circuit.CLOSED:
            assert before.failures == RULES.failures - 1
        # It is never shut for longer than the most.
        if breaker.state is Circuit.OPEN:
            assert breaker.until_s <= now_s + RULES.most_open_s
            assert breaker.may_send(now_s + RULES.most_open_s)
        # Half-open has exactly one request under way.
        if breaker.state is Circuit.HALF_OPEN:
            assert not breaker.may_send(now_s)
    assert trials <= len(events)
