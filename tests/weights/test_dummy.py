"""Weights of random values: the right shapes from a config.json alone, the same in every process,
and no more memory than is asked for."""

from __future__ import annotations

import json
import tracemalloc
from pathlib import Path

import numpy as np
import pytest
import torch
from tests.plans import Draw, Row, plan_of, rows_of
from tests.weights.packers import CONFIG

from headrace.backends.cpu import layout
from headrace.backends.cpu.runner import CpuRunner
from headrace.backends.reference.runner import ReferenceRunner
from headrace.core.errors import ModelNotFoundError, UnsupportedModelError, WeightsError
from headrace.models.refs import TensorRef
from headrace.weights.dequantize import dequantize, plain_tensor
from headrace.weights.describe import describe_file
from headrace.weights.dummy import DummyFolder, DummyTensor, dummy_tensor, round_to_bf16
from headrace.weights.load import find_weights, open_weights
from headrace.weights.weight import Weight

LARGE = CONFIG | {
    "vocab_size": 128256,
    "hidden_size": 4096,
    "intermediate_size": 14336,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
}


def folder(path: Path, config: dict[str, object]) -> Path:
    (path / "config.json").write_text(json.dumps(config))
    return path


@pytest.mark.parametrize(
    "change",
    [
        {},
        {"model_type": "qwen2"},
        {"model_type": "qwen3", "head_dim": 16, "tie_word_embeddings": True},
        {"model_type": "phi3", "pad_token_id": 0},
        {"model_type": "smollm3"},
        {"model_type": "olmo2"},
        {"model_type": "gemma2", "head_dim": 16, "hidden_activation": "gelu_pytorch_tanh"},
    ],
)
def test_every_family_runs(tmp_path: Path, change: dict[str, object]) -> None:
    with open_weights(folder(tmp_path, CONFIG | change), "dummy") as file:
        assert isinstance(file, DummyFolder)
        spec, refs = describe_file(file)
        weights = find_weights(refs, file)
    assert weights.embed is not None
    assert weights.embed.parts[0].shape == (48, 64)
    assert (weights.head is weights.embed) == spec.tied_embeddings
    entry = Row(
        sequence_id=0, token_ids=[1, 2, 3], start=0, block_table=[0], draw=Draw(temperature=0.0)
    )
    logprobs = []
    reference = ReferenceRunner(spec, weights, total_blocks=1)
    with CpuRunner(spec, weights, total_blocks=1, kv_dtype="f32") as runner:
        assert runner.weight_bytes == layout.weight_bytes(weights)
        for each in (reference, runner):
            each.submit(plan_of(entry))
            (result,) = rows_of(each.collect())
            assert result.token_id is not None
            logprobs.append(result.logprob)
    assert np.isfinite(logprobs).all()
    assert abs(logprobs[0] - logprobs[1]) < 1e-3


def test_values(tmp_path: Path) -> None:
    part = dummy_tensor(TensorRef("model.a.weight", (300, 200)))
    values = dequantize(part)
    assert values.shape == (300, 200)
    assert abs(values.mean()) < 1e-3
    assert 0.0195 < values.std() < 0.0205
    assert np.array_equal(values, dequantize(part))
    other = dequantize(dummy_tensor(TensorRef("model.b.weight", (300, 200))))
    assert abs(np.corrcoef(values.ravel(), other.ravel())[0, 1]) < 0.02
    raw = torch.frombuffer(bytearray(plain_tensor(part).data), dtype=torch.bfloat16)
    assert np.array_equal(raw.float().numpy().reshape(300, 200), values)


def test_vectors_are_ones_or_zeros() -> None:
    norm = dummy_tensor(TensorRef("model.norm.weight", (5,)))
    assert dequantize(norm).tolist() == [1.0] * 5
    gemma = dummy_tensor(TensorRef("model.norm.weight", (5,)), offset=1.0)
    assert dequantize(gemma).tolist() == [0.0] * 5
    bias = dummy_tensor(TensorRef("q_proj.bias", (5,)))
    assert dequantize(bias).tolist() == [0.0] * 5


def test_rounding_is_torchs() -> None:
    values = np.random.default_rng(0).standard_normal(10_000).astype(np.float32)
    expected = torch.from_numpy(values).to(torch.bfloat16).float().numpy()
    assert np.array_equal(round_to_bf16(values), expected)


def test_nothing_is_made_before_it_is_asked_for(tmp_path: Path) -> None:
    tracemalloc.start()
    try:
        with open_weights(folder(tmp_path, LARGE), "dummy") as file:
            spec, refs = describe_file(file)
            weights = find_weights(refs, file)
        assert tracemalloc.get_traced_memory()[1] < 4 << 20
    finally:
        tracemalloc.stop()
    total = 0
    names: set[str] = set()

    def count(_role: str, weight: Weight) -> None:
        nonlocal total
        for part in weight.parts:
            assert isinstance(part, DummyTensor)
            names.add(part.name)
            total += part.values

    weights.map(count)
    assert total == spec.parameters
    assert len(names) == len({dummy_tensor(TensorRef(name, (1, 1))).seed for name in names})


def test_what_cant_be(tmp_path: Path) -> None:
    with pytest.raises(ModelNotFoundError, match="load_format dummy needs a folder with a config"):
        open_weights(tmp_path / "none", "dummy")
    with pytest.raises(WeightsError, match=r"no config\.json"):
        open_weights(tmp_path, "dummy")
    quantized = CONFIG | {"quantization_config": {"quant_method": "awq"}}
    with (
        open_weights(folder(tmp_path, quantized), "dummy") as file,
        pytest.raises(UnsupportedModelError, match="quantization_config"),
    ):
        describe_file(file)
