"""Long runs over the simulated runner: right to the last token, and nobody is held up.

Expected tokens come from the hashes alone, without an engine. Time is virtual, so that what is said
of gaps between tokens is exact.
"""

from __future__ import annotations

import logging
import os
import random
from collections.abc import Iterator
from itertools import pairwise
from statistics import median

import pytest
from tests.plans import Draw

from headrace.core.clock import VirtualClock
from headrace.core.config import Policy, SchedulerConfig
from headrace.core.request import FinishReason, GenerateRequest, SamplingParams
from headrace.core.step import RunnerLimits
from headrace.engine.loop import Engine
from headrace.engine.sequence import RUN, child_seed, uniforms
from headrace.simulate.cost import Cost, linear_cost
from headrace.simulate.distribution import ROOT, Distribution, Vocabulary, extend
from headrace.simulate.drive import Arrival, drive
from headrace.simulate.runner import SimulatedRunner

VOCAB, EOS, EOS_RATE = 40, 39, 0.04
CONTEXT_TOKENS = 64
# In all; a million take some minutes.
LONG_STEPS = int(os.environ.get("HEADRACE_TEST_LONG_STEPS", "60000"))

# What prompts begin with: requests of a family share blocks.
FAMILIES = [[(7 * family + 3 * at) % VOCAB for at in range(40)] for family in range(3)]


@pytest.fixture(autouse=True)
def _quiet() -> Iterator[None]:
    """Preemptions are logged; here they come by the thousand."""
    logging.disable()
    yield
    logging.disable(logging.NOTSET)


def make(
    limits: RunnerLimits, config: SchedulerConfig, cost: Cost | None = None
) -> tuple[Engine, VirtualClock]:
    clock = VirtualClock()
    runner = SimulatedRunner(
        limits,
        cost=cost or linear_cost(1.0, 0.01),
        clock=clock,
        vocab_size=VOCAB,
        eos_id=EOS,
        eos_rate=EOS_RATE,
        strict=True,
    )
    return Engine(runner, frozenset({EOS}), config, clock), clock


def expected_tokens(request: GenerateRequest, index: int) -> list[int]:
    """A continuation straight from the hashes: no engine, no blocks, no runner."""
    params = request.params
    vocabulary = Vocabulary(VOCAB, EOS, EOS_RATE)
    seed = child_seed(params.seed or 0, index)
    value = ROOT
    for token in request.prompt_token_ids:
        value = extend(value, token)
    tokens: list[int] = []
    while len(tokens) < (params.max_tokens or 0):
        run, at = divmod(len(tokens), RUN)
        how = Draw(temperature=params.chosen.temperature, uniform=uniforms(seed, run)[at])
        drawn = Distribution(value, vocabulary).draw(how.params, how.uniform, how.extra)
        assert drawn is not None
        tokens.append(drawn)
        if drawn == EOS:
            break
        value = extend(value, drawn)
    return tokens


def endless_arrivals(chooser: random.Random) -> Iterator[Arrival]:
    """Answers of 3 tokens for a while, then of 30, and again: the engine keeps guessing wrongly."""
    at_s = 0.0
    number = 0
    while True:
        number += 1
        at_s += chooser.expovariate(1 / 3) if number % 400 < 300 else 0.5
        prompt = FAMILIES[chooser.randrange(3)][: chooser.randrange(24)]
        prompt = [*prompt, *(chooser.randrange(VOCAB) for _ in range(chooser.randint(1, 10)))]
        params = SamplingParams(
            temperature=float(chooser.randrange(2)),
            max_tokens=chooser.randint(1, 3 if number % 400 < 300 else 30),
            seed=chooser.randrange(1000),
            n=chooser.choice([1, 1, 1, 2]),
        )
        request = GenerateRequest(
            request_id=str(number),
            prompt_token_ids=prompt,
            params=params,
            priority=chooser.randrange(3),
            cache_salt=chooser.choice(["", "", "", "tenant"]),
            timeout_s=None if chooser.random() < 0.9 else 40.0,
        )
        cancel_at_s = None if chooser.random() < 0.9 else at_s + chooser.randint(0, 30)
        yield Arrival(request=request, at_s=at_s, cancel_at_s=cancel_at_s)


@pytest.mark.timeout(0 if LONG_STEPS > 100_000 else 300)
@pytest.mark.parametrize("steps_in_flight", [1, 2])
@pytest.mark.parametrize("policy", Policy)
def test_a_long_run_stays_right(policy: Policy, steps_in_flight: int) -> None:
    limits = RunnerLimits(
        max_batch_tokens=16,
        max_sequences=6,
        total_blocks=22,
        block_tokens=4,
        context_tokens=CONTEXT_TOKENS,
        steps_in_flight=steps_in_flight,
    )
    engine, clock = make(limits, SchedulerConfig(policy=policy))
    stats = engine.stats
    steps = 0

    def after_step() -> None:
        nonlocal steps
        steps += 1
        if steps % 10 == 0:
            engine.check_integrity()

    arrivals = endless_arrivals(random.Random(steps_in_flight))
    outcomes = drive(engine, clock, arrivals, max_idle_steps=500, after_step=after_step)
    while stats.steps < LONG_STEPS // 6:
        outcome = next(outcomes)
        assert outcome.refused is None
        for index, found in outcome.continuations.items():
            tokens = [token.token_id for token in found.tokens]
            expected = expected_tokens(outcome.arrival.request, index)
            if found.finish_reason in (FinishReason.STOP, FinishReason.LENGTH):
                assert tokens == expected
            else:
                assert outcome.cancelled or found.finish_reason is FinishReason.TIMEOUT
                assert tokens == expected[: len(tokens)]
    # It went through all that it is meant to go through.
    assert stats.preemptions > LONG_STEPS // 6000
    assert stats.cow_copies > LONG_STEPS // 600
    assert stats.prefix_hits_tokens > LONG_STEPS // 60
    assert all(count > 0 for count in stats.prefix_misses.values())
    assert {"stop", "length", "timeout", "abort"} <= {str(reason) for reason in stats.finished}


@pytest.mark.parametrize("steps_in_flight", [1, 2])
def test_a_long_prompt_does_not_hold_up_those_who_decode(steps_in_flight: int) -> None:
    """8,000 tokens arrive among 8 decoding sequences; costs are about those of a small model."""
    limits = RunnerLimits(
        max_batch_tokens=512,
        max_sequences=16,
        total_blocks=4096,  # so that nobody is preempted
        block_tokens=16,
        context_tokens=9000,
        steps_in_flight=steps_in_flight,
    )
    engine, clock = make(limits, SchedulerConfig(), linear_cost(0.003, 0.0005, 1e-7))

    def arrival(name: str, prompt_tokens: int, max_tokens: int, at_s: float) -> Arrival:
        prompt = [(at * 13 + len(name)) % VOCAB for at in range(prompt_tokens)]
        params = SamplingParams(temperature=0.0, max_tokens=max_tokens, ignore_eos=True)
        request = GenerateRequest(request_id=name, prompt_token_ids=prompt, params=params)
        return Arrival(request=request, at_s=at_s)

    # The prompt takes some 600 of their steps: it comes and goes while they decode, and most of
    # their gaps are without it.
    decoding = [arrival("decoding" + "." * i, 20 + i, 1600, 0.0) for i in range(8)]
    outcomes = {
        outcome.request_id: outcome.continuations[0]
        for outcome in drive(engine, clock, [*decoding, arrival("long", 8000, 10, 2.0)])
    }
    long_times_s = outcomes.pop("long").times_s
    assert len(outcomes) == 8
    for one in outcomes.values():
        assert one.times_s[0] < 2.0 < long_times_s[0] < one.times_s[-1]
        gaps_s = [after - before for before, after in pairwise(one.times_s)]
        assert max(gaps_s) <= 3 * median(gaps_s)
