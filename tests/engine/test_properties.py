"""Whatever the load, a sequence's tokens are its own: random workloads against solo runs.

The runner is simulated (`headrace.simulate.runner`): what it draws depends on the whole prefix as
the blocks hold it, so that a mistake with blocks anywhere ends in other tokens. Time is virtual.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from typing import Any, TypeVar

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from headrace.core.clock import VirtualClock
from headrace.core.config import Policy, SchedulerConfig
from headrace.core.constraint import Allowed, Foreseen, GrammarKind, GrammarSpec
from headrace.core.errors import HeadraceError
from headrace.core.request import BeamParams, FinishReason, GenerateRequest, SamplingParams
from headrace.core.speculation import Speculator
from headrace.core.step import RunnerLimits
from headrace.engine.loop import Engine
from headrace.simulate.cost import linear_cost
from headrace.simulate.drive import Arrival, Outcome, drive
from headrace.simulate.runner import SimulatedRunner

T = TypeVar("T")

FAILED = (FinishReason.ERROR, FinishReason.REFUSED)
VOCAB, EOS, EOS_RATE = 40, 39, 0.04
CONTEXT_TOKENS = 64
# What prompts begin with: requests of a family share blocks.
FAMILIES = [[(7 * family + 3 * at) % VOCAB for at in range(40)] for family in range(3)]

ROOMY = RunnerLimits(
    max_batch_tokens=4096,
    max_sequences=64,
    total_blocks=1024,
    block_tokens=16,
    context_tokens=CONTEXT_TOKENS,
)

INJECTED = ("made to fail", "as raise_on_step() asked")


@pytest.fixture(autouse=True)
def _quiet() -> Iterator[None]:
    """Preemptions and failures are logged; here they come by the thousand."""
    logging.disable()
    Walk.live = 0
    yield
    logging.disable(logging.NOTSET)


class Walk:
    """A grammar: each token lies at most `stride` above the one before it (the first above 0),
    round the vocabulary; an end may come after an even number of them, and must after `longest`.
    It takes its time: up to `slow` questions after a token go without an answer."""

    live = 0  # of all that were started or forked, those that were not closed

    def __init__(self, stride: int, longest: int, slow: int, taken: tuple[int, ...] = ()) -> None:
        self.stride, self.longest, self.slow, self.taken = stride, longest, slow, taken
        self.unanswered = 0
        self.looking: tuple[tuple[int, ...], int] | None = None
        self.is_closed = False
        Walk.live += 1

    def follow(self) -> set[int]:
        last = self.taken[-1] if self.taken else 0
        near = {(last + by) % (VOCAB - 1) for by in range(1, self.stride + 1)}
        return near | ({EOS} if len(self.taken) % 2 == 0 else set())

    def accept(self, *token_ids: int) -> None:
        assert not self.unanswered, "a token before the last one was decided"
        for token_id in token_ids:
            if self.is_stopped or token_id not in self.follow():
                raise HeadraceError(f"{token_id} may not follow {self.taken}")
            self.taken = (*self.taken, token_id)
        self.unanswered = sum(self.taken) % (self.slow + 1)
        self.looking = None

    def foresee(self, *token_ids: int, forced: int = 0) -> None:
        self.looking = token_ids, forced

    def foreseen(self, wait_s: float = 0.0) -> Foreseen | None:
        assert not self.unanswered, "looked ahead before the last one was decided"
        if self.looking is None or sum(self.taken) % (self.slow + 2) > 1:
            return None
        (token_ids, forced), ahead = self.looking, self.fork()
        masks = []
        for token_id in token_ids:
            if token_id not in ahead.follow():
                break
            ahead.taken = (*ahead.taken, token_id)
            if ahead.is_stopped:
                break
            masks.append(ahead.mask())
        else:
            while forced and len(ahead.follow()) == 1:
                ahead.taken = (*ahead.taken, *ahead.follow())
                if ahead.is_stopped:
                    break
                masks.append(ahead.mask())
                forced -= 1
        ahead.close()
        first = len(self.taken)
        return Foreseen(ahead.taken[first : first + len(masks)], masks)

    def mask(self) -> bytes:
        return sum(1 << token for token in self.follow()).to_bytes(VOCAB // 8, "little")

    def allowed(self, wait_s: float = 0.0) -> Allowed | None:
        if self.unanswered:
            self.unanswered -= 1
            return None
        return Allowed(self.mask(), is_stopped=self.is_stopped)

    @property
    def is_stopped(self) -> bool:
        return len(self.taken) >= self.longest or EOS in self.taken

    def fork(self) -> Walk:
        assert not self.unanswered
        return Walk(self.stride, self.longest, self.slow, self.taken)

    def close(self) -> None:
        assert not self.is_closed, "closed twice"
        self.is_closed = True
        Walk.live -= 1


def walk_of(request: GenerateRequest) -> Walk | None:
    if request.grammar is None:
        return None
    stride, longest, slow = map(int, request.grammar.source.split())
    return Walk(stride, longest, slow)


def arrival_of(request: GenerateRequest, **when: float | None) -> Arrival:
    constraint = (lambda: walk_of(request)) if request.grammar is not None else None
    return Arrival(request=request, constraint=constraint, **when)  # type: ignore[arg-type]


def assert_in_grammar(outcome: Outcome) -> None:
    for one in outcome.continuations.values():
        walk = walk_of(outcome.arrival.request)
        if walk is None:
            return
        for token in one.tokens:
            walk.unanswered = 0
            walk.accept(token.token_id)
        if one.finish_reason is FinishReason.STOP and not walk.is_stopped:
            params = outcome.arrival.request.params
            assert walk.taken[-1] in params.stop_token_ids
        assert not walk.is_stopped or one.finish_reason is FinishReason.STOP
        walk.close()


@dataclass(frozen=True, kw_only=True)
class Setting:
    """An engine to be put under load."""

    limits: RunnerLimits
    config: SchedulerConfig
    fail: frozenset[int] = field(default_factory=frozenset)  # sequences
    raise_on: frozenset[int] = field(default_factory=frozenset)  # steps


def make(setting: Setting, speculator: Speculator | None = None) -> tuple[Engine, VirtualClock]:
    clock = VirtualClock()
    runner = SimulatedRunner(
        setting.limits,
        cost=linear_cost(1.0, 0.01),
        clock=clock,
        vocab_size=VOCAB,
        eos_id=EOS,
        eos_rate=EOS_RATE,
        strict=True,
    )
    runner.fail(setting.fail)
    for number in setting.raise_on:
        runner.raise_on_step(number)
    return Engine(runner, frozenset({EOS}), setting.config, clock, speculator), clock


def solo(request: GenerateRequest) -> Outcome:
    """The request by itself, in a large pool and as few steps as can be."""
    engine, clock = make(Setting(limits=ROOMY, config=SchedulerConfig(prefix_cache=False)))
    (outcome,) = drive(engine, clock, [arrival_of(replace(request, timeout_s=None))])
    assert outcome.refused is None
    return outcome


def assert_same(outcome: Outcome, expected: Outcome) -> None:
    """What ended by itself is the solo run; what was ended is the beginning of it."""
    for index, found in outcome.continuations.items():
        alone = expected.continuations[index]
        if found.finish_reason in (FinishReason.STOP, FinishReason.LENGTH):
            assert found.tokens == alone.tokens
            assert found.embedding == alone.embedding
            assert (found.embedding is not None) == outcome.arrival.request.embed
        else:
            bare = [replace(token, finish_reason=None) for token in alone.tokens]
            assert found.tokens == bare[: len(found.tokens)]
            assert found.error is None or found.finish_reason in FAILED
    if outcome.arrival.request.beam is not None and any(
        one.tokens for one in outcome.continuations.values()
    ):
        assert outcome.continuations.keys() == expected.continuations.keys()


def assert_ended_well(outcome: Outcome, setting: Setting) -> None:
    request = outcome.arrival.request
    reasons = {c.finish_reason for c in outcome.continuations.values()}
    if outcome.cancelled:
        assert outcome.arrival.cancel_at_s is not None
        return
    assert None not in reasons
    assert FinishReason.ABORT not in reasons
    if FinishReason.TIMEOUT in reasons:
        assert request.timeout_s is not None
    for one in outcome.continuations.values():
        if one.finish_reason in FAILED:
            assert setting.fail or setting.raise_on
            # Ours, and not the runner's complaint of a plan.
            assert any(text in (one.error or "") for text in INJECTED), one.error
    if outcome.refused is not None:
        most = len(request.prompt_token_ids) + (request.params.max_tokens or 0) - 1
        width = 1 if request.beam is None else request.beam.beam_width
        blocks = width * (-(-most // setting.limits.block_tokens) + (width > 1))
        slots = min(setting.limits.max_sequences, setting.limits.max_batch_tokens)
        assert blocks > setting.limits.total_blocks or most >= CONTEXT_TOKENS or width > slots


def check_workload(
    setting: Setting, arrivals: list[Arrival], speculator: Speculator | None = None
) -> Engine:
    engine, clock = make(setting, speculator)
    outcomes = list(
        # A request may have to wait for all before it, token by token, and be computed again often.
        drive(engine, clock, arrivals, max_idle_steps=3000, after_step=engine.check_integrity)
    )
    assert sorted(o.request_id for o in outcomes) == sorted(a.request.request_id for a in arrivals)
    for outcome in outcomes:
        assert_ended_well(outcome, setting)
        assert_in_grammar(outcome)
        if outcome.refused is None:
            assert_same(outcome, solo(outcome.arrival.request))
    blocks = engine.blocks
    assert not engine.has_work
    assert blocks.used_blocks == 0
    assert blocks.free_blocks + blocks.cached_blocks == blocks.total_blocks
    if not setting.config.prefix_cache:
        assert blocks.cached_blocks == 0
    assert engine.step() == []
    assert Walk.live == 0, "a grammar of a request that has ended is still there"
    return engine


# -- what hypothesis draws ---------------------------------------------------------------------


def rarely(strategy: st.SearchStrategy[T]) -> st.SearchStrategy[T | None]:
    return st.integers(0, 5).flatmap(lambda dice: strategy if dice == 5 else st.none())


grammars = st.builds(
    lambda *numbers: GrammarSpec(kind=GrammarKind.LARK, source=" ".join(map(str, numbers))),
    st.sampled_from([1, 3, 7]),
    st.sampled_from([1, 6, 1000]),
    st.sampled_from([0, 1, 5]),  # slow
)


# Whose a request is, and of what weight: most workloads have several.
tenants: st.SearchStrategy[dict[str, Any]] = st.sampled_from(
    [{}, {"tenant": "a"}, {"tenant": "b"}, {"tenant": "c", "weight": 3}]  # "" has a weight of 1
)


def short_answers() -> GenerateRequest:
    """After these the engine expects short answers, admits more at a time, and has to preempt."""
    params = SamplingParams(temperature=0.0, max_tokens=1, n=64)
    return GenerateRequest(request_id="short answers", prompt_token_ids=[1], params=params)


@st.composite
def requests(draw: st.DrawFn, number: int, beams: bool) -> GenerateRequest:
    shared = FAMILIES[draw(st.integers(0, 2))][: draw(st.sampled_from([0, 4, 11, 16, 30]))]
    own = [(11 * number + 5 * at) % VOCAB for at in range(draw(st.integers(1, 20)))]
    max_tokens = draw(st.sampled_from([1, 3, 8, 16, 30]))
    n = draw(st.sampled_from([1, 1, 1, 2, 3]))
    prompt_logprobs = draw(st.sampled_from([None, None, None, 0, 2]))
    params = SamplingParams(
        temperature=draw(st.sampled_from([0.0, 1.0, 0.7])),
        top_k=draw(st.sampled_from([0, 0, 3])),
        presence_penalty=draw(st.sampled_from([0.0, 0.0, 1.0])),
        max_tokens=max_tokens,
        min_tokens=draw(st.sampled_from([0, 0, 3])) % (max_tokens + 1),
        seed=draw(st.integers(0, 3)),
        stop_token_ids=draw(st.lists(st.integers(0, VOCAB - 1), max_size=2)),
        ignore_eos=draw(st.booleans()),
        logprobs=draw(st.sampled_from([None, 2])),
        prompt_logprobs=prompt_logprobs,
        n=n,
        best_of=draw(st.sampled_from([None, n + 1])),
    )
    beam = None
    if beams and draw(st.booleans()):
        beam = BeamParams(beam_width=draw(st.integers(1, 3)), max_tokens=max_tokens)
        params = SamplingParams(max_tokens=max_tokens)
    embed = beam is None and draw(st.integers(0, 7)) == 0
    if embed:
        params = SamplingParams(max_tokens=max_tokens)
    return GenerateRequest(
        request_id=f"r{number}",
        prompt_token_ids=shared + own,
        params=params,
        beam=beam,
        priority=draw(st.integers(-1, 1)),
        cache_salt=draw(st.sampled_from(["", "", "tenant"])),
        **draw(tenants),
        grammar=draw(rarely(grammars)) if not (beam or embed or params.min_tokens) else None,
        embed=embed,
        timeout_s=draw(rarely(st.sampled_from([1.0, 7.5, 30.0]))),
    )


@st.composite
def workloads(draw: st.DrawFn, beams: bool) -> list[Arrival]:
    arrivals = []
    at_s = 0.0
    if draw(st.booleans()):
        arrivals.append(Arrival(request=short_answers()))
        at_s = 100.0
    for number in range(draw(st.integers(1, 9))):
        at_s += draw(st.sampled_from([0.0, 0.0, 1.0, 3.0, 12.0]))
        cancel_after_s = draw(rarely(st.integers(0, 25)))
        arrivals.append(
            arrival_of(
                draw(requests(number, beams)),
                at_s=at_s,
                cancel_at_s=None if cancel_after_s is None else at_s + cancel_after_s,
            )
        )
    return arrivals


@st.composite
def engine_settings(draw: st.DrawFn) -> Setting:
    limits = RunnerLimits(
        max_batch_tokens=draw(st.sampled_from([1, 2, 3, 5, 8, 16, 64])),
        max_sequences=draw(st.integers(1, 8)),
        total_blocks=draw(st.sampled_from([8, 12, 16, 24, 40])),
        block_tokens=draw(st.sampled_from([2, 4, 8])),
        context_tokens=CONTEXT_TOKENS,
        steps_in_flight=draw(st.integers(1, 2)),
    )
    config = SchedulerConfig(
        policy=draw(st.sampled_from(list(Policy))),
        prefix_cache=draw(st.booleans()),
        watermark=draw(st.sampled_from([0.0, 0.02, 0.3])),
        max_step_growth=draw(st.sampled_from([1.0, 2.0, 100.0])),
    )
    return Setting(
        limits=limits,
        config=config,
        fail=frozenset(draw(rarely(st.sets(st.integers(0, 80), max_size=9))) or ()),
        raise_on=frozenset(draw(rarely(st.sets(st.integers(0, 80), max_size=2))) or ()),
    )


under_load = settings(
    max_examples=int(os.environ.get("HEADRACE_TEST_EXAMPLES", "200")),
    deadline=None,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large],
)


@under_load
@given(engine_settings(), workloads(beams=False))
def test_no_request_can_tell_what_else_is_going_on(
    setting: Setting, arrivals: list[Arrival]
) -> None:
    check_workload(setting, arrivals)


@st.composite
def tight_settings(draw: st.DrawFn) -> Setting:
    """Hardly room for one of the longest requests, and many at a time."""
    setting = draw(engine_settings())
    limits = replace(
        setting.limits,
        max_batch_tokens=draw(st.sampled_from([8, 16, 64])),
        max_sequences=8,
        total_blocks=draw(st.integers(9, 16)),
        block_tokens=4,
    )
    return replace(setting, limits=limits, config=replace(setting.config, watermark=0.0))


@st.composite
def tight_workloads(draw: st.DrawFn) -> list[Arrival]:
    arrivals = [Arrival(request=short_answers())]
    at_s = 100.0
    for number in range(draw(st.integers(3, 8))):
        at_s += draw(st.sampled_from([0.0, 0.0, 1.0, 12.0]))
        prompt = draw(st.sampled_from([FAMILIES[0][:9], [number], FAMILIES[0][:4] + [number] * 3]))
        params = SamplingParams(
            temperature=draw(st.sampled_from([0.0, 1.0])),
            presence_penalty=draw(st.sampled_from([0.0, 0.0, 1.0])),
            max_tokens=draw(st.integers(10, 28)),
            seed=number,
            ignore_eos=draw(st.booleans()),
            prompt_logprobs=draw(rarely(st.just(1))),
            n=draw(st.sampled_from([1, 1, 2])),
        )
        request = GenerateRequest(
            request_id=f"r{number}",
            prompt_token_ids=prompt,
            params=params,
            priority=draw(st.integers(-1, 1)),
            grammar=draw(rarely(grammars)),
            **draw(tenants),
        )
        cancel_after_s = draw(rarely(st.integers(0, 25)))
        cancel_at_s = None if cancel_after_s is None else at_s + cancel_after_s
        arrivals.append(arrival_of(request, at_s=at_s, cancel_at_s=cancel_at_s))
    return arrivals


@under_load
@given(tight_settings(), tight_workloads())
def test_nor_when_blocks_run_out(setting: Setting, arrivals: list[Arrival]) -> None:
    check_workload(setting, arrivals)


@under_load
@given(engine_settings(), workloads(beams=True))
def test_nor_can_a_beam_search(setting: Setting, arrivals: list[Arrival]) -> None:
    check_workload(setting, arrivals)
