"""The reference runner as an engine meets it: drawing, scoring, limits, and blocks kept apart."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray
from tests.plans import Draw, Row, plan_of, rows_of

from headrace.backends.reference import runner as runner_module
from headrace.backends.reference.runner import ReferenceRunner
from headrace.core.errors import ConfigError, HeadraceError
from headrace.core.step import Runner, StepPlan
from headrace.models import decoder
from headrace.models.dims import Dims, make_spec
from headrace.models.families.hub_names import HubNames, hub_weights
from headrace.models.refs import WeightRef
from headrace.models.spec import RopeSpec
from headrace.weights.tensor import FORMATS, Tensor
from headrace.weights.weight import Weight

DIMS = Dims(
    vocab_size=31, hidden_size=16, intermediate_size=24, layers=2, heads=4, kv_heads=2,
    head_dim=4, context_tokens=64, norm_eps=1e-5,
)  # fmt: skip
TEXT = [3, 1, 4, 1, 5, 9, 2, 6, 5, 3, 5, 8, 9, 7, 9, 3, 2, 3, 8, 4]


def make_runner(total_blocks: int = 12, **limits: Any) -> ReferenceRunner:
    random = np.random.default_rng(5)

    def weight(_role: str, ref: WeightRef) -> Weight:
        tensors = []
        for part in ref.parts:
            values = random.normal(1 if len(part.shape) == 1 else 0, 0.5, part.shape)
            data = memoryview(values.astype(np.float32).tobytes())
            tensors.append(Tensor(part.name, FORMATS["F32"], part.shape, data))
        return Weight(parts=tuple(tensors))

    spec = make_spec("llama", DIMS, context_tokens=64, ropes=RopeSpec(inv_freq=(1.0, 0.2)))
    refs = hub_weights(DIMS, HubNames("model.", "lm_head.weight"), tied=False)
    return ReferenceRunner(spec, refs.map(weight), total_blocks=total_blocks, **limits)


def entry(
    tokens: list[int], start: int = 0, table: tuple[int, ...] = (7, 2, 5, 0), sequence: int = 1
) -> Row:
    return Row(sequence_id=sequence, token_ids=tokens, start=start, block_table=list(table))


def plan(*entries: Row) -> StepPlan:
    return plan_of(*entries)


def all_logits(tokens: list[int]) -> NDArray[np.float32]:
    return make_runner().logits(plan(entry(tokens)))[0]


def log_softmax(rows: NDArray[np.float32]) -> NDArray[np.float64]:
    exact = rows.astype(np.float64)
    shifted = exact - exact.max(axis=-1, keepdims=True)
    found: NDArray[np.float64] = shifted - np.log(np.exp(shifted).sum(axis=-1, keepdims=True))
    return found


def test_it_is_a_runner_with_the_limits_it_was_given() -> None:
    runner: Runner = make_runner(max_batch_tokens=100, max_sequences=3, context_tokens=32)
    limits = runner.limits
    assert (limits.max_batch_tokens, limits.max_sequences, limits.context_tokens) == (100, 3, 32)
    assert (limits.total_blocks, limits.block_tokens) == (12, 16)
    assert make_runner().limits.context_tokens == 64


def test_results_come_in_the_order_of_plans_and_entries() -> None:
    runner = make_runner(steps_in_flight=2)
    wanted = all_logits(TEXT)
    first = entry(TEXT[:8])
    other = entry(TEXT[:5], table=(1, 3), sequence=2)
    other.draw = Draw(temperature=0)
    runner.submit(plan(first, other))
    last = entry(TEXT[8:], start=8)
    last.draw = Draw(temperature=0)
    runner.submit(plan(last))
    early, late = runner.collect(), runner.collect()
    assert len(rows_of(early)) == 2
    assert rows_of(early)[0].token_id is None
    assert rows_of(early)[1].token_id == int(wanted[4].argmax())
    assert rows_of(late)[0].token_id == int(wanted[-1].argmax())
    assert rows_of(late)[0].logprob == pytest.approx(log_softmax(wanted[-1:]).max(), abs=1e-5)
    assert late.compute_s > 0


@pytest.mark.parametrize("values_at_a_time", [1, 31 * 3, 1 << 22])
def test_scores_are_log_softmax_however_the_head_is_cut(
    monkeypatch: pytest.MonkeyPatch, values_at_a_time: int
) -> None:
    monkeypatch.setattr(runner_module, "_LOGIT_VALUES", values_at_a_time)
    wanted = log_softmax(all_logits(TEXT))
    runner = make_runner()
    silent = entry(TEXT[:4], table=(9,), sequence=3)
    scored = entry(TEXT)
    scored.targets = [*TEXT[1:], 17]
    scored.draw = Draw(temperature=1, uniform=0.4)
    runner.submit(plan(silent, scored))
    nothing, found = rows_of(runner.collect())
    assert not nothing.target_logprobs
    np.testing.assert_allclose(
        found.target_logprobs, wanted[np.arange(20), scored.targets], atol=1e-5
    )
    assert found.token_id is not None
    assert found.logprob == pytest.approx(wanted[-1, found.token_id], abs=1e-5)


def test_alternatives_come_with_each_target_and_the_drawn_token() -> None:
    wanted = log_softmax(all_logits(TEXT))
    scored = replace(entry(TEXT), targets=[*TEXT[1:], 17], draw=Draw(temperature=0), top_logprobs=3)
    silent = replace(entry(TEXT, table=(1, 3), sequence=2), draw=Draw(temperature=0))
    runner = make_runner()
    runner.submit(plan(scored, silent))
    found, plain = rows_of(runner.collect())
    for top, scores in zip([*found.target_top, found.top], [*wanted, wanted[-1]], strict=True):
        assert [token for token, _ in top] == np.argsort(-scores)[:3].tolist()
        assert [p for _, p in top] == pytest.approx(np.sort(-scores)[:3] * -1, abs=1e-5)
    assert not plain.top
    assert not plain.target_top


def test_a_draw_that_nothing_can_follow_fails_alone() -> None:
    runner = make_runner()
    empty = replace(entry(TEXT), draw=Draw(temperature=1, allowed=[4], banned=[4]))
    good = replace(entry(TEXT, table=(1, 3), sequence=2), draw=Draw(temperature=0))
    runner.submit(plan(empty, good))
    failed, found = rows_of(runner.collect())
    assert failed.token_id is None
    assert failed.error is not None
    assert "No token is left to draw" in failed.error
    assert (found.token_id, found.error) == (int(all_logits(TEXT)[-1].argmax()), None)


def test_logits_are_computed_for_wanted_rows_only(monkeypatch: pytest.MonkeyPatch) -> None:
    rows: list[int] = []
    real = decoder.logits

    def spy(ops: object, spec: object, weights: object, x: object) -> NDArray[np.float32]:
        found: NDArray[np.float32] = real(ops, spec, weights, x)  # type: ignore[arg-type]
        rows.append(len(found))
        return found

    monkeypatch.setattr(runner_module, "logits", spy)
    runner = make_runner()
    drawn = entry(TEXT)
    drawn.draw = Draw(temperature=0)
    runner.submit(plan(drawn, entry(TEXT, table=(1, 3), sequence=2)))
    assert rows == [1]
    runner.collect()
    runner.submit(plan(entry(TEXT)))
    assert rows == [1]


def test_two_sequences_may_share_a_prefix_block() -> None:
    runner = make_runner()
    runner.submit(plan(entry(TEXT[:16], table=(4,))))
    ends = [[2, 7, 1], [30, 11]]
    found = runner.logits(
        plan(
            entry(ends[0], start=16, table=(4, 6), sequence=1),
            entry(ends[1], start=16, table=(4, 8), sequence=2),
        )
    )
    for rows, end in zip(found, ends, strict=True):
        np.testing.assert_allclose(rows, all_logits(TEXT[:16] + end)[16:], atol=1e-5)


def test_copies_come_before_the_step_and_in_order() -> None:
    """A branch over copies of blocks 4 and 6, by way of another, while 6 itself is written."""
    runner = make_runner()
    runner.submit(plan(entry(TEXT[:18], table=(4, 6))))
    runner.collect()
    step = plan(
        entry([9, 9], start=18, table=(4, 6), sequence=1),
        entry(TEXT[18:], start=18, table=(11, 8), sequence=2),
    )
    step.copies = [(4, 11), (6, 3), (3, 8)]
    found = runner.logits(step)
    np.testing.assert_allclose(found[1], all_logits(TEXT)[18:], atol=1e-5)
    np.testing.assert_allclose(found[0], all_logits([*TEXT[:18], 9, 9])[18:], atol=1e-5)


def test_an_empty_plan_has_an_empty_result() -> None:
    runner = make_runner()
    runner.submit(plan())
    assert rows_of(runner.collect()) == []


def with_targets(targets: list[int]) -> Row:
    return replace(entry(TEXT[:3]), targets=targets)


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        (plan(entry(TEXT * 2)), "40 tokens; expected at most 32"),
        (
            plan(*(entry([1], sequence=i, table=(i,)) for i in range(5))),
            "5 rows; expected at most 4",
        ),
        (plan(entry([1]), entry([2], table=(3,))), "more than one row"),
        (plan(entry([])), "0 tokens for counts of"),
        (plan(entry([1], start=-1)), "positions -1 to -1"),
        (plan(entry([1, 2], start=63)), "within the context of 64"),
        (plan(entry([1], start=16, table=(3,))), "1 blocks of 16 tokens; expected enough for 17"),
        (plan(entry([1], table=(12,))), "0 to 11"),
        (plan(entry([1], table=(-1,))), "0 to 11"),
        (plan(entry([31])), "outside the vocabulary; expected 0 to 30"),
        (plan(entry([-2])), "outside the vocabulary"),
        (plan(entry([-1])), "PREVIOUS for sequence 1; expected token ids"),
        (
            replace(plan(entry([1])), copies=[(3, 4), (0, 12)]),
            r"blocks \(0, 12\); expected 0 to 11",
        ),
        (replace(plan(entry([1])), copies=[(-1, 0)]), "0 to 11"),
        (plan(with_targets([1, 2])), "2 targets; expected 3"),
        (plan(with_targets([1, 2, 31])), "outside the vocabulary"),
        (
            plan(replace(entry([1]), draw=Draw(temperature=0, bias={31: 1.0}))),
            "a draw that names a token outside the vocabulary",
        ),
        (plan(replace(entry([1]), top_logprobs=32)), "32 top_logprobs; expected 0 to 31"),
    ],
)
def test_a_mistaken_plan_is_refused_and_changes_nothing(wrong: StepPlan, message: str) -> None:
    runner = make_runner(max_batch_tokens=32, max_sequences=4)
    runner.submit(plan(entry(TEXT[:16], table=(0,), sequence=9)))
    runner.collect()
    good = plan(entry(TEXT[16:], start=16, table=(0, 11), sequence=9))
    before = runner.logits(good)[0]
    with pytest.raises(HeadraceError, match=message):
        runner.submit(wrong)
    with pytest.raises(HeadraceError, match="no plan submitted"):
        runner.collect()
    np.testing.assert_array_equal(runner.logits(good)[0], before)


@pytest.mark.parametrize(
    ("limits", "param"),
    [
        ({"total_blocks": 0}, "total_blocks"),
        ({"block_tokens": 0}, "block_tokens"),
        ({"max_batch_tokens": 0}, "max_batch_tokens"),
        ({"max_sequences": -1}, "max_sequences"),
        ({"steps_in_flight": 0}, "steps_in_flight"),
        ({"context_tokens": 65}, "context_tokens"),
        ({"context_tokens": 0}, "context_tokens"),
    ],
)
def test_limits_that_cannot_work(limits: dict[str, int], param: str) -> None:
    with pytest.raises(ConfigError, match=f"{param} is ") as caught:
        make_runner(**limits)
    assert caught.value.param == param
