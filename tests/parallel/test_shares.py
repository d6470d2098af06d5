"""A model in shares computes what the whole one does, for everything that families differ in."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from tests.backends.cuda.tiny import SPECS, make_weights
from tests.parallel.threads import ThreadRanks, together

from headrace.backends.reference.runner import ReferenceRunner
from headrace.core.errors import ConfigError
from headrace.core.step import DrawParams, StepPlan
from headrace.models.sharding import share_of, vocab_spans
from headrace.weights.shard import share_weights

LIMITS: dict[str, Any] = {"total_blocks": 24, "block_tokens": 16, "max_batch_tokens": 64}
GREEDY = DrawParams(temperature=0.0)
CASES = [(name, ranks) for name in sorted(SPECS) for ranks in ((3,) if name == "phi" else (2, 4))]


def whole(name: str) -> ReferenceRunner:
    return ReferenceRunner(SPECS[name], make_weights(SPECS[name]), **LIMITS)


def share(name: str, ranks: ThreadRanks, **more: Any) -> ReferenceRunner:
    spec, weights = SPECS[name], make_weights(SPECS[name])
    own = share_weights(spec, weights, ranks.rank, ranks.count)
    return ReferenceRunner(share_of(spec, ranks.count), own, ranks=ranks, **LIMITS, **more)


def prompts() -> StepPlan:
    plan = StepPlan()
    plan.add(1, [3, 96, 0, 51, 7, 30, 31, 32, 33, 34], 0, [4], draw=GREEDY)
    plan.add(2, [80, 1, 2], 0, [9], draw=GREEDY)
    return plan


def next_tokens(tokens: list[int]) -> StepPlan:
    plan = StepPlan()
    plan.add(1, [tokens[0]], 10, [4], draw=GREEDY)
    plan.add(2, [tokens[1]], 3, [9], draw=GREEDY)
    return plan


@pytest.mark.parametrize(("name", "ranks"), CASES)
def test_logits_are_those_of_the_whole_model(name: str, ranks: int) -> None:
    expected = whole(name).logits(prompts())
    found = together(ranks, lambda each: share(name, each).logits(prompts()))[0]
    for ours, theirs in zip(found, expected, strict=True):
        np.testing.assert_allclose(ours, theirs, atol=1e-4)


@pytest.mark.parametrize(("name", "ranks"), CASES)
def test_greedy_tokens_are_those_of_the_whole_model(name: str, ranks: int) -> None:
    def generate(runner: ReferenceRunner, ranks: ThreadRanks | None = None) -> list[list[int]]:
        plan, found = prompts(), []
        for number in range(6):
            runner.submit(plan)
            drawn = [row[0] if row else 0 for row in runner.collect().tokens]
            drawn = drawn if ranks is None else ranks.share(drawn)
            found.append(drawn)
            plan = next_tokens(drawn)
            plan.starts = [start + number for start in plan.starts]
        return found

    expected = generate(whole(name))
    assert together(ranks, lambda each: generate(share(name, each), each))[0] == expected


def test_only_the_first_rank_draws() -> None:
    def run(ranks: ThreadRanks) -> list[list[int]]:
        runner = share("llama", ranks)
        runner.submit(prompts())
        return runner.collect().tokens

    found = together(2, run)
    assert [len(row) for row in found[0]] == [1, 1]
    assert found[1] == [[], []]


def test_with_two_steps_in_flight_all_ranks_get_the_tokens() -> None:
    def run(ranks: ThreadRanks) -> list[list[int]]:
        runner = share("llama", ranks, steps_in_flight=2)
        runner.submit(prompts())
        continued = next_tokens([-1, -1])
        runner.submit(continued)
        return [*runner.collect().tokens, *runner.collect().tokens]

    first, second = together(2, run)
    assert first == second
    alone = whole("llama")
    alone.submit(prompts())
    drawn = [row[0] for row in alone.collect().tokens]
    alone.submit(next_tokens(drawn))
    assert first == [[drawn[0]], [drawn[1]], *alone.collect().tokens]


@pytest.mark.parametrize(("vocab", "ranks"), [(97, 2), (97, 4), (5, 4), (128_256, 8), (49_152, 3)])
def test_the_vocabulary_is_shared_out(vocab: int, ranks: int) -> None:
    spans = vocab_spans(vocab, ranks)
    assert [first for first, _ in spans] == [0, *(end for _, end in spans[:-1])]
    assert spans[-1][1] == vocab
    assert all(first < end for first, end in spans)


def test_ranks_that_do_not_divide_are_refused() -> None:
    with pytest.raises(ConfigError, match="does not divide"):
        share_of(SPECS["phi"], 2)


def test_sums_are_two_a_layer_and_one_for_the_embedding() -> None:
    def run(ranks: ThreadRanks) -> int:
        share("llama", ranks).logits(prompts())
        return ranks.sums

    assert together(2, run) == [5, 5]
