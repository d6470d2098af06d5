"""Rows that end in drafts draw, at every place, what plain steps draw there. On the CPU bit for
bit, whatever the format, the cache and the kernels; tests/backends/cuda has its own."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from tests.backends.drafted_steps import KINDS, PLACES, both_ways
from tests.backends.random_models import (
    SPECS,
    VOCAB,
    RandomTensor,
    make_weights,
    spoil_embedding,
)
from tests.plans import Draw, Row, plan_of

from headrace.backends.cpu import _native
from headrace.backends.cpu.kv import KV_DTYPES
from headrace.backends.cpu.runner import CpuRunner
from headrace.backends.reference.runner import ReferenceRunner
from headrace.core.errors import HeadraceError
from headrace.core.step import Drafts, Runner, StepPlan
from headrace.weights.tensor import FORMATS

EVERY_KIND = list(KINDS)


def test_reference(random_tensor: RandomTensor) -> None:
    """The truth: to the last bits of float32, which a product over more rows may change."""
    spec = SPECS["plain"]
    weights = make_weights(spec, random_tensor, "F32")
    plain, drafted = both_ways(
        lambda: ReferenceRunner(spec, weights, total_blocks=64), VOCAB, EVERY_KIND
    )
    for some, others in zip(plain, drafted, strict=True):
        assert [one.token_id for one in some] == [one.token_id for one in others]
        assert len(some) == PLACES + 1
        for one, other in zip(some, others, strict=True):
            assert one.logprob == pytest.approx(other.logprob, abs=1e-4)
            assert [token for token, _ in one.top] == [token for token, _ in other.top]


@pytest.mark.parametrize("kinds", [*FORMATS, ["Q4_K", "Q4_K", "Q6_K"]], ids=str)
def test_bits_in_every_format(random_tensor: RandomTensor, kinds: str | list[str]) -> None:
    spec = SPECS["plain"]
    weights = make_weights(spec, random_tensor, kinds)
    for path in _native.paths():
        plain, drafted = both_ways(
            lambda path=path: CpuRunner(spec, weights, total_blocks=64, threads=2, path=path),  # type: ignore[misc]
            VOCAB,
            EVERY_KIND,
        )
        assert plain == drafted


@pytest.mark.parametrize("kv_dtype", KV_DTYPES)
@pytest.mark.parametrize("name", ["gemma-like", "window bias", "mha interleaved"])
def test_bits_in_every_cache(random_tensor: RandomTensor, name: str, kv_dtype: str) -> None:
    spec = SPECS[name]
    weights = make_weights(spec, random_tensor, "Q4_1")

    def make() -> Runner:
        return CpuRunner(spec, weights, total_blocks=64, threads=2, kv_dtype=kv_dtype)

    plain, drafted = both_ways(make, VOCAB, EVERY_KIND, prompt_tokens=30)
    assert plain == drafted


def both_runners(random_tensor: RandomTensor) -> list[Runner]:
    spec = SPECS["plain"]
    weights = spoil_embedding(make_weights(spec, random_tensor, "F32"), 299)
    return [
        CpuRunner(spec, weights, total_blocks=8),
        ReferenceRunner(spec, weights, total_blocks=8),
    ]


def drafted_plan(tokens: list[int], drafts: Drafts, draw: Draw | None = None) -> StepPlan:
    row = Row(
        sequence_id=0,
        token_ids=tokens,
        start=0,
        block_table=[0, 1],
        draw=draw or Draw(temperature=0.0),
        drafts=drafts,
    )
    other = Row(sequence_id=1, token_ids=[4], start=0, block_table=[2], draw=Draw(temperature=0.0))
    return plan_of(row, other)


def test_a_place_that_fails_leaves_those_before_it(random_tensor: RandomTensor) -> None:
    for runner in both_runners(random_tensor):
        # Nothing may be drawn after the first draft; the second draft is none of the model's.
        plan = drafted_plan(
            [7, 8, 9, 9], Drafts(uniforms=[0.0] * 2, masks=[bytes(40), None]), Draw(temperature=1.0)
        )
        runner.submit(plan)
        result = runner.collect()
        assert [len(tokens) for tokens in result.tokens] == [1, 1]
        assert [len(logprobs) for logprobs in result.logprobs] == [1, 1]
        assert result.extras[0].is_own_fault
        assert "No token is left" in (result.extras[0].error or "")
        assert 1 not in result.extras
        plan = drafted_plan([7, 8, 299, 9], Drafts(uniforms=[0.0] * 2))  # not a number
        runner.submit(plan)
        result = runner.collect()
        assert [len(tokens) for tokens in result.tokens] == [1, 1]
        assert not result.extras[0].is_own_fault
        assert "finite" in (result.extras[0].error or "")
        runner.close()


@pytest.mark.parametrize(
    ("tokens", "drafts", "message"),
    [
        ([7], Drafts(uniforms=[0.5]), "1 drafts among 1 tokens"),
        ([7, 8], Drafts(uniforms=[]), "0 drafts among 2 tokens"),
        ([7, 8], Drafts(uniforms=[0.5], masks=[None, None]), "limits for other than 1"),
        ([7, 8], Drafts(uniforms=[0.5], banned=[[1], [2]]), "limits for other than 1"),
        ([7, 8], Drafts(uniforms=[0.5], banned=[[VOCAB]]), "outside"),
    ],
)
def test_wrong_plans_are_refused(
    random_tensor: RandomTensor, tokens: list[int], drafts: Drafts, message: str
) -> None:
    for runner in both_runners(random_tensor):
        with pytest.raises((HeadraceError, ValueError), match=message):
            runner.submit(drafted_plan(tokens, drafts))
        scored = drafted_plan([7, 8], Drafts(uniforms=[0.5]))
        scored.draws[0] = None
        with pytest.raises(HeadraceError, match="not drawn after"):
            runner.submit(scored)
        runner.close()


def test_a_row_after_drafts_can_not_continue_from_them(random_tensor: RandomTensor) -> None:
    """Which of the drawn tokens counts is for the plan's author to say."""
    spec = SPECS["plain"]
    weights = make_weights(spec, random_tensor, "F32")
    runner = ReferenceRunner(spec, weights, total_blocks=8, steps_in_flight=2)
    runner.submit(drafted_plan([7, 8], Drafts(uniforms=[0.5])))
    row = Row(sequence_id=0, token_ids=[-1], start=2, block_table=[0], draw=Draw(temperature=0.0))
    with pytest.raises(HeadraceError, match="PREVIOUS for sequence 0"):
        runner.submit(plan_of(row))
    row = replace(row, sequence_id=1, block_table=[2], start=1)
    runner.submit(plan_of(row))
    assert np.isfinite([runner.collect().logprobs[1][0], runner.collect().logprobs[0][0]]).all()
