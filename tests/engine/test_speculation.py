"""Guesses change no answer: whatever a speculator proposes, under any load, every request gets the
tokens, logprobs and finish reason of a plain run by itself.

On the simulated runner, with the workloads of test_properties.py; test_same_tokens.py has the CPU
backend.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Iterator
from collections.abc import Sequence as Sequences
from dataclasses import replace

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from tests.engine.guessers import KINDS, Guesser
from tests.engine.test_properties import (
    EOS,
    ROOMY,
    VOCAB,
    Setting,
    Walk,
    check_workload,
    engine_settings,
    make,
    solo,
    tight_settings,
    tight_workloads,
    workloads,
)

from headrace.core.clock import VirtualClock
from headrace.core.config import SchedulerConfig
from headrace.core.errors import ConfigError
from headrace.core.request import GenerateRequest, SamplingParams
from headrace.core.speculation import Draftable, DraftRoom
from headrace.core.step import RunnerLimits, StepPlan, StepResult
from headrace.engine.loop import Engine
from headrace.engine.sequence import Sequence
from headrace.simulate.cost import linear_cost
from headrace.simulate.drive import Arrival
from headrace.simulate.runner import SimulatedRunner


@pytest.fixture(autouse=True)
def _quiet() -> Iterator[None]:
    logging.disable()
    Walk.live = 0
    yield
    logging.disable(logging.NOTSET)


class Oracle:
    """What each sequence draws in a run by itself."""

    def __init__(self, arrivals: Sequences[Arrival]) -> None:
        self._requests = {arrival.request.request_id: arrival.request for arrival in arrivals}
        self._answers: dict[str, dict[int, list[int]]] = {}

    def __call__(self, sequence: Draftable) -> list[int]:
        request_id = sequence.request.request_id
        if request_id not in self._answers:
            alone = solo(self._requests[request_id])
            self._answers[request_id] = {
                index: [token.token_id for token in one.tokens]
                for index, one in alone.continuations.items()
            }
        assert isinstance(sequence, Sequence)
        answer = self._answers[request_id][sequence.index]
        known = sequence.token_ids[sequence.prompt_tokens :]
        assert answer[: len(known)] == known, f"{request_id} has other tokens than by itself"
        return answer


def check(setting: Setting, arrivals: list[Arrival], kind: str, seed: int) -> Guesser:
    guesser = Guesser(kind, VOCAB, Oracle(arrivals), seed=seed)
    limits = replace(setting.limits, draws_drafts=True)
    engine = check_workload(replace(setting, limits=limits), arrivals, guesser)
    drafts = engine.stats.drafts
    # A sequence that was ended with guesses in flight has none judged.
    assert (drafts.draft_tokens, drafts.accepted_tokens) == (guesser.proposed, guesser.accepted)
    assert drafts.accepted_tokens == sum(drafts.accepted_at)
    assert drafts.accepted_at == sorted(drafts.accepted_at, reverse=True)
    if kind == "right" and not (setting.fail or setting.raise_on):
        assert guesser.accepted == guesser.proposed
    if kind == "wrong":
        assert guesser.accepted == 0
    return guesser


guessing = settings(
    max_examples=int(os.environ.get("HEADRACE_TEST_EXAMPLES", "30")),
    deadline=None,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large],
)
kinds = st.sampled_from(KINDS)
seeds = st.integers(0, 1000)


@guessing
@given(engine_settings(), workloads(beams=False), kinds, seeds)
def test_guesses_change_nothing(
    setting: Setting, arrivals: list[Arrival], kind: str, seed: int
) -> None:
    check(setting, arrivals, kind, seed)


@guessing
@given(tight_settings(), tight_workloads(), kinds, seeds)
def test_nor_when_blocks_run_out(
    setting: Setting, arrivals: list[Arrival], kind: str, seed: int
) -> None:
    check(setting, arrivals, kind, seed)


@settings(guessing, max_examples=15)
@given(engine_settings(), workloads(beams=True), kinds, seeds)
def test_nor_beside_a_beam_search(
    setting: Setting, arrivals: list[Arrival], kind: str, seed: int
) -> None:
    check(setting, arrivals, kind, seed)


# -- one at a time ---------------------------------------------------------------------------------


def request(max_tokens: int = 40, **params: object) -> GenerateRequest:
    chosen = SamplingParams(max_tokens=max_tokens, ignore_eos=True, seed=5, **params)  # type: ignore[arg-type]
    return GenerateRequest(request_id="r", prompt_token_ids=[1, 2, 3], params=chosen)


def run(
    arrivals: list[Arrival], guesser: object | None, limits: RunnerLimits = ROOMY
) -> tuple[Engine, list[int]]:
    """The engine afterwards, and how many tokens came with each step that gave any."""
    setting = Setting(limits=replace(limits, draws_drafts=True), config=SchedulerConfig())
    engine, _ = make(setting, guesser)  # type: ignore[arg-type]
    for arrival in arrivals:
        engine.add(arrival.request)
    sizes = []
    while engine.has_work:
        if tokens := engine.step():
            sizes.append(len(tokens))
        engine.check_integrity()
    return engine, sizes


@pytest.mark.parametrize("in_flight", [1, 2])
def test_right_guesses_save_steps(in_flight: int) -> None:
    arrivals = [Arrival(request=request())]
    guesser = Guesser("right", VOCAB, Oracle(arrivals), most=7)
    guesser.least = 7
    engine, sizes = run(arrivals, guesser, replace(ROOMY, steps_in_flight=in_flight))
    assert sizes == [1, 8, 8, 8, 8, 7]  # the first comes with the prompt; none past max_tokens
    assert engine.stats.drafts.accepted_at == [5, 5, 5, 5, 5, 5, 4]
    assert engine.stats.generated_tokens == 40


def test_tokens_say_how_many_guesses_were_right() -> None:
    arrivals = [Arrival(request=request(max_tokens=9))]
    oracle = Oracle(arrivals)

    def two_right(sequence: Draftable) -> list[int]:
        right = oracle(sequence)[len(sequence.token_ids) - 3 :]
        return [*right[:2], (right[2] + 1) % VOCAB, 0]

    guesser = Guesser("right", VOCAB, oracle)
    guesser._guess = two_right  # type: ignore[method-assign]
    engine, _ = make(
        Setting(limits=replace(ROOMY, draws_drafts=True), config=SchedulerConfig()), guesser
    )
    engine.add(arrivals[0].request)
    tokens = [token for _ in range(5) for token in engine.step()]
    assert [token.drafted for token in tokens[:5]] == [None, (2, 2), None, None, (2, 2)]


class Failing(Guesser):
    def propose(
        self, sequences: Sequences[Draftable], most: Sequences[int], room: DraftRoom
    ) -> list[list[int]]:
        if self.asked == 3:
            raise KeyError("a mistake")
        return super().propose(sequences, most, room)


def test_a_speculator_that_fails_is_not_asked_again() -> None:
    arrivals = [Arrival(request=request())]
    guesser = Failing("right", VOCAB, Oracle(arrivals))
    _, sizes = run(arrivals, guesser)
    assert sum(sizes) == 40
    assert guesser.asked == 3


def test_a_runner_that_draws_one_token_is_refused() -> None:
    runner = SimulatedRunner(ROOMY, cost=linear_cost(), clock=VirtualClock(), vocab_size=VOCAB)
    guesser = Guesser("right", VOCAB, Oracle([]))
    with pytest.raises(ConfigError, match="draws one token"):
        Engine(runner, frozenset({EOS}), speculator=guesser)


def test_only_drawn_tokens_are_in_the_prefix_cache() -> None:
    """Wrong guesses fill whole blocks, which another request would find by their tokens."""
    arrivals = [Arrival(request=request(max_tokens=30))]
    oracle = Oracle(arrivals)
    answer: list[int] = []

    def wrong(sequence: Draftable) -> list[int]:
        answer[:] = oracle(sequence)
        return [7] * 20

    guesser = Guesser("right", VOCAB, oracle)
    guesser._guess = wrong  # type: ignore[method-assign]
    limits = replace(ROOMY, block_tokens=4)
    engine, _ = run(arrivals, guesser, limits)
    assert guesser.proposed > 100
    prompt = [1, 2, 3]
    for known in range(len(answer)):
        after = [*prompt, *answer[:known], *[7] * 12]
        keys: list[bytes] = []
        found = engine.scheduler.prefix.match(after, keys, "")
        true = prompt + answer
        same = next(
            (at for at, (a, b) in enumerate(zip(after, true, strict=False)) if a != b),
            min(len(after), len(true)),
        )
        assert len(found) <= same // 4


def test_guesses_preempt_nobody() -> None:
    """Two sequences that just fit: guesses would need more blocks than there are."""
    requests = [replace(request(max_tokens=29), request_id=f"r{at}") for at in range(2)]
    arrivals = [Arrival(request=each) for each in requests]
    guesser = Guesser("long", VOCAB, Oracle(arrivals))
    limits = replace(ROOMY, block_tokens=4, total_blocks=16)  # 8 each
    engine, sizes = run(arrivals, guesser, limits)
    assert sum(sizes) == 58
    assert engine.stats.preemptions == 0
    assert guesser.accepted > 0


def test_cancelled_with_guesses_in_flight() -> None:
    arrivals = [Arrival(request=request())]
    guesser = Guesser("right", VOCAB, Oracle(arrivals))
    limits = replace(ROOMY, draws_drafts=True, steps_in_flight=2)
    engine, _ = make(Setting(limits=limits, config=SchedulerConfig()), guesser)
    engine.add(arrivals[0].request)
    while not engine.stats.drafts.drafts:
        engine.step()
    engine.scheduler.schedule()  # not submitted: only what it did to the sequence matters
    engine.cancel("r")
    engine.check_integrity()
    assert engine.blocks.used_blocks == 0
    assert guesser.ended_ids == {0}


def test_steps_without_guesses_are_learnt_from_too() -> None:
    seen: list[tuple[int, int]] = []

    class Watching(Guesser):
        def stepped(self, plan: StepPlan, result: StepResult) -> None:
            seen.append((plan.batch_tokens, sum(map(len, plan.drafts.values()))))
            assert result.compute_s > 0

    arrivals = [Arrival(request=request(max_tokens=3))]
    run(arrivals, Watching("empty", VOCAB, Oracle(arrivals)))
    assert seen == [(3, 0), (1, 0), (1, 0)]
