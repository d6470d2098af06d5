"""Quantized copies of a GGUF: the same model, each in its own way nearly the same values; and the
perplexity script over them."""

from __future__ import annotations

import json
from pathlib import Path

import gguf
import numpy as np
import pytest
import torch

import perplexity
import quantized_copies
from headrace.weights.dequantize import dequantize
from headrace.weights.describe import describe_file
from headrace.weights.files.gguf import GgufFile
from headrace.weights.load import find_weights, open_weights
from headrace.weights.methods.quantized import E4M3, QuantizedTensor

WIDTH, HEADS, KV_HEADS, FEED_FORWARD, LAYERS = 64, 4, 2, 192, 2
# Of the largest value in a group or an output: half a step, and half precision.
WORST = {
    "float": 0.0, "awq": 0.08, "gptq": 0.08, "gptq-8bit": 0.006, "fp8": 0.04, "fp8-block": 0.04,
    "int8": 0.005,
}  # fmt: skip


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("source") / "source.gguf"
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_context_length(128)
    writer.add_embedding_length(WIDTH)
    writer.add_block_count(LAYERS)
    writer.add_feed_forward_length(FEED_FORWARD)
    writer.add_head_count(HEADS)
    writer.add_head_count_kv(KV_HEADS)
    writer.add_rope_dimension_count(WIDTH // HEADS)
    writer.add_rope_freq_base(10000.0)
    writer.add_layer_norm_rms_eps(1e-5)
    letters = [chr(c) for c in [*range(33, 127), *range(161, 173), *range(174, 324)]]
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("smollm")
    writer.add_token_list([*letters[:256], "ab", "<|begin|>", "<|end|>"])
    writer.add_token_merges(["a b"])
    writer.add_bos_token_id(257)
    writer.add_eos_token_id(258)
    kv = WIDTH // HEADS * KV_HEADS
    shapes: dict[str, tuple[int, ...]] = {"token_embd": (259, WIDTH), "output_norm": (WIDTH,)}
    for layer in range(LAYERS):
        names = {
            "attn_norm": (WIDTH,), "ffn_norm": (WIDTH,), "attn_q": (WIDTH, WIDTH),
            "attn_k": (kv, WIDTH), "attn_v": (kv, WIDTH), "attn_output": (WIDTH, WIDTH),
            "ffn_gate": (FEED_FORWARD, WIDTH), "ffn_up": (FEED_FORWARD, WIDTH),
            "ffn_down": (WIDTH, FEED_FORWARD),
        }  # fmt: skip
        shapes |= {f"blk.{layer}.{name}": shape for name, shape in names.items()}
    chooser = np.random.default_rng(1)
    for name, shape in shapes.items():
        values = chooser.standard_normal(shape, dtype=np.float32) * 0.3
        writer.add_tensor(f"{name}.weight", values + (1 if len(shape) == 1 else 0))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


@pytest.fixture(scope="module")
def copies(source: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("copies")
    with GgufFile.open(source) as file:
        for name in quantized_copies.COPIES:
            quantized_copies.write_copy(file, folder, name)
    return folder


@pytest.mark.parametrize("name", quantized_copies.COPIES)
def test_values_are_near(copies: Path, name: str) -> None:
    with open_weights(copies / "float") as plain, open_weights(copies / name) as file:
        expected = find_weights(describe_file(plain)[1], plain)
        found = find_weights(describe_file(file)[1], file)
        for ours, theirs in zip(found.layers, expected.layers, strict=True):
            for role in ("qkv", "attn_out", "gate_up", "down"):
                for part, exact in zip(
                    getattr(ours, role).parts, getattr(theirs, role).parts, strict=True
                ):
                    assert isinstance(part, QuantizedTensor) == (name != "float")
                    values = dequantize(exact)
                    error = np.abs(dequantize(part) - values).max() / np.abs(values).max()
                    assert error <= WORST[name], (role, error)


def test_float8_is_rounded_as_torch_rounds(copies: Path) -> None:
    values = np.random.default_rng(2).uniform(-448, 448, 5000).astype(np.float32)
    values[::3] /= 3000
    expected = torch.from_numpy(values).to(torch.float8_e4m3fn).float().numpy()
    assert np.array_equal(E4M3[quantized_copies._e4m3(values)], expected)


def test_perplexities_of_a_model_and_its_copies(
    source: Path, copies: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    text = tmp_path / "text.txt"
    text.write_text("abracadabra, said the crab; " * 6)
    out = tmp_path / "figures.json"
    models = [str(source), *(str(copies / name) for name in quantized_copies.COPIES)]
    perplexity.main(
        ["--text", str(text), "--window", "40", "--json", str(out), "--model", *models]
    )  # fmt: skip
    found = {name: row["perplexity"] for name, row in json.loads(out.read_text()).items()}
    assert len(found) == 2 * len(models)
    exact = found["source.gguf reference f32"]
    assert found["float reference f32"] == pytest.approx(exact, rel=1e-4)  # pairs in their places
    for name in quantized_copies.COPIES:
        reference = found[f"{name} reference f32"]
        assert found[f"{name} cpu f16"] == pytest.approx(reference, rel=0.005)
        assert reference == pytest.approx(exact, rel=0.5)
        if name != "float":
            assert reference != exact
    assert "against float reference f32" in capsys.readouterr().out


def test_the_standard_error_is_of_the_tokens_differences() -> None:
    """Not of the tokens: what both find as unlikely is no noise."""
    first = [-1.0, -9.0, -3.0, -20.0]
    assert perplexity.standard_error([value - 0.5 for value in first], first) == pytest.approx(0.0)
    apart = [-1.0, -9.0, -3.0, -20.4]
    assert perplexity.standard_error(apart, first) == pytest.approx(0.1)


def test_what_a_run_asks_for() -> None:
    args = perplexity.parse(
        ["--device", "reference", "cuda", "--quantization", "none", "fp8", "--kv-dtype", "fp8"]
    )
    assert list(perplexity.variants(args)) == [
        ("reference f32", {"device": "reference", "kv_dtype": "f32"}),
        ("cuda fp8", {"device": "cuda", "kv_dtype": "fp8", "quantization": "none"}),
        ("cuda fp8, KV fp8", {"device": "cuda", "kv_dtype": "fp8", "quantization": "fp8"}),
    ]
