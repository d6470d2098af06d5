"""Loads weights from a file into matrices and vectors on the device.

Float weights are converted to the activations' type, or quantized on the way; quantized checkpoints
keep their codes. Only one weight is in host memory at a time. Knows formats; not what a weight is
for, except for the name of its role.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
import torch

from headrace.backends.cuda.products.matrix import (
    SMALL_FP8_GROUP,
    Matrix,
    MatrixFormat,
    dense_matrix,
    fp8_matrix,
    int4_matrix,
    int8_matrix,
    is_small,
    quantize_matrix,
)
from headrace.backends.cuda.products.rounding import FP8_BLOCK
from headrace.backends.cuda.program import Prepared, Table
from headrace.models.decoder import DecoderWeights
from headrace.weights.dequantize import dequantize
from headrace.weights.dummy import DummyTensor
from headrace.weights.methods.quantized import Beside, CodeKind, QuantizedTensor
from headrace.weights.tensor import Tensor
from headrace.weights.weight import Part, Weight

FLOATS = {"F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}
VECTORS = frozenset(
    ("attn_norm", "mlp_norm", "q_norm", "k_norm", "attn_post_norm", "mlp_post_norm", "final_norm")
)
# Only the layers' weights: embedding and output layer are not quantized, as in most quantized
# checkpoints.
QUANTIZED_ROLES = frozenset(("qkv", "attn_out", "gate_up", "down"))
FORMATS = {"fp8": MatrixFormat.FP8, "int8": MatrixFormat.INT8, "int4": MatrixFormat.INT4}


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


def kept_format(weight: Weight) -> MatrixFormat | None:
    """The format of a quantized checkpoint's matrix that keeps its codes; None if it has no codes,
    if its parts do not match, or if no kernel can read its layout: then it is dequantized. Decided
    before the codes are read, so that memory can be predicted."""
    parts = [part for part in weight.parts if isinstance(part, QuantizedTensor)]
    if len(parts) < len(weight.parts):
        return None
    first = parts[0]
    size, kind = (first.group_rows, first.group_columns), first.kind
    if any((p.group_rows, p.group_columns) != size or p.kind is not kind for p in parts):
        return None
    whole = size[0] == 1 and size[1] >= weight.columns
    blocks = size == (FP8_BLOCK, FP8_BLOCK)
    aligned = all(part.shape[0] % FP8_BLOCK == 0 for part in parts[:-1])
    if kind is CodeKind.INT4 and not (size[0] == 1 and size[1] % 32 == 0):
        return None
    if kind is CodeKind.INT8 and not whole:
        return None
    if kind is CodeKind.FP8 and not (whole or (blocks and aligned)):
        return None
    beside = [part.look() for part in parts]
    if not _agree(beside):
        return None
    if kind is CodeKind.INT4:
        return MatrixFormat.INT4
    if beside[0].has_zeros or beside[0].permutation is not None:
        return None
    if kind is CodeKind.INT8:
        return MatrixFormat.INT8
    return MatrixFormat.FP8 if whole else MatrixFormat.FP8_BLOCK


def made_format(
    role: str, weight: Weight, quantization: str, last: bool
) -> tuple[MatrixFormat, int] | None:
    """The format that a float weight is quantized to, and how many columns share a scale (0: one
    scale per output channel); None: it stays dense. `last`: it is the last matrix of the layers."""
    if quantization == "none" or role not in QUANTIZED_ROLES:
        return None
    format = FORMATS[quantization]
    if format is MatrixFormat.FP8 and is_small(weight.rows, weight.columns):
        # No later layer corrects the last product's error: with FP8 it would cause a sixth of the
        # default model's loss of quality, for one of its 120 matrices.
        return None if last else (MatrixFormat.FP8_BLOCK, SMALL_FP8_GROUP)
    return format, int4_group(weight.columns) if format is MatrixFormat.INT4 else 0


def _agree(parts: Sequence[Beside]) -> bool:
    """Whether all or none have zero points, and all have the same order of inputs."""
    first = parts[0]
    if any(part.has_zeros != first.has_zeros for part in parts):
        return False
    if first.permutation is None:
        return all(part.permutation is None for part in parts)
    return all(
        part.permutation is not None and np.array_equal(part.permutation, first.permutation)
        for part in parts
    )


def int4_group(columns: int) -> int:
    """The largest group size that divides the columns: some models' inputs are not a multiple of
    128."""
    return next((group for group in (128, 64, 32) if columns % group == 0), 128)


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
