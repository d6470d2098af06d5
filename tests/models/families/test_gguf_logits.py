"""GGUF files against transformers: a tiny one of each architecture, and the default model.

The tiny files are written with the gguf package from the tiny models' own weights, changed as
llama.cpp's converter changes them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from tests.plans import Draw, Row, plan_of, rows_of
from transformers import AutoModelForCausalLM, LlamaConfig
from transformers.modeling_gguf_pytorch_utils import load_gguf_checkpoint

from headrace.backends.reference.runner import ReferenceRunner
from headrace.core.errors import UnsupportedModelError
from headrace.models.registry import describe_gguf, rope_factors_name
from headrace.models.spec import ModelSpec
from headrace.weights.dequantize import dequantize
from headrace.weights.files.gguf import GgufFile
from headrace.weights.load import find_weights

MakeTiny = Callable[[str], tuple[torch.nn.Module, Path]]
Floats = NDArray[np.float32]

_NAMES = {
    "model.embed_tokens.": "token_embd.",
    "model.norm.": "output_norm.",
    "lm_head.": "output.",
    "model.layers.": "blk.",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.qkv_proj": "attn_qkv",
    "self_attn.o_proj": "attn_output",
    "self_attn.q_norm": "attn_q_norm",
    "self_attn.k_norm": "attn_k_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.gate_up_proj": "ffn_up",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
    "input_layernorm": "attn_norm",
    "pre_feedforward_layernorm": "ffn_norm",
    "post_feedforward_layernorm": "post_ffw_norm",
}
_ARCHITECTURES = {"llama2": "llama", "llama3": "llama", "linear": "llama", "yarn": "llama"}
_ARCHITECTURES |= {"smollm": "llama", "mistral": "llama"}
_ARCHITECTURES |= {"phi3_longrope": "phi3", "phi3_partial": "phi3"}


def _interleaved(rows: Floats, heads: int) -> Floats:
    """Each head's two halves shuffled together, as llama.cpp wants llama's q and k."""
    halves = rows.reshape(heads, 2, -1, *rows.shape[1:])
    return halves.swapaxes(1, 2).reshape(rows.shape)


def _tensors(model: torch.nn.Module, architecture: str) -> Iterator[tuple[str, Floats]]:
    config: Any = model.config
    gemma = architecture.startswith("gemma")
    names = _NAMES | {"post_attention_layernorm": "post_attention_norm" if gemma else "ffn_norm"}
    for name, parameter in model.named_parameters():
        values = parameter.detach().numpy()
        if gemma and values.ndim == 1:
            values = values + np.float32(1)
        if architecture == "llama" and "q_proj" in name:
            values = _interleaved(values, config.num_attention_heads)
        if architecture == "llama" and "k_proj" in name:
            values = _interleaved(values, config.num_key_value_heads)
        for theirs, ours in names.items():
            name = name.replace(theirs, ours)
        yield name, values


def _write_rope(writer: gguf.GGUFWriter, config: Any, head_dim: int) -> None:
    rope = config.rope_parameters
    if "full_attention" in rope:
        rope = rope["full_attention"]
    writer.add_rope_freq_base(rope["rope_theta"])
    width = int(head_dim * rope.get("partial_rotary_factor", 1))
    writer.add_rope_dimension_count(width)
    kind = rope["rope_type"]
    if kind in ("linear", "yarn"):
        writer.add_rope_scaling_type(gguf.RopeScalingType(kind))
        writer.add_rope_scaling_factor(rope["factor"])
    if kind == "yarn":
        writer.add_rope_scaling_orig_ctx_len(rope["original_max_position_embeddings"])
        writer.add_rope_scaling_yarn_beta_fast(rope["beta_fast"])
    if kind == "llama3":
        writer.add_tensor("rope_freqs.weight", _llama3_factors(rope, width))
    if kind == "longrope":
        original = config.original_max_position_embeddings
        stretch = config.max_position_embeddings / original
        writer.add_rope_scaling_orig_ctx_len(original)
        writer.add_rope_scaling_attn_factors(float(np.sqrt(1 + np.log(stretch) / np.log(original))))
        for length in ("long", "short"):
            factors = np.array(rope[f"{length}_factor"], np.float32)
            writer.add_tensor(f"rope_factors_{length}.weight", factors)


def _llama3_factors(rope: dict[str, Any], width: int) -> Floats:
    """As llama.cpp's converter writes them: divisors of the plain frequencies."""
    plain = rope["rope_theta"] ** -(np.arange(0, width, 2) / width)
    length = 2 * np.pi / plain
    original, low, high = (
        rope[k] for k in ("original_max_position_embeddings", "low_freq_factor", "high_freq_factor")
    )
    smooth = (original / length - low) / (high - low)
    between = 1 / ((1 - smooth) / rope["factor"] + smooth)
    factors = np.where(length < original / high, 1, between)
    factors = np.where(length > original / low, rope["factor"], factors)
    return factors.astype(np.float32)


def write_gguf(model: torch.nn.Module, case: str, path: Path) -> None:
    config: Any = model.config
    architecture = _ARCHITECTURES.get(case, case)
    writer = gguf.GGUFWriter(path, architecture)
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_block_count(config.num_hidden_layers)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    plain_dim = config.hidden_size // config.num_attention_heads
    head_dim = getattr(config, "head_dim", None) or plain_dim
    if head_dim != plain_dim:
        writer.add_key_length(head_dim)
        writer.add_value_length(head_dim)
    if getattr(config, "sliding_window", None):
        writer.add_sliding_window(config.sliding_window)
    if architecture == "gemma2":
        writer.add_attn_logit_softcapping(config.attn_logit_softcapping)
        writer.add_final_logit_softcapping(config.final_logit_softcapping)
    _write_rope(writer, config, head_dim)
    for name, values in _tensors(model, architecture):
        writer.add_tensor(name, np.ascontiguousarray(values))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def open_runner(
    path: Path, *, context_tokens: int | None = None
) -> tuple[ModelSpec, ReferenceRunner]:
    with GgufFile.open(path) as file:
        shapes = {name: tensor.shape for name, tensor in file.tensors.items()}
        named = rope_factors_name(file.metadata, shapes, context_tokens)
        factors = None if named is None else dequantize(file.tensors[named]).tolist()
        spec, refs = describe_gguf(file.metadata, shapes, factors, context_tokens)
        return spec, ReferenceRunner(spec, find_weights(refs, file), total_blocks=24)


def run_whole(runner: ReferenceRunner, token_ids: list[int]) -> Floats:
    entry = Row(sequence_id=1, token_ids=token_ids, start=0, block_table=[5, 2, 9])
    return runner.logits(plan_of(entry))[0]


def relative_error(found: Floats, model: torch.nn.Module, token_ids: list[int]) -> float:
    with torch.no_grad():
        wanted = model(input_ids=torch.tensor([token_ids])).logits[0].numpy()
    return float(np.abs(found - wanted).max() / np.abs(wanted).max())


def test_tiny_gguf_logits(make_tiny: MakeTiny, tiny_case: str, tmp_path: Path) -> None:
    if tiny_case == "qwen2_windows":
        pytest.skip("GGUF has no windows for Qwen2")
    model, _ = make_tiny(tiny_case)
    path = tmp_path / "tiny.gguf"
    write_gguf(model, tiny_case, path)
    text = np.random.default_rng(3).integers(0, 97, 40).tolist()
    _, runner = open_runner(path)
    assert relative_error(run_whole(runner, text), model, text) <= 1e-4


def test_gguf_longrope_takes_short_factors(make_tiny: MakeTiny, tmp_path: Path) -> None:
    model, _ = make_tiny("phi3_longrope")
    path = tmp_path / "tiny.gguf"
    write_gguf(model, "phi3_longrope", path)
    _, runner = open_runner(path, context_tokens=16)
    text = list(range(16))
    assert relative_error(run_whole(runner, text), model, text) <= 1e-4


def test_gguf_and_hub_describe_the_same_model(make_tiny: MakeTiny, tmp_path: Path) -> None:
    """Apart from the order of rotation, which the converter changes with the weights."""
    model, _ = make_tiny("mistral")
    path = tmp_path / "tiny.gguf"
    write_gguf(model, "mistral", path)
    spec, _ = open_runner(path)
    assert spec.attention[0].rope.interleaved
    assert [a.window for a in spec.attention] == [8, 8, 8]
    turned = replace(spec.attention[0].rope, interleaved=False)
    assert turned.inv_freq == tuple(10_000 ** -(i / 16) for i in range(0, 16, 2))


def test_a_tensor_that_would_go_unused_is_refused(make_tiny: MakeTiny, tmp_path: Path) -> None:
    model, _ = make_tiny("qwen2")
    path = tmp_path / "tiny.gguf"
    write_gguf(model, "qwen2", path)
    with GgufFile.open(path) as file:
        shapes = {name: tensor.shape for name, tensor in file.tensors.items()}
        extra = shapes | {"blk.0.attn_output.bias": (64,)}
        with pytest.raises(UnsupportedModelError, match=r"blk\.0\.attn_output\.bias"):
            describe_gguf(file.metadata, extra)


@pytest.fixture(scope="session")
def default_in_transformers(
    default_model_path: Path, default_reader: gguf.GGUFReader
) -> torch.nn.Module:
    """By the reader inside transformers: its from_pretrained would ask for accelerate too."""
    torch.set_num_threads(1)
    read = load_gguf_checkpoint(str(default_model_path))
    config = LlamaConfig(**read["config"], attn_implementation="eager")
    model: Any = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    found = load_gguf_checkpoint(str(default_model_path), return_tensors=True, model_to_load=model)
    missing, unexpected = model.load_state_dict(found["tensors"], strict=False)
    assert (missing, unexpected) == (["lm_head.weight"], [])
    model.tie_weights()
    whole: torch.nn.Module = model.eval()
    return whole


def test_default_model_agrees_with_transformers(
    default_model_path: Path, default_in_transformers: torch.nn.Module
) -> None:
    spec, runner = open_runner(default_model_path)
    assert (spec.layers, spec.hidden_size, spec.tied_embeddings) == (30, 576, True)
    assert spec.parameters == 134_515_008
    text = [1, 9690, 198, 2683, 359, 253, 5356, 5646, 11173, 3365, 3511, 308, 34519]
    assert relative_error(run_whole(runner, text), default_in_transformers, text) <= 1e-4
    found = _greedy(runner, text, 20)
    assert found == _greedy_there(default_in_transformers, text, found)


def _greedy(runner: ReferenceRunner, text: list[int], count: int) -> list[int]:
    """First the prompt in two chunks, then token by token, as an engine would."""
    generated: list[int] = []
    chunks, at = [text[:5], text[5:]], 0
    while chunks:
        tokens = chunks.pop(0)
        entry = Row(
            sequence_id=1, token_ids=tokens, start=at, block_table=[7, 3, 11],
            draw=None if chunks else Draw(temperature=0),
        )  # fmt: skip
        runner.submit(plan_of(entry))
        result = rows_of(runner.collect())[0]
        at += len(tokens)
        if result.token_id is not None:
            generated.append(result.token_id)
            chunks = [[result.token_id]] if len(generated) < count else []
    return generated


def _greedy_there(model: torch.nn.Module, text: list[int], found: list[int]) -> list[int]:
    """The likeliest token after the text and each beginning of `found`: they are `found` if, and
    only if, generating one after the other gives that."""
    with torch.no_grad():
        logits = model(input_ids=torch.tensor([text + found[:-1]])).logits[0]
    chosen: list[int] = logits[len(text) - 1 :].argmax(-1).tolist()
    return chosen
