"""What a request says of token ids is put into a step's form once, and says the same as before."""

from __future__ import annotations

import random
from array import array
from collections import deque
from collections.abc import Collection

import numpy as np
import pytest

from headrace.backends.shared.answers import flat_bias, flat_ids
from headrace.core.config import SchedulerConfig
from headrace.core.request import GenerateRequest, SampledToken, SamplingParams
from headrace.core.step import FlatBias, RowExtra, RowResult, RunnerLimits, StepPlan, StepResult
from headrace.engine.loop import Engine
from headrace.engine.sequence import RequestDraws


class SameToken:
    """A runner that draws one token for ever, and finds every token as likely."""

    def __init__(self) -> None:
        self.limits = RunnerLimits(
            max_batch_tokens=16,
            max_sequences=8,
            total_blocks=64,
            block_tokens=4,
            context_tokens=32,
        )
        self.progress = 0
        self.plans: list[StepPlan] = []
        self.banned: list[Collection[int]] = []
        self._results: deque[StepResult] = deque()

    def submit(self, plan: StepPlan) -> None:
        self.plans.append(plan)
        extras = [plan.extras.get(row, RowExtra()) for row in range(len(plan))]
        draws = zip(plan.draws, extras, strict=True)
        self.banned += [extra.banned for draw, extra in draws if draw is not None]
        result = StepResult(
            tokens=[[] if draw is None else [5] for draw in plan.draws],
            logprobs=[[] if draw is None else [0.0] for draw in plan.draws],
        )
        for row, extra in plan.extras.items():
            result.extras[row] = RowResult(target_logprobs=[-1.0] * len(extra.targets or ()))
        self._results.append(result)

    def collect(self) -> StepResult:
        return self._results.popleft()

    def close(self) -> None:
        pass


def run(asked: GenerateRequest) -> tuple[SameToken, list[SampledToken]]:
    runner = SameToken()
    engine = Engine(runner, frozenset({99}), SchedulerConfig(debug_invariants=True))
    engine.add(asked)
    tokens: list[SampledToken] = []
    while engine.has_work:
        tokens += engine.step()
    return runner, tokens


def request(n: int, **fields: object) -> GenerateRequest:
    params = SamplingParams(n=n, max_tokens=6, ignore_eos=True, **fields)  # type: ignore[arg-type]
    return GenerateRequest(request_id="r", prompt_token_ids=[1, 2, 3], params=params)


def test_once_for_all_continuations_and_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[RequestDraws] = []
    make = RequestDraws.__init__

    def counted(ids: RequestDraws, asked: GenerateRequest, stop_ids: frozenset[int]) -> None:
        made.append(ids)
        make(ids, asked, stop_ids)

    monkeypatch.setattr(RequestDraws, "__init__", counted)
    fields = {"allowed_token_ids": [5, 6, 7], "logit_bias": {5: 1.0}, "temperature": 1.0}
    runner, tokens = run(request(4, **fields))
    assert len(tokens) == 4 * 6
    assert len(made) == 1
    drawn = [draw for plan in runner.plans for draw in plan.draws if draw]
    assert len(drawn) >= 4 * 6
    assert {id(draw) for draw in drawn} == {id(made[0].params)}


def test_a_backend_goes_through_no_mapping_and_no_list() -> None:
    class Unwalked(FlatBias):
        def __iter__(self):  # type: ignore[no-untyped-def]
            raise AssertionError("walked")

    bias = Unwalked({7: 0.1, 3: -100.0})
    ids, values = flat_bias(bias)
    assert ids.tolist() == [7, 3]
    assert values.tolist() == [np.float32(0.1), np.float32(-100)]
    held = array("i", [4, 2])
    assert np.shares_memory(flat_ids(held), np.asarray(held))


def test_bad_words_are_banned_as_by_comparing_all_of_them() -> None:
    rng = random.Random(5)
    for _ in range(300):
        words = [[rng.randrange(3) for _ in range(rng.randint(1, 4))] for _ in range(4)]
        asked = request(1)
        asked.bad_token_ids = words
        ids = RequestDraws(asked, frozenset())
        tokens = [rng.randrange(3) for _ in range(rng.randint(1, 8))]
        wanted = {
            word[-1] for word in words if len(word) == 1 or tokens[-(len(word) - 1) :] == word[:-1]
        }
        assert set(ids.banned_after(tokens, is_too_soon=False)) == wanted


def test_an_end_before_min_tokens_is_banned_and_not_copied() -> None:
    asked = request(2, min_tokens=3, stop_token_ids=[7, 3], temperature=1.0)
    banned = run(asked)[0].banned
    assert sorted(map(list, banned)) == [[]] * 6 + [[3, 7]] * 6
    assert len({id(each) for each in banned if len(each)}) == 1


def test_a_prompts_scores_come_once() -> None:
    """They were sent with the first token of each continuation: sixteen times as much."""
    _, tokens = run(request(4, prompt_logprobs=0))
    assert len(tokens) == 4 * 6
    (told,) = [token for token in tokens if token.prompt_scores is not None]
    assert told is tokens[0]
    assert told.index == 0
    assert told.prompt_scores == [(-1.0, [])] * 2
