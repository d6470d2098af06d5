"""Same tokens whatever the load, on the real CPU backend: bit for bit, logprobs included.

What `test_properties.py` shows of the engine, this shows of engine and kernels together.
"""

from __future__ import annotations

import logging
import random
from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from typing import Any

import pytest
from tests.engine.conftest import VOCAB
from tests.engine.guessers import KINDS, Guesser

from headrace.backends.cpu.runner import CpuRunner
from headrace.backends.reference.runner import ReferenceRunner
from headrace.core.clock import VirtualClock
from headrace.core.config import Policy, SchedulerConfig
from headrace.core.request import FinishReason, GenerateRequest, SamplingParams
from headrace.core.speculation import Draftable, Speculator
from headrace.core.step import Runner
from headrace.engine.loop import Engine
from headrace.models.decoder import DecoderWeights
from headrace.models.spec import ModelSpec
from headrace.simulate.drive import Arrival, Continuation, Outcome, drive
from headrace.weights.weight import Weight

TinyModel = tuple[ModelSpec, DecoderWeights[Weight]]

EOS = 3


@pytest.fixture(autouse=True)
def _quiet() -> Iterator[None]:
    """Preemptions are logged."""
    logging.disable()
    yield
    logging.disable(logging.NOTSET)


def run(
    runner: Runner,
    config: SchedulerConfig,
    arrivals: list[Arrival],
    speculator: Speculator | None = None,
) -> tuple[Engine, list[Outcome]]:
    """A step takes a second, whatever it takes."""
    clock = VirtualClock()
    engine = Engine(runner, frozenset({EOS}), config, clock, speculator)

    def after_step() -> None:
        clock.advance(1.0)
        engine.check_integrity()

    outcomes = list(drive(engine, clock, arrivals, max_idle_steps=500, after_step=after_step))
    assert engine.blocks.used_blocks == 0
    return engine, outcomes


class Alone:
    """Each request by itself: a large pool, no prefix cache, prompts in one piece."""

    def __init__(self, model: TinyModel) -> None:
        self._runner = CpuRunner(*model, total_blocks=64)

    def run(self, request: GenerateRequest) -> dict[int, Continuation]:
        arrivals = [Arrival(request=replace(request, timeout_s=None))]
        _, outcomes = run(self._runner, SchedulerConfig(prefix_cache=False), arrivals)
        assert outcomes[0].refused is None
        return outcomes[0].continuations


@pytest.fixture(scope="module")
def alone(tiny_model: TinyModel) -> Alone:
    return Alone(tiny_model)


def workload(chooser: random.Random) -> list[Arrival]:
    # After many short answers the engine expects more of them, and has to preempt.
    short = SamplingParams(temperature=0.0, max_tokens=1, n=64)
    arrivals = [
        Arrival(request=GenerateRequest(request_id="short", prompt_token_ids=[5], params=short))
    ]
    # Three that together outgrow the pool, whatever tokens are drawn: those differ between kinds of
    # processors.
    arrivals += [
        Arrival(
            request=GenerateRequest(
                request_id=f"long{number}",
                prompt_token_ids=[number + 10] * 10,
                params=SamplingParams(seed=number, max_tokens=50, ignore_eos=True),
            ),
            at_s=100.0,
        )
        for number in range(3)
    ]
    shared = [chooser.randrange(200) for _ in range(40)]
    at_s = 120.0
    for number in range(8):
        at_s += chooser.choice([0, 0, 2, 20])
        own = [chooser.randrange(200) for _ in range(chooser.randint(1, 20))]
        params = SamplingParams(
            temperature=chooser.choice([0.0, 1.0]),
            top_p=chooser.choice([1.0, 0.9]),
            presence_penalty=chooser.choice([0.0, 0.0, 0.5]),
            max_tokens=chooser.choice([2, 20, 30]),
            seed=number,
            ignore_eos=chooser.random() < 0.7,
            logprobs=chooser.choice([None, 3]),
            prompt_logprobs=chooser.choice([None, None, None, 1]),
            n=chooser.choice([1, 1, 2]),
        )
        request = GenerateRequest(
            request_id=f"r{number}",
            prompt_token_ids=shared[: chooser.choice([0, 16, 33])] + own,
            params=params,
            priority=chooser.randrange(2),
        )
        cancel_at_s = at_s + chooser.randint(0, 30) if chooser.random() < 0.2 else None
        arrivals.append(Arrival(request=request, at_s=at_s, cancel_at_s=cancel_at_s))
    return arrivals


def assert_same(outcome: Outcome, expected: dict[int, Continuation]) -> None:
    assert outcome.refused is None
    for index, found in outcome.continuations.items():
        whole = expected[index].tokens
        if not outcome.cancelled:
            assert found.finish_reason in (FinishReason.STOP, FinishReason.LENGTH), found.error
        if found.finish_reason is not None:
            assert found.tokens == whole
        else:
            assert found.tokens == whole[: len(found.tokens)]


@pytest.mark.parametrize("prefix_cache", [False, True])
@pytest.mark.parametrize(("max_batch_tokens", "overlap"), [(5, False), (17, True), (64, True)])
def test_tokens_and_logprobs_are_those_of_the_solo_run(
    tiny_model: TinyModel, alone: Alone, max_batch_tokens: int, overlap: bool, prefix_cache: bool
) -> None:
    preemptions = copies = hits = 0
    with CpuRunner(
        *tiny_model,
        total_blocks=8,
        max_batch_tokens=max_batch_tokens,
        max_sequences=6,
        threads=2,
        overlap=overlap,
    ) as runner:
        for seed in range(8):
            config = SchedulerConfig(
                policy=list(Policy)[seed % 3], prefix_cache=prefix_cache, watermark=0.0
            )
            engine, outcomes = run(runner, config, workload(random.Random(seed)))
            assert len(outcomes) == 12
            for outcome in outcomes:
                assert_same(outcome, alone.run(outcome.arrival.request))
            preemptions += engine.stats.preemptions
            copies += engine.stats.cow_copies
            hits += engine.stats.prefix_hits_tokens
    # It went through what it is meant to go through.
    assert preemptions > 0
    assert copies > 0
    assert (hits > 0) == prefix_cache


@pytest.mark.parametrize("overlap", [False, True])
@pytest.mark.parametrize("kind", KINDS)
def test_guesses_change_no_bit(
    tiny_model: TinyModel, alone: Alone, kind: str, overlap: bool
) -> None:
    preemptions = checked = accepted = 0
    with CpuRunner(
        *tiny_model,
        total_blocks=8,
        max_batch_tokens=40,
        max_sequences=6,
        threads=2,
        overlap=overlap,
    ) as runner:
        for seed in range(3):
            arrivals = [*workload(random.Random(seed)), *limited(seed)]
            answers = {a.request.request_id: alone.run(a.request) for a in arrivals}
            guesser = Guesser(kind, VOCAB, partial(answer_of, answers), seed=seed)
            config = SchedulerConfig(prefix_cache=seed != 1, watermark=0.0)
            engine, outcomes = run(runner, config, arrivals, guesser)
            for outcome in outcomes:
                assert_same(outcome, answers[outcome.arrival.request.request_id])
            preemptions += engine.stats.preemptions
            checked += guesser.proposed
            accepted += guesser.accepted
    assert preemptions > 0 or accepted > 0  # right guesses may end requests before they clash
    assert (checked > 0) == (kind != "empty")
    assert accepted > 0 or kind in ("wrong", "random", "empty")


def answer_of(answers: dict[str, dict[int, Continuation]], sequence: Draftable) -> list[int]:
    known = sequence.token_ids[sequence.prompt_tokens :]
    for one in answers[sequence.request.request_id].values():
        found = [token.token_id for token in one.tokens]
        if found[: len(known)] == known:
            return found
    raise AssertionError(f"no solo run begins with {known}")


def limited(seed: int) -> list[Arrival]:
    """One request for each thing that may limit a draw or depend on the tokens before it."""
    chosen: list[dict[str, Any]] = [
        {"repetition_penalty": 1.3, "frequency_penalty": 0.4, "temperature": 0.0},
        {"repetition_penalty": 1.3, "presence_penalty": 0.4, "logprobs": 2},
        {"logit_bias": {7: 3.0, 11: -4.0}, "typical_p": 0.8},
        {"allowed_token_ids": list(range(4, 40)), "min_p": 0.02},
        {"min_tokens": 12, "stop_token_ids": list(range(0, 200, 9)), "top_k": 20},
    ]
    return [
        Arrival(
            request=GenerateRequest(
                request_id=f"limited{number}",
                prompt_token_ids=[number + 20] * 5,
                params=SamplingParams(max_tokens=25, seed=seed, **params),
                bad_token_ids=[[9, 8], [12], [13, 14, 15]] if number % 2 else [],
            ),
            at_s=110.0 + 3 * number,
        )
        for number, params in enumerate(chosen)
    ]


@pytest.mark.parametrize("total_blocks", [64, 9])
def test_penalties_with_two_plans_in_flight(tiny_model: TinyModel, total_blocks: int) -> None:
    """The runner counts tokens that the engine does not know yet: the texts are those of one plan
    at a time, also where sequences are preempted and begin again."""
    params = SamplingParams(
        temperature=1.0, top_p=0.95, repetition_penalty=1.4, presence_penalty=0.3,
        frequency_penalty=0.6, max_tokens=24, ignore_eos=True, n=2,
    )  # fmt: skip
    arrivals = [
        Arrival(
            request=GenerateRequest(
                request_id=f"r{number}",
                prompt_token_ids=[number + 1, 7, 7, 9] * 3,
                params=replace(params, seed=number),
            ),
            at_s=100.0 + number,
        )
        for number in range(4)
    ]
    # After many short answers the engine expects more of them, and has to preempt.
    short = SamplingParams(temperature=0.0, max_tokens=1, n=64)
    first = GenerateRequest(request_id="short", prompt_token_ids=[5], params=short)
    arrivals.insert(0, Arrival(request=first))
    texts, preemptions = [], 0
    for in_flight, blocks in ((1, 64), (2, total_blocks)):
        runner = ReferenceRunner(*tiny_model, total_blocks=blocks, steps_in_flight=in_flight)
        engine, outcomes = run(runner, SchedulerConfig(watermark=0.0), arrivals)
        preemptions = engine.stats.preemptions
        texts.append([[c.tokens for _, c in sorted(o.continuations.items())] for o in outcomes])
    assert [[[t.token_id for t in c] for c in o] for o in texts[0]] == [
        [[t.token_id for t in c] for c in o] for o in texts[1]
    ]
    assert (preemptions > 0) == (total_blocks == 9)
