"""Embeddings against transformers: the mean of last_hidden_state, however the prompt is cut up."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray

from headrace import LLM
from headrace.backends.cpu.runner import CpuRunner
from headrace.backends.reference.runner import ReferenceRunner
from headrace.core.config import SchedulerConfig
from headrace.core.errors import ContextLengthError, InvalidRequestError
from headrace.core.request import BeamParams, FinishReason, GenerateRequest, SamplingParams
from headrace.core.step import Runner
from headrace.engine.loop import Engine
from headrace.models.registry import describe_config
from headrace.weights.files.safetensors import SafetensorsFolder
from headrace.weights.load import find_weights

MakeTiny = Callable[[str], tuple[torch.nn.Module, Path]]
Floats = NDArray[np.float64]

rng = np.random.default_rng(5)
PROMPTS = [rng.integers(0, 97, length).tolist() for length in (1, 5, 40, 23, 64)]


def make_runner(folder: Path, backend: str, **limits: Any) -> Runner:
    with SafetensorsFolder.open(folder) as file:
        spec, refs = describe_config(file.config, file.tensors, None)
        weights = find_weights(refs, file)
        total_blocks = limits.pop("total_blocks", 24)
        if backend == "reference":
            return ReferenceRunner(spec, weights, total_blocks=total_blocks, **limits)
        max_batch_tokens = limits.pop("max_batch_tokens", 512)
        max_sequences = limits.pop("max_sequences", 64)
        return CpuRunner(
            spec,
            weights,
            total_blocks=total_blocks,
            max_batch_tokens=max_batch_tokens,
            max_sequences=max_sequences,
            kv_dtype="f32",
            threads=2,
        )


def asking(name: str, prompt: list[int], **fields: object) -> GenerateRequest:
    return GenerateRequest(
        request_id=name,
        prompt_token_ids=prompt,
        **{"params": SamplingParams(), "embed": True, **fields},  # type: ignore[arg-type]
    )


def embed_all(runner: Runner, beside: bool = False) -> list[Floats]:
    """All prompts at once; `beside` others that draw tokens in the same steps."""
    engine = Engine(runner, frozenset(), SchedulerConfig(debug_invariants=True))
    if beside:
        drawing = SamplingParams(temperature=0.0, max_tokens=9, prompt_logprobs=1)
        engine.add(asking("drawing", PROMPTS[2], params=drawing, embed=False))
    for number, prompt in enumerate(PROMPTS):
        engine.add(asking(str(number), prompt))
    found: dict[str, list[float]] = {}
    while engine.has_work:
        for token in engine.step():
            assert token.error is None, token.error
            if token.request_id == "drawing":
                assert token.embedding is None
                continue
            assert (token.token_id, token.finish_reason) == (-1, FinishReason.STOP)
            assert token.embedding is not None
            assert token.request_id not in found
            found[token.request_id] = token.embedding
    assert engine.blocks.used_blocks == 0
    return [np.array(found[str(number)]) for number in range(len(PROMPTS))]


def expected(model: torch.nn.Module) -> list[Floats]:
    with torch.no_grad():
        states = [model.model(torch.tensor([p])).last_hidden_state[0] for p in PROMPTS]  # type: ignore[operator]
    return [state.double().mean(dim=0).numpy() for state in states]


def error_of(found: list[Floats], wanted: list[Floats]) -> float:
    pairs = zip(found, wanted, strict=True)
    return max(float(np.abs(a - b).max() / np.abs(b).max()) for a, b in pairs)


def test_the_mean_of_transformers_hidden_states(tiny_case: str, make_tiny: MakeTiny) -> None:
    model, folder = make_tiny(tiny_case)
    found, wanted = embed_all(make_runner(folder, "reference")), expected(model)
    if tiny_case == "phi3_longrope":  # there transformers rotates short texts otherwise
        found, wanted = found[2:], wanted[2:]
    assert error_of(found, wanted) < 1e-4


@pytest.mark.parametrize("case", ["smollm", "smollm3", "olmo2", "qwen3", "gemma2"])
def test_the_cpu_agrees_as_far_as_its_weights_do(case: str, make_tiny: MakeTiny) -> None:
    model, folder = make_tiny(case)
    assert error_of(embed_all(make_runner(folder, "cpu")), expected(model)) < 0.03


@pytest.mark.parametrize("backend", ["reference", "cpu"])
def test_neither_chunks_nor_neighbours_nor_preemption_change_it(
    backend: str, make_tiny: MakeTiny
) -> None:
    _, folder = make_tiny("smollm")
    alone = embed_all(make_runner(folder, backend, max_batch_tokens=512, total_blocks=64))
    for limits in (
        {"max_batch_tokens": 7},
        {"max_batch_tokens": 1},
        {"max_batch_tokens": 33, "max_sequences": 2},
        {"max_batch_tokens": 16, "total_blocks": 4},
    ):
        for beside in (False, True):
            found = embed_all(make_runner(folder, backend, **limits), beside)
            assert error_of(found, alone) < 1e-6


def test_a_known_prefix_is_computed_all_the_same(make_tiny: MakeTiny) -> None:
    """Its hidden states are in no block; others may use the blocks that it leaves."""
    _, folder = make_tiny("smollm")
    engine = Engine(make_runner(folder, "cpu"), frozenset())
    found = []
    for name in ("first", "second"):
        engine.add(asking(name, PROMPTS[2]))
        while engine.has_work:
            found += [token.embedding for token in engine.step()]
    assert found[0] == found[1]
    assert engine.stats.prefix_hits_tokens == 0
    greedy = SamplingParams(temperature=0.0, max_tokens=2)
    engine.add(asking("third", [*PROMPTS[2], 5], params=greedy, embed=False))
    while engine.has_work:
        engine.step()
    assert engine.stats.prefix_hits_tokens == 32


def test_what_has_no_place_beside_an_embedding_is_refused(make_tiny: MakeTiny) -> None:
    _, folder = make_tiny("smollm")
    engine = Engine(make_runner(folder, "reference", total_blocks=4), frozenset())
    for fields, name in (
        ({"params": SamplingParams(n=2)}, "n"),
        ({"params": SamplingParams(best_of=2)}, "best_of"),
        ({"params": SamplingParams(prompt_logprobs=1)}, "prompt_logprobs"),
        ({"beam": BeamParams(beam_width=2)}, "beam"),
    ):
        with pytest.raises(InvalidRequestError) as caught:
            engine.add(asking("r", [1, 2], **fields))
        assert caught.value.param == name
    with pytest.raises(ContextLengthError):
        engine.add(asking("r", [1] * 65))
    engine.add(asking("r", [1] * 64))  # the whole context, and the whole pool
    assert not engine.scheduler.blocks.used_blocks


def test_texts_that_mean_the_same_are_nearer(default_model_path: Path) -> None:
    with LLM(default_model_path, kv_tokens=256) as llm:
        texts = ["The cat sleeps on the sofa.", "A cat is sleeping on a couch.", "int main(void) {"]
        cat, other_cat, code = (np.array(v) for v in llm.embed(texts))
    assert cat.shape == (576,)

    def cosine(a: Floats, b: Floats) -> float:
        return float(a @ b / np.linalg.norm(a) / np.linalg.norm(b))

    assert cosine(cat, other_cat) > cosine(cat, code)
