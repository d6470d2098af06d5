"""Tiny quantized checkpoints, packed here from the formats' definitions, code by code.

Written the other way round than the readers: words are built with shifts from values that are
known, so that a reader's order of bits, words and groups is checked and not repeated.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray
from safetensors.torch import save_file

from headrace.models.decoder import DecoderWeights
from headrace.models.refs import WeightRef
from headrace.models.registry import describe_config
from headrace.weights.dequantize import dequantize
from headrace.weights.describe import describe_file
from headrace.weights.load import find_weights, open_weights
from headrace.weights.methods.quantized import QuantizedTensor
from headrace.weights.weight import Weight

CONFIG: dict[str, object] = {
    "model_type": "llama",
    "architectures": ["LlamaForCausalLM"],
    "vocab_size": 48,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
    "rms_norm_eps": 1e-5,
}
AWQ_ORDER = (0, 2, 4, 6, 1, 3, 5, 7)
Ints = NDArray[np.int64]
Truth = NDArray[np.float32]


@dataclass
class Packed:
    """A module's tensors by the last part of their names, and the values that they stand for."""

    tensors: dict[str, torch.Tensor]
    truth: Truth  # [out, in]


@dataclass
class Checkpoint:
    tensors: dict[str, torch.Tensor] = field(default_factory=dict)
    truth: dict[str, Truth] = field(default_factory=dict)  # by plain name

    def save(self, folder: Path, quantization: dict[str, object]) -> None:
        config = {**CONFIG, "quantization_config": quantization}
        (folder / "config.json").write_text(json.dumps(config))
        save_file(self.tensors, folder / "model.safetensors")


def refs() -> DecoderWeights[WeightRef]:
    return describe_config(CONFIG, [])[1]


def checkpoint(pack: Callable[[int, int], Packed], keep: tuple[str, ...] = ()) -> Checkpoint:
    """All modules of the tiny model, its linear ones through `pack(outputs, inputs)`, but for
    those whose names hold one of `keep`, the embedding and the output layer."""
    made = Checkpoint()
    generator = torch.Generator().manual_seed(3)

    def add(role: str, ref: WeightRef) -> None:
        for part in ref.parts:
            module = part.name.removesuffix(".weight")
            if len(part.shape) == 1 or role in ("embed", "head") or any(k in module for k in keep):
                value = torch.randn(part.shape, generator=generator).to(torch.bfloat16)
                made.tensors[part.name] = value
                made.truth[part.name] = value.float().numpy()
                continue
            packed = pack(*part.shape)
            made.tensors.update({f"{module}.{k}": v for k, v in packed.tensors.items()})
            made.truth[part.name] = packed.truth

    refs().map(add)
    return made


def words(codes: Ints, bits: int) -> torch.Tensor:
    """[n, codes of a word] -> [n] 32-bit words, the first code lowest"""
    total = np.zeros(len(codes), np.uint64)
    for i in range(codes.shape[1]):
        total |= codes[:, i].astype(np.uint64) << np.uint64(bits * i)
    return torch.from_numpy(total.astype(np.uint32).view(np.int32).copy())


def half(rng: np.random.Generator, *shape: int) -> NDArray[np.float16]:
    return (rng.uniform(0.001, 0.02, shape)).astype(np.float16)


def pack_awq(rng: np.random.Generator, outputs: int, inputs: int, group: int) -> Packed:
    codes = rng.integers(0, 16, (inputs, outputs))
    zeros = rng.integers(0, 16, (inputs // group, outputs))
    scales = half(rng, inputs // group, outputs)

    def pack(values: Ints) -> torch.Tensor:
        by_word = values.reshape(-1, 8)[:, AWQ_ORDER]  # nibble i holds output order[i]
        return words(by_word, 4).reshape(len(values), -1)

    truth = np.empty((outputs, inputs), np.float32)
    for k in range(inputs):
        g = k // group
        truth[:, k] = (codes[k] - zeros[g]).astype(np.float32) * scales[g].astype(np.float32)
    tensors = {
        "qweight": pack(codes),
        "qzeros": pack(zeros),
        "scales": torch.from_numpy(scales),
    }
    return Packed(tensors, truth)


def pack_gptq(
    rng: np.random.Generator,
    outputs: int,
    inputs: int,
    group: int,
    *,
    bits: int = 4,
    act_order: bool = False,
    order_seed: int | None = None,  # the same for matrices that share an order
    symmetric: bool = False,
    less_one: bool = True,
) -> Packed:
    top = 1 << bits
    codes = rng.integers(0, top, (inputs, outputs))
    zeros = rng.integers(0, top, (inputs // group, outputs))
    if symmetric:
        zeros[:] = top // 2
    scales = half(rng, inputs // group, outputs) / np.float16(top / 16)
    owners = np.arange(inputs) // group
    if act_order:
        chooser = rng if order_seed is None else np.random.default_rng(order_seed)
        owners = chooser.permutation(owners)
    n = 32 // bits
    stored = (zeros - 1) % top if less_one else zeros
    qweight = [words(codes[at : at + n].T, bits) for at in range(0, inputs, n)]
    truth = np.empty((outputs, inputs), np.float32)
    for k in range(inputs):
        g = owners[k]
        truth[:, k] = (codes[k] - zeros[g]).astype(np.float32) * scales[g].astype(np.float32)
    tensors = {
        "qweight": torch.stack(qweight),
        "qzeros": words(stored.reshape(-1, n), bits).reshape(len(zeros), -1),
        "scales": torch.from_numpy(scales),
        "g_idx": torch.from_numpy(owners.astype(np.int32)),
    }
    return Packed(tensors, truth)


def check_all(folder: Path, truth: dict[str, Truth]) -> list[str]:
    """Every part of every weight is exactly the truth; the names of the quantized ones."""
    quantized: list[str] = []
    with open_weights(folder) as file:
        _, refs = describe_file(file)

        def check(_role: str, weight: Weight) -> None:
            for part in weight.parts:
                assert np.array_equal(dequantize(part), truth[part.name]), part.name
                if isinstance(part, QuantizedTensor):
                    quantized.append(part.name)
                    matrix = part.unpack()
                    groups = (matrix.group_rows, matrix.group_columns)
                    assert (part.group_rows, part.group_columns) == groups
                    rows, columns = -(-part.shape[0] // groups[0]), -(-part.shape[1] // groups[1])
                    assert matrix.scales.shape == (rows, columns)

        find_weights(refs, file).map(check)
    return quantized


def load(folder: Path) -> DecoderWeights[Weight]:
    with open_weights(folder) as file:
        _, refs = describe_file(file)
        weights = find_weights(refs, file)
        weights.map(lambda _, weight: [dequantize(part) for part in weight.parts])
        return weights


def pack_eight_bit(
    rng: np.random.Generator,
    outputs: int,
    inputs: int,
    *,
    dtype: str = "fp8",
    scale: str = "weight_scale",
    shape: tuple[int, ...] = (),
    block: tuple[int, int] | None = None,  # what a scale is for; None: an output or a tensor
    zero_point: bool = False,
    scale_dtype: torch.dtype = torch.float32,
) -> Packed:
    """Codes by torch's own rounding, values by its own conversion."""
    raw = torch.from_numpy(rng.standard_normal((outputs, inputs)).astype(np.float32))
    # Of what is beyond the largest code torch 2.11 makes NaN, 2.13 that code.
    fp8 = raw.mul(100).clamp(-448, 448).to(torch.float8_e4m3fn)
    codes = fp8 if dtype == "fp8" else raw.mul(30).to(torch.int8)
    factors = torch.from_numpy(rng.uniform(1e-4, 3e-4, shape).astype(np.float32)).to(scale_dtype)
    full = factors.float()
    rows, columns = block or (1 if full.numel() == outputs else outputs, inputs)
    full = full.reshape(-(-outputs // rows), -(-inputs // columns))
    full = full.repeat_interleave(rows, 0)[:outputs].repeat_interleave(columns, 1)[:, :inputs]
    tensors = {"weight": codes, scale: factors}
    values = codes.float()
    if zero_point:
        points = torch.from_numpy(rng.integers(-128, 128, shape).astype(np.int8))
        tensors["weight_zero_point"] = points
        values = values - points.float().reshape(-1, 1)
    return Packed(tensors, (values * full).numpy())
