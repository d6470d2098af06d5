"""Loads weights from a file into matrices and vectors on the device.

Float weights are converted to the activations' type, or quantized on the way; quantized checkpoints
keep their codes. Only one weight is in host memory at a time. Knows formats; not what a weight is
for, except for the name of its role.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import torch

from headrace.backends.cuda.products.formats import VECTORS, MatrixFormat, kept_format, made_format
from headrace.backends.cuda.products.matrix import (
    Matrix,
    dense_matrix,
    fp8_matrix,
    int4_matrix,
    int8_matrix,
    quantize_matrix,
)
from headrace.backends.cuda.program import Prepared, Table
from headrace.models.decoder import DecoderWeights
from headrace.weights.dequantize import dequantize
from headrace.weights.dummy import DummyTensor
from headrace.weights.methods.quantized import QuantizedTensor
from headrace.weights.tensor import Tensor
from headrace.weights.weight import Part, Weight, are_tied

FLOATS = {"F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}


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
        table = None
        if weights.embed is not None:
            table = Table(self._values(weights.embed).to(self._dtype))
        tied = table if are_tied(weights.embed, weights.head) else None

        def change(role: str, weight: Weight) -> Prepared:
            if role == "embed" and table is not None:
                return table
            if role in VECTORS:
                return self._values(weight).float().reshape(-1) + weight.offset
            if role == "head" and tied is not None:
                return dense_matrix(tied.data, self._device, self._dtype)
            return self._matrix(role, weight, last=weight is weights.layers[-1].down)

        return weights.map(change)

    def _matrix(self, role: str, weight: Weight, last: bool) -> Matrix:
        bias = None
        if weight.bias:
            bias = torch.cat([self._part(part).float().reshape(-1) for part in weight.bias])
        gated = role == "gate_up"
        kept = self._keep_codes(weight, bias, gated)
        if kept is not None:
            return kept
        values = self._values(weight)
        made = made_format(role, weight, self._quantization, last)
        if made is None:
            return dense_matrix(values, self._device, self._dtype, bias=bias, gated=gated)
        format, group = made
        return quantize_matrix(values, self._device, format, group=group, bias=bias, gated=gated)

    def _keep_codes(self, weight: Weight, bias: torch.Tensor | None, gated: bool) -> Matrix | None:
        """A quantized checkpoint's matrix with its own codes; None if `kept_format` is None."""
        format = kept_format(weight)
        if format is None:
            return None
        sources = [part for part in weight.parts if isinstance(part, QuantizedTensor)]
        parts = [part.unpack() for part in sources]
        codes = np.concatenate([part.codes for part in parts])
        scales = np.concatenate([part.scales for part in parts])
        for part in sources:
            self._let_go(part)
        if format is MatrixFormat.INT4:
            zeros = [part.zeros for part in parts if part.zeros is not None]
            return int4_matrix(
                codes,
                scales,
                self._device,
                zeros=np.concatenate(zeros) if zeros else None,
                permutation=parts[0].permutation,
                bias=bias,
                gated=gated,
            )
        make = int8_matrix if format is MatrixFormat.INT8 else fp8_matrix
        return make(codes, scales, self._device, bias=bias, gated=gated)

    def _values(self, weight: Weight) -> torch.Tensor:
        parts = [self._part(part) for part in weight.parts]
        return parts[0] if len(parts) == 1 else torch.cat(parts)

    def _part(self, part: Part) -> torch.Tensor:
        if isinstance(part, DummyTensor):
            return self._noise(part)
        dtype = FLOATS.get(part.format.name)
        if dtype is None or not isinstance(part, Tensor):
            values = torch.from_numpy(dequantize(part))
        else:
            # A copy: torch needs writable memory.
            raw = torch.from_numpy(np.frombuffer(part.data, np.uint8).copy())
            values = raw.view(dtype).reshape(part.shape)
        self._let_go(part)
        return values.to(self._device)

    def _let_go(self, part: Tensor | QuantizedTensor) -> None:
        """Release the file's bytes once they have been read."""
        for source in part.sources if isinstance(part, QuantizedTensor) else (part,):
            self._release(source)

    def _noise(self, part: DummyTensor) -> torch.Tensor:
        """Random values, generated on the device: nothing is copied from the host."""
        values = torch.empty(part.shape, dtype=self._dtype, device=self._device)
        if part.std == 0.0:
            return values.fill_(part.mean)
        generator = torch.Generator(self._device).manual_seed(part.seed)
        return values.normal_(part.mean, part.std, generator=generator)


def prepared_bytes(weights: DecoderWeights[Prepared]) -> int:
    """Bytes on the device; a tensor that two weights share counts once."""
    held: dict[int, int] = {}

    def keep(tensor: torch.Tensor | None) -> None:
        if tensor is not None:
            held[id(tensor)] = tensor.nbytes

    def look(role: str, weight: Prepared) -> None:
        if isinstance(weight, torch.Tensor):
            keep(weight)
        elif isinstance(weight, Table):
            keep(weight.data)
        else:
            for tensor in (weight.data, weight.scales, weight.factors, weight.bias):
                keep(tensor)
            keep(weight.permutation)

    weights.map(look)
    return sum(held.values())
