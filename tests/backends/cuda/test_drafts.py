"""Rows that end in drafts on the CUDA runner: at every place the tokens of plain steps, and those
of the reference; without a GPU, through Triton's interpreter."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.backends.drafted_steps import PLACES, both_ways

from headrace.backends.cuda.products.choice import Choices, KernelChoice
from headrace.backends.cuda.products.matrix import Matrix
from headrace.backends.cuda.runner import CudaRunner
from headrace.backends.reference.runner import ReferenceRunner
from headrace.core.step import Drafts, DrawParams, Runner, StepPlan

_FOUND = importlib.util.spec_from_file_location("tiny", Path(__file__).with_name("tiny.py"))
assert _FOUND is not None
assert _FOUND.loader is not None
tiny: Any = importlib.util.module_from_spec(_FOUND)
_FOUND.loader.exec_module(tiny)

# A GPU's matrix units take float32 as tf32, with a tenth of the precision.
TOLERANCE = 2e-2 if torch.cuda.is_available() else 2e-4


GREEDY = DrawParams(temperature=0.0)


class LibraryChoices(Choices):
    """Products by torch: other kernels have tests of their own, and the interpreter is slow."""

    def launch(self, matrix: Matrix, rows: int) -> KernelChoice:
        return KernelChoice(kernel="library")


MANY = ["greedy", "top_k", "typical", "bias", "allowed", "banned", "all"]
FEW = ["penalties", "masks", "top_p"]


# In pieces: logits of fewer rows exist at one time than are drawn from.
@pytest.mark.parametrize(
    ("name", "sequences", "kinds"),
    [("llama", 60, MANY), ("gemma", 3, FEW)],
    ids=["llama", "in pieces"],
)
def test_every_kind_of_draw(
    name: str,
    sequences: int,
    kinds: list[str],
    device: torch.device,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("headrace.backends.cuda.step.shapes.LEAST_LOGIT_ROWS", 1)
    spec = tiny.SPECS[name]
    weights = tiny.make_weights(spec, 3)
    limits: dict[str, Any] = {
        "total_blocks": 40,
        "max_batch_tokens": 256,
        "max_sequences": sequences,
    }

    def make() -> Runner:
        return CudaRunner(
            spec,
            weights,
            **limits,
            device=device,
            kv_dtype="f32",
            dtype=torch.float32,
            choices=LibraryChoices(),
        )

    plain, drafted = both_ways(make, tiny.VOCAB, kinds, prompt_tokens=15)
    _, expected = both_ways(
        lambda: ReferenceRunner(spec, weights, **limits), tiny.VOCAB, kinds, prompt_tokens=15
    )
    for kind, some, others, true in zip(kinds, plain, drafted, expected, strict=True):
        assert len(others) == PLACES + 1
        for one, other, third in zip(some, others, true, strict=True):
            assert one.token_id == other.token_id == third.token_id, kind
            assert other.logprob == pytest.approx(one.logprob, abs=TOLERANCE)
            assert other.logprob == pytest.approx(third.logprob, abs=TOLERANCE)
            assert [token for token, _ in other.top] == [token for token, _ in third.top]


@pytest.mark.skipif(not torch.cuda.is_available(), reason="captures need a GPU")
def test_graphs_of_steps_with_drafts_are_captured_at_start(device: torch.device) -> None:
    spec = tiny.SPECS["llama"]
    with CudaRunner(
        spec,
        tiny.make_weights(spec, 3),
        total_blocks=40,
        max_batch_tokens=64,
        max_sequences=4,
        device=device,
        graphs="start",
        draft_tokens=8,
    ) as runner:
        plan = StepPlan()
        plan.add(1, [3, 4, 5], 0, [0], draw=GREEDY)
        runner.submit(plan)
        runner.collect()
        for drafts in (1, 3, 8):
            plan = StepPlan()
            uniforms = Drafts(uniforms=[0.0] * drafts)
            plan.add(1, [6, *range(7, 7 + drafts)], 3, [0], draw=GREEDY, drafts=uniforms)
            runner.submit(plan)
            result = runner.collect()
            assert len(result.tokens[0]) == drafts + 1
            assert not result.is_warm_up, drafts
