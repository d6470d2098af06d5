"""Weights for the peers, against the gguf package and transformers' own reader of GGUF."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
from safetensors.numpy import load_file
from transformers import AutoTokenizer, LlamaConfig, LlamaForCausalLM
from transformers.modeling_gguf_pytorch_utils import load_gguf_checkpoint

from peers import model_files
from peers.model_files import random_q4_0, requantize, write_all, write_float_folder

WIDTH, HEADS, KV_HEADS, FEED_FORWARD, LAYERS = 64, 4, 2, 96, 2
Q4_0 = gguf.GGMLQuantizationType.Q4_0
Q4_1 = gguf.GGMLQuantizationType.Q4_1
Q8_0 = gguf.GGMLQuantizationType.Q8_0


@pytest.fixture
def source(tmp_path: Path) -> Path:
    """A tiny llama in the default model's formats: Q4_1 matrices, a Q8_0 output layer."""
    path = tmp_path / "source.gguf"
    chooser = np.random.default_rng(1)
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
    letters = list(model_files._byte_letters().values())
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("smollm")
    writer.add_token_list([*letters, "ab", "<|begin|>", "<|end|>"])
    writer.add_token_merges(["a b"])
    writer.add_bos_token_id(257)
    writer.add_eos_token_id(258)
    shapes = {"token_embd": (259, WIDTH)}
    for layer in range(LAYERS):
        shapes |= {
            f"blk.{layer}.attn_q": (WIDTH, WIDTH),
            f"blk.{layer}.attn_k": (WIDTH // 2, WIDTH),
            f"blk.{layer}.attn_v": (WIDTH // 2, WIDTH),
            f"blk.{layer}.attn_output": (WIDTH, WIDTH),
            f"blk.{layer}.ffn_gate": (FEED_FORWARD, WIDTH),
            f"blk.{layer}.ffn_up": (FEED_FORWARD, WIDTH),
            f"blk.{layer}.ffn_down": (WIDTH, FEED_FORWARD),
        }
    for name, shape in shapes.items():
        kind = Q8_0 if name == "token_embd" else Q4_1
        values = chooser.standard_normal(shape, dtype=np.float32)
        writer.add_tensor(f"{name}.weight", gguf.quants.quantize(values, kind), raw_dtype=kind)
    norms = [f"blk.{n}.{part}_norm" for n in range(LAYERS) for part in ("attn", "ffn")]
    for name in [*norms, "output_norm"]:
        writer.add_tensor(f"{name}.weight", chooser.random(WIDTH, dtype=np.float32))
    model_files._finish(writer)
    return path


def tensors_of(path: Path) -> dict[str, Any]:
    return {tensor.name: tensor for tensor in gguf.GGUFReader(path).tensors}


def values_of(tensor: Any) -> Any:
    return gguf.quants.dequantize(tensor.data, tensor.tensor_type)


def test_float32_is_what_transformers_reads_from_the_gguf(source: Path, tmp_path: Path) -> None:
    write_float_folder(source, tmp_path / "folder")
    found = load_file(tmp_path / "folder" / "model.safetensors")
    config = LlamaConfig(**json.loads((tmp_path / "folder" / "config.json").read_text()))
    model = LlamaForCausalLM(config)
    expected = load_gguf_checkpoint(str(source), return_tensors=True, model_to_load=model)
    wanted = {name: value.numpy() for name, value in expected["tensors"].items()}
    wanted.pop("lm_head.weight", None)  # tied
    assert sorted(found) == sorted(wanted)
    for name, values in wanted.items():
        np.testing.assert_array_equal(found[name], values, err_msg=name)
    for key in ("hidden_size", "num_key_value_heads", "intermediate_size", "rms_norm_eps"):
        assert getattr(config, key) == pytest.approx(expected["config"][key]), key
    assert config.tie_word_embeddings


def test_the_folder_has_a_tokenizer_that_turns_ids_into_text(source: Path, tmp_path: Path) -> None:
    write_float_folder(source, tmp_path / "folder")
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "folder")
    ids = tokenizer("abba é")["input_ids"]
    assert ids[0] == 256  # merged
    assert tokenizer.decode(ids) == "abba é"


@pytest.mark.parametrize(("wanted", "bits"), [(Q4_0, 4), (Q8_0, 8)])
def test_requantizing_changes_the_4_bit_matrices_alone(
    source: Path, tmp_path: Path, wanted: Any, bits: int
) -> None:
    to = tmp_path / "to.gguf"
    requantize(source, to, wanted)
    before, after = tensors_of(source), tensors_of(to)
    assert list(after) == list(before)
    for name, tensor in after.items():
        old = values_of(before[name])
        if before[name].tensor_type == Q4_1:
            assert tensor.tensor_type == wanted
            step = np.abs(old).max() / (2 ** (bits - 1) - 1)
            assert 0 < np.abs(values_of(tensor) - old).max() <= step
        else:
            assert tensor.tensor_type == before[name].tensor_type
            np.testing.assert_array_equal(tensor.data, before[name].data)
    fields, copied = gguf.GGUFReader(source).fields, gguf.GGUFReader(to).fields
    kept = [name for name in fields if not name.startswith("GGUF.")]
    assert kept
    for name in kept:
        assert copied[name].contents() == fields[name].contents(), name


def test_random_blocks_are_q4_0_of_an_ordinary_size() -> None:
    packed = random_q4_0(np.random.default_rng(0), 64, 2048)
    values = gguf.quants.dequantize(packed, Q4_0)
    assert values.shape == (64, 2048)
    assert values.std() == pytest.approx(0.02, rel=0.05)
    assert abs(values.mean()) < 0.005  # nibbles run from -8 to 7


def test_files_are_written_once_and_whole(
    source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tmp_path / "models"
    write_all(source, folder, ["q4_1", "q8_0"])
    assert sorted(path.name for path in folder.iterdir()) == ["model-q4_1.gguf", "model-q8_0.gguf"]
    assert (folder / "model-q4_1.gguf").read_bytes() == source.read_bytes()

    def unexpected(*_: Any) -> None:
        raise AssertionError("written again")

    monkeypatch.setattr(model_files, "requantize", unexpected)
    write_all(source, folder, ["q4_1", "q8_0"])
