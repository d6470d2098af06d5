"""The lean runner: to an engine it is as the strict one, for less."""

from __future__ import annotations

import itertools
import logging
import random
from collections.abc import Iterator
from typing import Any

import pytest

from headrace.core.clock import VirtualClock
from headrace.core.config import Policy, SchedulerConfig
from headrace.core.request import FinishReason, GenerateRequest, SamplingParams
from headrace.core.step import RunnerLimits, StepPlan
from headrace.engine.loop import Engine
from headrace.simulate.cost import linear_cost
from headrace.simulate.drive import Arrival, drive
from headrace.simulate.lean import LeanRunner
from headrace.simulate.runner import SimulatedRunner

WORKLOADS = 1000
VOCAB = 5000
# What prompts begin with: requests of a family share blocks.
FAMILIES = [[1000 + 97 * family + at for at in range(24)] for family in range(3)]


@pytest.fixture(autouse=True)
def _quiet() -> Iterator[None]:
    logging.disable()
    yield
    logging.disable(logging.NOTSET)


def random_limits(chooser: random.Random) -> RunnerLimits:
    block_tokens = chooser.choice((2, 4, 8))
    return RunnerLimits(
        max_batch_tokens=chooser.choice((8, 16, 64)),
        max_sequences=chooser.choice((1, 3, 8)),
        total_blocks=chooser.choice((40, 44, 64)) // block_tokens + 1,
        block_tokens=block_tokens,
        context_tokens=48,
        steps_in_flight=chooser.choice((1, 2)),
    )


def random_arrivals(chooser: random.Random) -> list[Arrival]:
    at_s, arrivals = 0.0, []
    for number in range(chooser.randint(2, 8)):
        at_s += chooser.expovariate(chooser.choice((0.8, 20.0)))
        shared = chooser.choice(FAMILIES)[: chooser.choice((0, 4, 8, 16, 24))]
        own = [chooser.randrange(VOCAB) for _ in range(chooser.randint(1, 12))]
        samples = chooser.random() < 0.3
        request = GenerateRequest(
            request_id=str(number),
            prompt_token_ids=[*shared, *own],
            params=SamplingParams(
                temperature=0.7 if samples else 0.0,
                max_tokens=chooser.choice((1, 4, 12, 20)),
                ignore_eos=True,
                seed=number,
            ),
            priority=chooser.randint(0, 2),
            tenant=chooser.choice(("", "", "a")),
            timeout_s=chooser.choice((None, None, None, 3.0)),
        )
        cancel_at_s = at_s + chooser.uniform(0.0, 3.0) if chooser.random() < 0.1 else None
        arrivals.append(Arrival(request=request, at_s=at_s, cancel_at_s=cancel_at_s))
    return arrivals


def random_config(chooser: random.Random) -> SchedulerConfig:
    return SchedulerConfig(
        policy=chooser.choice(list(Policy)),
        prefix_cache=chooser.random() < 0.8,
        watermark=chooser.choice((0.0, 0.02)),
        max_step_growth=chooser.choice((None, 4.0)),
    )


def outcomes(
    runner: LeanRunner | SimulatedRunner,
    clock: VirtualClock,
    config: SchedulerConfig,
    arrivals: list[Arrival],
    ended_before: int,
) -> tuple[list[Any], dict[str, Any]]:
    """All that can be seen of a run, except which tokens were drawn. Admission expects the short
    outputs of `ended_before`, so that longer ones run out of blocks."""
    engine = Engine(runner, frozenset(), config, clock)
    for _ in range(ended_before):
        engine.scheduler._admission.learn(1)
    seen: list[Any] = []
    for outcome in drive(engine, clock, arrivals):
        continuations = {
            index: (one.times_s, one.finish_reason, one.error)
            for index, one in sorted(outcome.continuations.items())
        }
        refused = None if outcome.refused is None else str(outcome.refused)
        seen.append((outcome.request_id, continuations, refused, outcome.cancelled))
    stats = engine.stats
    counted = {
        "started": [
            (each.request_id, each.waited_s, each.cached_tokens) for each in engine.take_started()
        ],
        "steps": stats.steps,
        "prompt tokens": stats.prompt_tokens,
        "generated tokens": stats.generated_tokens,
        "preemptions": stats.preemptions,
        "lost tokens": stats.preempted_tokens,
        "hits": stats.prefix.hits_tokens,
        "queries": stats.prefix.queries_tokens,
        "misses": stats.prefix.misses,
        "finished": stats.finished,
        "compute": stats.compute_s,
        "end": clock.now_s(),
    }
    return seen, counted


def test_outcomes_are_those_of_the_strict_runner() -> None:
    hits = preemptions = ended = refused = 0
    for seed in range(WORKLOADS):
        chooser = random.Random(seed)
        limits, config = random_limits(chooser), random_config(chooser)
        arrivals = random_arrivals(chooser)
        costs: dict[str, Any] = {
            "host": chooser.choice((None, linear_cost(0.04, 0.001))),
            "result": chooser.choice((None, linear_cost(0.02, 0.0))),
        }
        cost = linear_cost(0.1, 0.01, 0.001)
        ended_before = chooser.choice((0, 60))
        clock = VirtualClock()
        lean = LeanRunner(limits, cost=cost, clock=clock, **costs)
        got = outcomes(lean, clock, config, arrivals, ended_before)
        clock = VirtualClock()
        strict = SimulatedRunner(
            limits, cost=cost, clock=clock, vocab_size=VOCAB, strict=True, **costs
        )
        assert got == outcomes(strict, clock, config, arrivals, ended_before), f"workload {seed}"
        hits += got[1]["hits"]
        preemptions += got[1]["preemptions"]
        ended += got[1]["finished"].get(FinishReason.LENGTH, 0)
        refused += sum(1 for each in got[0] if each[2] is not None)
    # The workloads have in them what could go wrong.
    assert hits > 1000
    assert preemptions > 50
    assert ended > 2000
    assert refused > 10


@pytest.mark.parametrize(("steps_in_flight", "period_s"), [(1, 1.4), (2, 1.0)])
def test_the_hosts_time_is_hidden_only_if_two_steps_are_in_flight(
    steps_in_flight: int, period_s: float
) -> None:
    clock = VirtualClock()
    limits = RunnerLimits(
        max_batch_tokens=16,
        max_sequences=4,
        total_blocks=32,
        block_tokens=4,
        context_tokens=100,
        steps_in_flight=steps_in_flight,
    )
    runner = LeanRunner(
        limits, cost=lambda plan: 1.0, clock=clock, host=lambda plan: 0.3, result=lambda plan: 0.1
    )
    engine = Engine(runner, frozenset(), None, clock)
    params = SamplingParams(temperature=0.0, max_tokens=40, ignore_eos=True)
    engine.add(GenerateRequest(request_id="r", prompt_token_ids=[1], params=params))
    times_s = [clock.now_s() for _ in range(41) for _ in engine.step()]
    gaps = [after - before for before, after in itertools.pairwise(times_s)]
    assert gaps == pytest.approx([period_s] * 39)


def test_a_host_slower_than_the_device_sets_the_pace() -> None:
    clock = VirtualClock()
    limits = RunnerLimits(
        max_batch_tokens=16,
        max_sequences=4,
        total_blocks=32,
        block_tokens=4,
        context_tokens=100,
        steps_in_flight=2,
    )
    runner = LeanRunner(limits, cost=lambda plan: 0.2, clock=clock, host=lambda plan: 1.0)
    engine = Engine(runner, frozenset(), None, clock)
    params = SamplingParams(temperature=0.0, max_tokens=20, ignore_eos=True)
    engine.add(GenerateRequest(request_id="r", prompt_token_ids=[1], params=params))
    times_s = [clock.now_s() for _ in range(21) for _ in engine.step()]
    gaps = [after - before for before, after in itertools.pairwise(times_s)]
    assert gaps[:-1] == pytest.approx([1.0] * 18)


def test_it_refuses_what_it_can_not_answer() -> None:
    clock = VirtualClock()
    limits = RunnerLimits(
        max_batch_tokens=16, max_sequences=4, total_blocks=32, block_tokens=4, context_tokens=100
    )
    engine = Engine(
        LeanRunner(limits, cost=lambda plan: 1.0, clock=clock), frozenset(), None, clock
    )
    params = SamplingParams(temperature=0.0, max_tokens=4, logprobs=2)
    engine.add(GenerateRequest(request_id="r", prompt_token_ids=[1], params=params))
    (token,) = engine.step()
    assert token.finish_reason is FinishReason.ERROR
    assert token.error is not None
    assert "draws tokens only" in token.error


def test_a_cost_sees_the_plan_of_its_step() -> None:
    plans: list[int] = []

    def cost(plan: StepPlan) -> float:
        plans.append(plan.batch_tokens)
        return 1.0

    clock = VirtualClock()
    limits = RunnerLimits(
        max_batch_tokens=16, max_sequences=4, total_blocks=32, block_tokens=4, context_tokens=100
    )
    engine = Engine(LeanRunner(limits, cost=cost, clock=clock), frozenset(), None, clock)
    params = SamplingParams(temperature=0.0, max_tokens=3, ignore_eos=True)
    engine.add(GenerateRequest(request_id="r", prompt_token_ids=[1] * 20, params=params))
    while engine.has_work:
        engine.step()
    assert plans == [16, 4, 1, 1]
