"""What is drawn with guesses has the model's own distribution: counted, against the exact softmax.

That guesses change no token of a seed is shown elsewhere (test_same_tokens.py); here nothing is
compared with a run without them. Seeds are fixed, so the counts are always the same.
"""

from __future__ import annotations

import itertools
import math
from collections import Counter
from collections.abc import Sequence

from tests.engine.conftest import TinyModel

from headrace.backends.cpu.runner import CpuRunner
from headrace.backends.reference.runner import ReferenceRunner
from headrace.core.config import SchedulerConfig
from headrace.core.request import GenerateRequest, SamplingParams
from headrace.core.speculation import Draftable, DraftRoom
from headrace.core.step import DrawParams, RowExtra, StepPlan, StepResult
from headrace.engine.loop import Engine

PROMPT = [11, 42, 7]
ALLOWED = (5, 9, 20)
PLACES = 3
SEEDS = 1500
# Of the chi-square distribution with 26 degrees of freedom: exceeded once in a thousand times.
CRITICAL = 54.05


class Stubborn:
    """Always guesses the same tokens, so that some are right and most are not."""

    def __init__(self) -> None:
        self.right = self.wrong = 0

    def waits(self) -> bool:
        return True

    def propose(
        self, sequences: Sequence[Draftable], most: Sequence[int], room: DraftRoom
    ) -> list[list[int]]:
        return [[ALLOWED[each.sequence_id % 3], ALLOWED[0]] for each in sequences]

    def taken(self, sequence: Draftable, proposed: int, accepted: int) -> None:
        self.right += accepted
        self.wrong += accepted < proposed

    def stepped(self, plan: StepPlan, result: StepResult) -> None:
        """Learns nothing."""

    def ended(self, sequence: Draftable) -> None:
        """Keeps nothing."""


def exact_chances(model: TinyModel) -> dict[tuple[int, ...], float]:
    """Of every answer, by the reference: each place's softmax over what is allowed, multiplied."""
    runner = ReferenceRunner(*model, total_blocks=8)
    greedy = DrawParams(temperature=0.0)

    def place(before: tuple[int, ...]) -> dict[int, float]:
        tokens = [*PROMPT, *before]
        logprobs = {}
        for token in ALLOWED:
            plan = StepPlan()
            targets = RowExtra(targets=[*tokens[1:], token])
            plan.add(1, tokens, 0, [0, 1], draw=greedy, extra=targets)
            runner.submit(plan)
            logprobs[token] = runner.collect().extras[0].target_logprobs[-1]
        total = sum(map(math.exp, logprobs.values()))
        return {token: math.exp(logprob) / total for token, logprob in logprobs.items()}

    found: dict[tuple[int, ...], float] = {(): 1.0}
    for _ in range(PLACES):
        found = {
            (*before, token): chance * each
            for before, chance in found.items()
            for token, each in place(before).items()
        }
    return found


def test_answers_come_as_often_as_the_softmax_says(tiny_model: TinyModel) -> None:
    guesser = Stubborn()
    counts: Counter[tuple[int, ...]] = Counter()
    with CpuRunner(*tiny_model, total_blocks=256, max_sequences=64) as runner:
        config = SchedulerConfig(prefix_cache=False)
        engine = Engine(runner, frozenset(), config, speculator=guesser)
        for seed in range(SEEDS):
            params = SamplingParams(
                temperature=1.0,
                seed=seed,
                max_tokens=PLACES,
                ignore_eos=True,
                allowed_token_ids=list(ALLOWED),
            )
            engine.add(
                GenerateRequest(request_id=str(seed), prompt_token_ids=PROMPT, params=params)
            )
        answers: dict[str, list[int]] = {}
        while engine.has_work:
            for token in engine.step():
                answers.setdefault(token.request_id, []).append(token.token_id)
        counts.update(tuple(answer) for answer in answers.values())
    exact = exact_chances(tiny_model)
    assert sum(exact.values()) == 1.0 or math.isclose(sum(exact.values()), 1.0)
    assert set(counts) <= set(itertools.product(ALLOWED, repeat=PLACES))
    statistic = sum(
        (counts[answer] - SEEDS * chance) ** 2 / (SEEDS * chance)
        for answer, chance in exact.items()
    )
    assert statistic < CRITICAL
    assert guesser.right > SEEDS / 10  # both ways through the engine were gone
    assert guesser.wrong > SEEDS / 10
