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
from headrace.core.step import Runner

_FOUND = importlib.util.spec_from_file_location("tiny", Path(__file__).with_name("tiny.py"))
assert _FOUND is not None
assert _FOUND.loader is not None
tiny: Any = importlib.util.module_from_spec(_FOUND)
_FOUND.loader.exec_module(tiny)

# A GPU's matrix units take float32 as tf32, with a tenth of the precision.
TOLERANCE = 2e-2 if torch.cuda.is_available() else 2e-4


class LibraryChoices(Choices):
    """Products by torch: other kernels have tests of their own, and the interpreter is slow."""

    def launch(self, matrix: Matrix, rows: int) -> KernelChoice:
        return KernelChoice(kernel="library")


MANY = ["greedy", "top_k", "typical", "bias", "allowed", "banned", "all"]
FEW = ["penalties", "masks", "top_p"]


# With few sequences, logits of fewer rows exist at one time than are drawn from.
@pytest.mark.parametrize(
    ("name", "sequences", "kinds"),
    [("llama", 60, MANY), ("gemma", 3, FEW)],
    ids=["llama", "in pieces"],
)
def test_every_kind_of_draw(
    name: str, sequences: int, kinds: list[str], device: torch.device
) -> None:
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
