"""Turns between tenants: accounts in values, then an engine over virtual time."""

from __future__ import annotations

import math
from collections import Counter, deque
from collections.abc import Callable, Iterator
from itertools import pairwise

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from headrace.core.clock import VirtualClock
from headrace.core.config import Policy, SchedulerConfig
from headrace.core.request import GenerateRequest, SamplingParams
from headrace.core.step import RunnerLimits, StepPlan
from headrace.engine.loop import Engine
from headrace.engine.pace import StepLine, share_out
from headrace.engine.starting import GIVING_SHARE
from headrace.engine.turns import KEPT_TENANTS, Turns
from headrace.simulate.cost import linear_cost
from headrace.simulate.drive import Arrival, Outcome, drive
from headrace.simulate.runner import SimulatedRunner

STEP_S, TOKEN_S = 1.0, 0.001

# -- accounts ------------------------------------------------------------------------------------


@given(
    weights=st.lists(st.integers(1, 9), min_size=2, max_size=6),
    pieces=st.lists(st.integers(1, 500), min_size=1, max_size=20),
)
def test_shares_are_as_weights_whatever_a_turn_is_worth(
    weights: list[int], pieces: list[int]
) -> None:
    turns = Turns()
    for number, weight in enumerate(weights):
        turns.join(str(number), weight)
    for at in range(2000):
        turn = turns.next(turns.active)
        assert turn is not None
        turns.charge(turn.tenant, pieces[at % len(pieces)])
    had = [turns.of(str(number)).tokens / weight for number, weight in enumerate(weights)]
    assert max(had) - min(had) <= max(pieces)  # none is ahead by more than one turn
    assert sum(turns.share(turn, 60) for turn in turns.active) == pytest.approx(60)


def test_a_pause_saves_nothing_up_and_pays_nothing_off() -> None:
    turns = Turns()
    turns.join("busy")
    turns.join("greedy")
    turns.charge("greedy", 5000)
    turns.leave("greedy")
    turns.charge("busy", 1000)
    turns.join("new")
    assert turns.of("new").had == turns.of("busy").had == 1000  # where the others are
    turns.join("greedy")
    assert turns.of("greedy").had == 5000  # what it had is not forgotten meanwhile
    for tenant in ("busy", "greedy", "new"):
        turns.leave(tenant)
    turns.join("greedy")
    assert turns.of("greedy").had == 0  # nobody was there: nobody was kept waiting


def test_accounts_are_bounded() -> None:
    turns = Turns()
    turns.join("stays")
    for number in range(3 * KEPT_TENANTS):
        turns.join(str(number))
        turns.leave(str(number))
    assert len(list(turns.known)) <= KEPT_TENANTS + 1
    assert [turn.tenant for turn in turns.active] == ["stays"]


# -- an engine -----------------------------------------------------------------------------------


def make(
    *, slots: int = 8, blocks: int = 4096, batch: int = 64, in_flight: int = 1, cache: bool = True
) -> tuple[Engine, VirtualClock]:
    clock = VirtualClock()
    limits = RunnerLimits(
        max_batch_tokens=batch,
        max_sequences=slots,
        total_blocks=blocks,
        block_tokens=8,
        context_tokens=4096,
        steps_in_flight=in_flight,
    )
    runner = SimulatedRunner(limits, cost=linear_cost(STEP_S, TOKEN_S), clock=clock)
    config = SchedulerConfig(prefix_cache=cache, max_step_growth=100.0)
    return Engine(runner, frozenset(), config, clock), clock


def ask(
    name: str,
    tenant: str,
    *,
    prompt: int = 8,
    tokens: int = 8,
    n: int = 1,
    weight: int = 1,
    priority: int = 0,
) -> GenerateRequest:
    start = sum(name.encode()) % 500  # prompts differ
    return GenerateRequest(
        request_id=name,
        prompt_token_ids=[(start + at) % 1000 for at in range(prompt)],
        params=SamplingParams(temperature=1.0, seed=1, max_tokens=tokens, ignore_eos=True, n=n),
        tenant=tenant,
        cache_salt=tenant,
        weight=weight,
        priority=priority,
    )


def watch_plans(engine: Engine, watch: Callable[[StepPlan], None]) -> None:
    submit = engine._runner.submit

    def watched(plan: StepPlan) -> None:
        watch(plan)
        submit(plan)

    engine._runner.submit = watched  # type: ignore[method-assign]


def first_token_s(outcome: Outcome) -> float:
    times = [one.times_s[0] for one in outcome.continuations.values() if one.times_s]
    return min(times) - outcome.arrival.at_s


def outcomes_of(found: Iterator[Outcome], name: str) -> Outcome:
    return next(outcome for outcome in found if outcome.request_id == name)


@pytest.mark.parametrize("in_flight", [1, 2])
@pytest.mark.parametrize("cache", [True, False])
def test_a_newcomer_does_not_wait_for_a_fan_out(in_flight: int, cache: bool) -> None:
    """All slots are another's, for hundreds of steps, and hundreds of its requests wait."""
    engine, clock = make(in_flight=in_flight, cache=cache)
    crowd = [ask(f"crowd{i}", "crowd", tokens=240, n=4) for i in range(12)]
    arrivals = [Arrival(request=each) for each in crowd]
    arrivals += [Arrival(request=ask(f"honest{i}", "honest"), at_s=50.0 + 40 * i) for i in range(5)]
    found = {o.request_id: o for o in drive(engine, clock, arrivals)}
    waits = [first_token_s(found[f"honest{i}"]) for i in range(5)]
    assert max(waits) < 7 * STEP_S, waits
    # Each newcomer cost one place at most, and most of what was lost was found in the cache.
    assert engine.stats.turns.of("crowd").gave_way <= 5
    assert engine.stats.turns.of("honest").gave_way == 0
    assert engine.stats.preemptions == 0


def test_nor_for_long_prompts_of_another() -> None:
    engine, clock = make(slots=16)
    arrivals = [Arrival(request=ask(f"long{i}", "crowd", prompt=3000, tokens=4)) for i in range(12)]
    arrivals.append(Arrival(request=ask("honest", "honest", prompt=20), at_s=5.0))
    honest = outcomes_of(drive(engine, clock, arrivals), "honest")
    assert first_token_s(honest) < 4 * STEP_S
    # And token after token: prompts do not get in between either.
    assert honest.continuations[0].times_s[-1] - 5.0 < 14 * STEP_S


def test_nor_for_blocks_that_another_holds() -> None:
    engine, clock = make(slots=64, blocks=200)
    arrivals = [Arrival(request=ask(f"c{i}", "crowd", prompt=40, tokens=400)) for i in range(30)]
    arrivals.append(Arrival(request=ask("honest", "honest", prompt=300, tokens=8), at_s=60.0))
    honest = outcomes_of(drive(engine, clock, arrivals), "honest")
    assert first_token_s(honest) < 15 * STEP_S
    assert engine.stats.turns.of("crowd").gave_way <= 8


def test_when_blocks_run_out_who_holds_most_loses_them() -> None:
    """Not the newest of all, who may have come to an engine that was full already."""
    engine, clock = make(slots=64, blocks=64)
    arrivals = [Arrival(request=ask(f"c{i}", "crowd", prompt=8, tokens=150)) for i in range(6)]
    arrivals.append(Arrival(request=ask("honest", "honest", prompt=8, tokens=60), at_s=2.0))
    # Short answers before, so that the engine lets in more than it can hold.
    short = [Arrival(request=ask(f"s{i}", "crowd", prompt=4, tokens=1)) for i in range(60)]
    found = {o.request_id: o for o in drive(engine, clock, [*short, *arrivals])}
    assert engine.stats.preemptions > 0
    times = found["honest"].continuations[0].times_s
    gaps = [after - before for before, after in pairwise(times)]
    assert max(gaps) < 2 * STEP_S  # it was never put back


def test_more_tenants_than_places_take_turns() -> None:
    engine, _ = make(slots=2)
    for name in ("a", "b", "c", "d", "e"):
        engine.add(ask(name, name, tokens=3000))
    seen: Counter[str] = Counter()
    for _ in range(3000):
        seen.update(token.request_id for token in engine.step())
    assert min(seen.values()) > 0.5 * max(seen.values()), seen
    lost = sum(turn.tokens for turn in engine.stats.turns.known) - sum(seen.values())
    assert lost < 0.1 * sum(seen.values())


def test_a_crowd_does_not_slow_anothers_tokens_down() -> None:
    """A step of 64 costs 16 times one of its own; sharing by weight, it may take twice as long."""
    clock = VirtualClock()
    limits = RunnerLimits(
        max_batch_tokens=512,
        max_sequences=64,
        total_blocks=8192,
        block_tokens=16,
        context_tokens=4096,
    )
    runner = SimulatedRunner(limits, cost=linear_cost(0.020, 0.007), clock=clock)
    engine = Engine(runner, frozenset(), SchedulerConfig(), clock)
    for i in range(128):
        engine.add(ask(f"crowd{i}", "crowd", tokens=2000))
    for _ in range(60):
        engine.step()
    began_s, began = clock.now_s(), engine.stats.turns.of("crowd").tokens
    questions = [
        Arrival(request=ask(f"q{i}", "honest", prompt=20, tokens=16), at_s=began_s + 2 * i)
        for i in range(20)
    ]
    last_s = 0.0
    pending = deque(questions)
    ends: dict[str, float] = {}
    while pending or len(ends) < len(questions):
        while pending and pending[0].at_s <= clock.now_s():
            engine.add(pending.popleft().request)
        for token in engine.step():
            if token.finish_reason is not None and token.request_id.startswith("q"):
                ends[token.request_id] = last_s = clock.now_s()
    took_s = [ends[each.request.request_id] - each.at_s for each in questions]
    solo_s = 16 * 0.027
    assert max(took_s) < 2 * solo_s + 2.0, took_s  # and the wait for a place
    # The crowd has at least its half of the time: of 147 tokens a second, were it alone.
    rate = (engine.stats.turns.of("crowd").tokens - began) / (last_s - began_s)
    assert rate > 0.45 * 64 / (0.020 + 64 * 0.007), rate


@given(
    counts=st.lists(st.integers(1, 100), min_size=1, max_size=6),
    weights=st.lists(st.integers(1, 5), min_size=6, max_size=6),
    fixed=st.floats(0, 500),
)
@example(counts=[2, 1], weights=[1] * 6, fixed=math.inf)
def test_no_tenant_is_slower_than_its_share_of_the_time(
    counts: list[int], weights: list[int], fixed: float
) -> None:
    named = {str(i): n for i, n in enumerate(counts)}
    by_name = {str(i): weights[i] for i in range(len(counts))}
    allowed = share_out(named, by_name, fixed)
    assert all(1 <= allowed[each] <= named[each] for each in named)
    if fixed == math.inf:  # a step takes as long with all of them
        assert allowed == named
        return
    step = fixed + sum(allowed.values())
    for each, n in named.items():
        # In steps as long as this one it has what it would have in its part of the time, or more;
        # places are whole, one for each tenant at least.
        alone = n / (fixed + n) * by_name[each] / sum(by_name.values())
        assert allowed[each] + 1 >= alone * (step - len(counts))
    if len(set(counts)) == 1 and len({by_name[each] for each in named}) == 1:
        assert allowed == named  # equals batch together, whatever a step costs


def test_what_a_step_costs_is_learnt() -> None:
    line = StepLine()
    assert line.fixed_share() == StepLine.GUESSED_SEQUENCES
    for _ in range(5):
        line.learn(0.5, 64)
    assert line.fixed_share() == StepLine.GUESSED_SEQUENCES  # of one size nothing is known
    for n in (64, 3, 5, 64, 4) * 10:
        line.learn(0.020 + 0.005 * n, n)
    assert line.fixed_share() == pytest.approx(4.0, rel=0.2)
    for n in (64, 3, 5, 64, 4) * 40:
        line.learn(0.006, n)  # as on a GPU
    assert line.fixed_share() > 500


def test_weights_hold_in_an_engine() -> None:
    engine, _ = make(slots=8)
    for i in range(300):
        engine.add(ask(f"one{i}", "one", tokens=40 + i % 7))
        engine.add(ask(f"three{i}", "three", prompt=30, tokens=20 + i % 5, weight=3))
    for _ in range(400):
        engine.step()
    one, three = (engine.stats.turns.of(tenant).tokens for tenant in ("one", "three"))
    assert 2.8 < three / one < 3.2, (one, three)


def test_priorities_are_within_a_tenant() -> None:
    clock = VirtualClock()
    runner = SimulatedRunner(
        make()[0]._runner.limits, cost=linear_cost(STEP_S, TOKEN_S), clock=clock
    )
    engine = Engine(runner, frozenset(), SchedulerConfig(policy=Policy.PRIORITY), clock)
    for i in range(60):
        engine.add(ask(f"pushy{i}", "pushy", priority=-1000, tokens=50))
    engine.add(ask("modest", "modest", priority=1000))
    for _ in range(20):
        if any(token.request_id == "modest" for token in engine.step()):
            return
    raise AssertionError("a tenant went before another by calling itself urgent")


@settings(max_examples=40, deadline=None)
@given(
    slots=st.integers(1, 9),
    in_flight=st.integers(1, 2),
    weights=st.lists(st.integers(1, 3), min_size=2, max_size=4),
    shapes=st.lists(
        st.tuples(st.integers(1, 120), st.integers(1, 60), st.integers(1, 3)),
        min_size=4,
        max_size=4,
    ),
)
def test_shares_converge_nobody_starves_and_no_place_is_left_empty(
    slots: int, in_flight: int, weights: list[int], shapes: list[tuple[int, int, int]]
) -> None:
    """Each tenant has its own mix of prompts, answers and fan-out, and always more waiting."""
    engine, _ = make(slots=slots, in_flight=in_flight)
    number = 0
    steps = 400

    def top_up() -> None:
        nonlocal number
        for tenant, weight in enumerate(weights):
            prompt, tokens, n = shapes[tenant]
            while engine.stats.waiting.count(str(tenant)) < slots + 4:
                request = ask(
                    f"{tenant}-{number}",
                    str(tenant),
                    prompt=prompt,
                    tokens=tokens,
                    n=n,
                    weight=weight,
                )
                engine.add(request)
                number += 1

    def check(plan: StepPlan) -> None:
        """All places are taken, or all that the step had room for."""
        is_full = plan.batch_tokens == engine._runner.limits.max_batch_tokens
        assert engine.scheduler.running_sequences == slots or is_full

    watch_plans(engine, check)
    before: dict[str, int] = {}
    for step in range(steps):
        top_up()
        engine.step()
        if step == steps // 4:
            before = {turn.tenant: turn.tokens for turn in engine.stats.turns.known}
    engine.check_integrity()
    had = [
        (engine.stats.turns.of(str(t)).tokens - before.get(str(t), 0)) / weight
        for t, weight in enumerate(weights)
    ]
    longest = max(prompt + tokens for prompt, tokens, _ in shapes)
    # Ahead by no more than what a slice is, or what those that run in one turn may become.
    assert max(had) - min(had) <= 256 + (2 + slots) * longest, had


@settings(max_examples=40, deadline=None)
@given(
    crowd=st.integers(1, 40),
    tokens=st.integers(20, 300),
    arrivals=st.lists(st.integers(0, 400), min_size=1, max_size=12),
    slots=st.integers(2, 32),
)
def test_giving_way_is_bounded_by_who_comes(
    crowd: int, tokens: int, arrivals: list[int], slots: int
) -> None:
    """No thrashing: a sequence that starts costs others one place at most."""
    engine, clock = make(slots=slots)
    work = [Arrival(request=ask(f"c{i}", "crowd", tokens=tokens)) for i in range(crowd)]
    work += [
        Arrival(request=ask(f"h{i}", "honest", tokens=30), at_s=float(at_s))
        for i, at_s in enumerate(sorted(arrivals))
    ]
    list(drive(engine, clock, work))
    turns = engine.stats.turns
    assert sum(turn.gave_way for turn in turns.known) <= len(arrivals) + crowd // GIVING_SHARE


def plans_of(requests: list[GenerateRequest]) -> list[object]:
    engine, _ = make(slots=4, batch=16)
    plans: list[object] = []
    watch_plans(engine, lambda plan: plans.append(repr(plan)))
    for request in requests:
        engine.add(request)
    while engine.has_work:
        engine.step()
    return plans


def test_a_name_alone_changes_nothing() -> None:
    """One tenant's plans are those of a server without keys."""

    def work(tenant: str) -> list[GenerateRequest]:
        found = [
            ask(f"r{i}", tenant, prompt=5 + 9 * i, tokens=3 + i, n=1 + i % 3) for i in range(9)
        ]
        for each in found:
            each.cache_salt = ""
        return found

    assert plans_of(work("")) == plans_of(work("somebody"))
