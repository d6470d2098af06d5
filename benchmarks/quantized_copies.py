"""Writes a model's GGUF as folders quantized in the ways that hub checkpoints are.

    python benchmarks/quantized_copies.py MODEL.gguf FOLDER [awq gptq gptq-8bit fp8 fp8-block int8]

Rounded to nearest, nothing calibrated: so that two backends can be compared on the same quantized
weights (benchmarks/perplexity.py), not so that anyone serves them. `float` is the source's values
in F32. Only models of the llama family without rope scaling; read with Headrace's own readers, so
that no other packages are needed than numpy and tokenizers.
"""

from __future__ import annotations

import argparse
import json
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from headrace.models.decoder import DecoderWeights
from headrace.models.registry import describe_config
from headrace.models.spec import ModelSpec
from headrace.tokenizer.gguf_vocabulary import read_gguf_vocabulary
from headrace.weights.dequantize import dequantize
from headrace.weights.describe import describe_file
from headrace.weights.files.gguf import GgufFile
from headrace.weights.load import find_weights
from headrace.weights.methods.quantized import E4M3

Floats = NDArray[np.float32]
Array = NDArray[Any]
Stored = dict[str, tuple[str, Array]]  # name -> dtype as safetensors calls it, bytes

GROUP = 64  # of the inputs: the default model's width is no multiple of 128
BLOCK = 128
_AWQ_ORDER = (0, 2, 4, 6, 1, 3, 5, 7)
_E4M3_MOST = 448.0


def _grouped(values: Floats, bits: int) -> tuple[Array, Array, Array]:
    """[out, in] -> codes [out, in], zero points and half-precision scales [out, groups]"""
    outputs, inputs = values.shape
    groups = values.reshape(outputs, inputs // GROUP, GROUP)
    low = np.minimum(groups.min(-1), 0)
    high = np.maximum(groups.max(-1), 0)
    most = (1 << bits) - 1
    scales = np.maximum((high - low) / most, 1e-6).astype(np.float16)
    steps = scales.astype(np.float32)
    zeros = np.clip(np.rint(-low / steps), 0, most)
    codes = np.clip(np.rint(groups / steps[..., None]) + zeros[..., None], 0, most)
    return codes.reshape(outputs, inputs).astype(np.uint32), zeros.astype(np.uint32), scales


def _words(codes: Array, bits: int) -> Array:
    """[..., n] codes of up to 8 bits -> [..., n * bits / 32] words, the first code lowest"""
    count = 32 // bits
    split = codes.reshape(*codes.shape[:-1], -1, count).astype(np.uint32)
    shifts = np.arange(count, dtype=np.uint32) * np.uint32(bits)
    words: NDArray[np.uint32] = np.bitwise_or.reduce(split << shifts, axis=-1)
    return words.view(np.int32)


def awq(module: str, values: Floats) -> Stored:
    codes, zeros, scales = _grouped(values, 4)

    def pack(by_output: Array) -> Array:
        rows = by_output.T.reshape(by_output.shape[1], -1, 8)[..., _AWQ_ORDER]
        return _words(rows.reshape(len(rows), -1), 4)

    return {
        f"{module}.qweight": ("I32", pack(codes)),
        f"{module}.qzeros": ("I32", pack(zeros)),
        f"{module}.scales": ("F16", scales.T),
    }


def gptq(module: str, values: Floats, bits: int = 4) -> Stored:
    """With the inputs of the largest weights first, as act-order would have them in groups."""
    order = np.argsort(-np.abs(values).sum(0), kind="stable")
    sorted_codes, zeros, scales = _grouped(values[:, order], bits)
    codes = np.empty_like(sorted_codes)
    codes[:, order] = sorted_codes
    owners = np.empty(len(order), np.int32)
    owners[order] = np.arange(len(order)) // GROUP
    less_one = (zeros.T - np.uint32(1)) & np.uint32((1 << bits) - 1)
    return {
        f"{module}.qweight": ("I32", _words(codes, bits).T),
        f"{module}.qzeros": ("I32", _words(less_one, bits)),
        f"{module}.scales": ("F16", scales.T),
        f"{module}.g_idx": ("I32", owners),
    }


def fp8(module: str, values: Floats) -> Stored:
    scales = np.maximum(np.abs(values).max(1, keepdims=True), 1e-10) / np.float32(_E4M3_MOST)
    return {
        f"{module}.weight": ("F8_E4M3", _e4m3(values / scales)),
        f"{module}.weight_scale": ("F32", scales),
    }


def fp8_block(module: str, values: Floats) -> Stored:
    outputs, inputs = values.shape
    rows, columns = -(-outputs // BLOCK), -(-inputs // BLOCK)
    padded = np.zeros((rows * BLOCK, columns * BLOCK), np.float32)
    padded[:outputs, :inputs] = np.abs(values)
    most = padded.reshape(rows, BLOCK, columns, BLOCK).max((1, 3))
    scales = np.maximum(most, 1e-10) / np.float32(_E4M3_MOST)
    each = scales.repeat(BLOCK, 0)[:outputs].repeat(BLOCK, 1)[:, :inputs]
    return {
        f"{module}.weight": ("F8_E4M3", _e4m3(values / each)),
        f"{module}.weight_scale_inv": ("F32", scales),
    }


def int8(module: str, values: Floats) -> Stored:
    scales = np.maximum(np.abs(values).max(1, keepdims=True), 1e-10) / np.float32(127)
    return {
        f"{module}.weight": ("I8", np.clip(np.rint(values / scales), -127, 127).astype(np.int8)),
        f"{module}.weight_scale": ("F32", scales),
    }


def _e4m3(values: Floats) -> NDArray[np.uint8]:
    """The nearest float8, as bits."""
    positive = E4M3[:127].astype(np.float64)  # 0 to 448, in order
    middles = (positive[1:] + positive[:-1]) / 2
    bits = np.searchsorted(middles, np.abs(values)).astype(np.uint8)
    return bits | np.where(np.signbit(values), np.uint8(128), np.uint8(0))


def plain(module: str, values: Floats) -> Stored:
    return {f"{module}.weight": ("F32", values)}


Pack = Callable[[str, Floats], Stored]
COPIES: dict[str, tuple[Pack, dict[str, object] | None]] = {
    "float": (plain, None),
    "awq": (awq, {"quant_method": "awq", "bits": 4, "group_size": GROUP, "version": "gemm"}),
    "gptq": (gptq, {"quant_method": "gptq", "bits": 4, "group_size": GROUP, "desc_act": True}),
    "gptq-8bit": (
        lambda module, values: gptq(module, values, 8),
        {"quant_method": "gptq", "bits": 8, "group_size": GROUP, "desc_act": True},
    ),
    "fp8": (fp8, {"quant_method": "fp8", "activation_scheme": "dynamic"}),
    "fp8-block": (
        fp8_block,
        {
            "quant_method": "fp8",
            "activation_scheme": "dynamic",
            "weight_block_size": [BLOCK, BLOCK],
        },
    ),
    "int8": (
        int8,
        {
            "quant_method": "compressed-tensors",
            "format": "int-quantized",
            "config_groups": {
                "group_0": {
                    "targets": ["Linear"],
                    "weights": {"num_bits": 8, "type": "int", "strategy": "channel"},
                    "input_activations": {"num_bits": 8, "type": "int", "strategy": "token"},
                }
            },
            "ignore": ["lm_head"],
        },
    ),
}


def write_copy(source: GgufFile, folder: Path, name: str) -> Path:
    """FOLDER/name, ready to be loaded."""
    pack, quantization = COPIES[name]
    spec, refs = describe_file(source)
    config = _config(source, spec)
    _, hub_refs = describe_config(config, [])
    stored: Stored = {}
    found = _parts(find_weights(refs, source))
    for (role, number, part), (_, _, ref) in zip(found, _parts(hub_refs), strict=True):
        if ref.name in stored or (role == "head" and spec.tied_embeddings):
            continue
        values = dequantize(part)
        if role == "qkv" and number < 2 and spec.attention[0].rope.interleaved:
            values = _undo_pairs(values, spec.attention[0].head_dim)
        is_linear = len(ref.shape) == 2 and role not in ("embed", "head")
        stored |= (pack if is_linear else plain)(ref.name.removesuffix(".weight"), values)
    to = folder / name
    to.mkdir(parents=True, exist_ok=True)
    if quantization is not None:
        config["quantization_config"] = quantization
    (to / "config.json").write_text(json.dumps(config, indent=2))
    read_gguf_vocabulary(source.metadata).backend.save(str(to / "tokenizer.json"))
    write_safetensors(to / "model.safetensors", stored)
    return to


def _parts(weights: DecoderWeights[Any]) -> list[tuple[str, int, Any]]:
    """(role, number within the weight, part), in the decoder's order."""
    listed: list[tuple[str, int, Any]] = []
    weights.map(lambda role, w: listed.extend((role, n, part) for n, part in enumerate(w.parts)))
    return listed


def _undo_pairs(values: Floats, head_dim: int) -> Floats:
    """GGUF has a head's rotated pairs side by side, the hub half a head apart."""
    pairs = values.reshape(-1, head_dim // 2, 2, values.shape[1])
    return pairs.swapaxes(1, 2).reshape(values.shape)


def _config(source: GgufFile, spec: ModelSpec) -> dict[str, object]:
    attention = spec.attention[0]
    if spec.family != "llama" or spec.qkv_bias or attention.window or attention.rope.scale != 1.0:
        raise SystemExit(f"a model of the family {spec.family}; expected a plain llama")
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "hidden_act": "silu",
        "vocab_size": spec.vocab_size,
        "hidden_size": spec.hidden_size,
        "intermediate_size": spec.intermediate_size,
        "num_hidden_layers": spec.layers,
        "num_attention_heads": attention.heads,
        "num_key_value_heads": attention.kv_heads,
        "head_dim": attention.head_dim,
        "max_position_embeddings": spec.context_tokens,
        "rms_norm_eps": spec.norm_eps,
        "rope_theta": source.metadata["llama.rope.freq_base"],
        "tie_word_embeddings": spec.tied_embeddings,
    }


def write_safetensors(path: Path, tensors: Stored) -> None:
    header: dict[str, object] = {}
    at = 0
    for name, (dtype, values) in tensors.items():
        header[name] = {
            "dtype": dtype,
            "shape": list(values.shape),
            "data_offsets": [at, at + values.nbytes],
        }
        at += values.nbytes
    text = json.dumps(header).encode()
    with path.open("wb") as file:
        file.write(struct.pack("<Q", len(text)) + text)
        for _, values in tensors.values():
            file.write(np.ascontiguousarray(values).tobytes())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("source", type=Path)
    parser.add_argument("folder", type=Path)
    parser.add_argument("copies", nargs="*", default=list(COPIES), metavar="COPY")
    args = parser.parse_args()
    with GgufFile.open(args.source) as source:
        for name in args.copies:
            if name not in COPIES:
                raise SystemExit(f"no copy {name!r}; expected some of {', '.join(COPIES)}")
            print(f"wrote {write_copy(source, args.folder, name)}", flush=True)


if __name__ == "__main__":
    main()
