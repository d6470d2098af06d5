"""Weights as found in a file, to matrices and vectors on the device.

Floats stay what they are, in the activations' type, or are quantized on the way; quantized
checkpoints keep their codes. One weight is on the host at a time. Knows formats; not what a weight
is for, beyond its role's name.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import torch

from headrace.backends.cuda.matrix import (
    Format,
    Matrix,
    dense_matrix,
    quantize_matrix,
)
from headrace.backends.cuda.program import Prepared, Table
from headrace.models.decoder import DecoderWeights
from headrace.weights.dequantize import dequantize
from headrace.weights.tensor import Tensor
from headrace.weights.weight import Weight

_DTYPES = {"F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}
VECTORS = frozenset(
    ("attn_norm", "mlp_norm", "q_norm", "k_norm", "attn_post_norm", "mlp_post_norm", "final_norm")
)
# Of the layers alone: embedding and output layer stay as they are, as models that come quantized
# keep them.
QUANTIZED_ROLES = frozenset(("qkv", "attn_out", "gate_up", "down"))
FORMATS = {"fp8": Format.FP8, "int8": Format.INT8, "int4": Format.INT4}
INT4_GROUP = 128


class Loader:
    def __init__(
        self,
        device: torch.device,
        dtype: torch.dtype,
        quantization: str = "none",
        release: Callable[[Tensor], None] | None = None,
    ) -> None:
        self._device, self._dtype = device, dtype
        self._quantization = quantization
        self._release = release or (lambda tensor: None)

    def load(self, weights: DecoderWeights[Weight]) -> DecoderWeights[Prepared]:
        tied = weights.head.parts == weights.embed.parts
        table = Table(self._values(weights.embed).to(self._dtype))

        def change(role: str, weight: Weight) -> Prepared:
            if role == "embed":
                return table
            if role in VECTORS:
                return self._values(weight).float().reshape(-1) + weight.offset
            if role == "head" and tied:
                return dense_matrix(table.data, self._device, self._dtype)
            return self._matrix(role, weight)

        return weights.map(change)

    def _matrix(self, role: str, weight: Weight) -> Matrix:
        values = self._values(weight)
        bias = None
        if weight.bias:
            bias = torch.cat([self._part(part).float().reshape(-1) for part in weight.bias])
        gated = role == "gate_up"
        if self._quantization == "none" or role not in QUANTIZED_ROLES:
            return dense_matrix(values, self._device, self._dtype, bias=bias, gated=gated)
        return quantize_matrix(
            values,
            self._device,
            FORMATS[self._quantization],
            group=int4_group(values.shape[1]),
            bias=bias,
            gated=gated,
        )

    def _values(self, weight: Weight) -> torch.Tensor:
        parts = [self._part(part) for part in weight.parts]
        return parts[0] if len(parts) == 1 else torch.cat(parts)

    def _part(self, part: Tensor) -> torch.Tensor:
        dtype = _DTYPES.get(part.format.name)
        if dtype is None:
            values = torch.from_numpy(dequantize(part)).to(self._device)
        else:
            # A copy: torch wants memory that may be written to.
            raw = torch.from_numpy(np.frombuffer(part.data, np.uint8).copy())
            values = raw.to(self._device).view(dtype).reshape(part.shape)
        self._release(part)
        return values


def int4_group(columns: int) -> int:
    """The largest that divides them: some models' inputs are no multiple of 128."""
    return next((group for group in (128, 64, 32) if columns % group == 0), 128)


def prepared_bytes(weights: DecoderWeights[Prepared]) -> int:
    """On the device; a tensor that two weights share counts once."""
    held: dict[int, int] = {}

    def keep(tensor: torch.Tensor | None) -> None:
        if tensor is not None:
            held[tensor.data_ptr()] = tensor.nbytes

    def look(role: str, weight: Prepared) -> None:
        if isinstance(weight, torch.Tensor):
            keep(weight)
        elif isinstance(weight, Table):
            keep(weight.data)
        else:
            for tensor in (weight.data, weight.scales, weight.zeros, weight.bias):
                keep(tensor)
            keep(weight.permutation)

    weights.map(look)
    return sum(held.values())
