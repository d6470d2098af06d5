"""8-bit weights: float8 (e4m3) or int8 codes, with one scale per tensor, output channel, block or
group. As DeepSeek, Qwen, AutoFP8, FBGEMM and compressed-tensors save them:

    weight                            F8_E4M3 or I8 [out, in]
    weight_scale or weight_scale_inv  [], [1], [1, 1], [out], [out, 1], [out / b, in / c] rounded up
    weight_zero_point                 I8, shaped as the scale (asymmetric int8)

Values are multiplied by either scale, despite the "inv". Stored scales for activations and for keys
and values are not used: Headrace computes them from the values.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass
from typing import TypeVar

import numpy as np
from numpy.typing import NDArray

from headrace.models.fields import Fields
from headrace.models.refs import TensorRef
from headrace.weights.dequantize import dequantize_plain
from headrace.weights.methods.quantized import (
    Beside,
    CodeKind,
    QuantizedFile,
    QuantizedMatrix,
    QuantizedTensor,
    find_stored,
    has_other_bytes,
    zero_points,
)
from headrace.weights.tensor import Tensor

_SCALES = ("weight_scale", "weight_scale_inv")
_SCALE_DTYPES = ("F32", "BF16", "F16")
_KINDS = {"F8_E4M3": CodeKind.FP8, "I8": CodeKind.INT8}
_ZERO_POINT = "weight_zero_point"
_UNUSED = frozenset(
    ("input_scale", "activation_scale", "input_scale_ub", "input_zero_point", "output_scale",
     "k_scale", "v_scale", "q_scale", "kv_scale", "activation_scale_inv")
)  # fmt: skip
_COMPRESSED = ("float-quantized", "int-quantized", "naive-quantized")
_MAX_BLOCK = 1 << 20

T = TypeVar("T", bound=np.generic)
Block = tuple[int, int]  # (outputs, inputs) that share a scale


@dataclass(frozen=True, slots=True)
class EightBitMethod:
    """Implements `quantized.Method`. A scale's shape tells what it applies to; `blocks` are the
    block shapes that the config allows besides one scale per tensor and one per output channel."""

    blocks: frozenset[Block] = frozenset()

    @classmethod
    def from_config(cls, config: Fields) -> EightBitMethod:
        """quant_method fp8 and fbgemm_fp8."""
        if config.text("fmt", default="e4m3") not in ("e4m3", "float8_e4m3fn"):
            raise config.unsupported("fmt", "e4m3")
        if not config.has("weight_block_size"):
            return cls()
        return cls(frozenset((_block(config, "weight_block_size"),)))

    @classmethod
    def from_compressed(cls, config: Fields) -> EightBitMethod:
        """quant_method compressed-tensors, in its formats with one code per byte."""
        _refuse_compressed(config)
        groups = config.section("config_groups")
        if groups is None:
            raise config.malformed("config_groups", "an object of groups")
        blocks: set[Block] = set()
        for name in groups.names():
            group = groups.section(name)
            weights = None if group is None else group.section("weights")
            if weights is None or group is None:
                raise groups.malformed(name, "a group with weights")
            if group.has("format") and group.text("format") not in _COMPRESSED:
                raise group.unsupported("format", ", ".join(_COMPRESSED))
            if weights.integer("num_bits") != 8:
                raise weights.unsupported("num_bits", "8 in this format")
            strategy = weights.text("strategy", default="tensor")
            if strategy == "block":
                blocks.add(_block(weights, "block_structure"))
            elif strategy == "group":
                blocks.add((1, weights.integer("group_size", high=_MAX_BLOCK)))
            elif strategy not in ("tensor", "channel"):
                raise weights.unsupported("strategy", "tensor, channel, block and group")
        return cls(frozenset(blocks))

    def plain_names(self, file: QuantizedFile, names: Collection[str]) -> list[str]:
        plain: list[str] = []
        for name in names:
            module, _, last = name.rpartition(".")
            is_beside = last in (*_SCALES, _ZERO_POINT) and f"{module}.weight" not in file.tensors
            if last not in _UNUSED and not is_beside:
                plain.append(name)
        return plain

    def find(self, role: str, ref: TensorRef, file: QuantizedFile) -> QuantizedTensor | None:
        stored = file.codes.get(ref.name)
        if stored is None or len(ref.shape) != 2 or stored.format.name not in _KINDS:
            return None
        codes = find_stored(file, ref.name, role, _KINDS, [ref.shape])
        kind = _KINDS[codes.format.name]
        shapes = self._scale_shapes(*ref.shape)
        module = ref.name.rpartition(".")[0]
        name = next((n for n in _SCALES if f"{module}.{n}" in file.tensors), _SCALES[0])
        scale = find_stored(file, f"{module}.{name}", role, _SCALE_DTYPES, list(shapes))
        point: Tensor | None = None
        if kind is CodeKind.INT8 and f"{module}.{_ZERO_POINT}" in file.codes:
            point = find_stored(file, f"{module}.{_ZERO_POINT}", role, ("I8",), [scale.shape])

        outputs, inputs = ref.shape
        rows, columns = shapes[scale.shape]
        # One scale per tensor is repeated for each output, so that readers need no extra case.
        group_rows, group_columns = 1 if rows >= outputs else rows, min(columns, inputs)

        def decode() -> QuantizedMatrix:
            zeros = None
            if point is not None:
                points = np.frombuffer(point.data, np.int8)
                zeros = zero_points(_spread(points, outputs, rows), 0)
            values = np.frombuffer(codes.data, np.uint8).reshape(outputs, inputs)
            return QuantizedMatrix(
                kind=kind,
                codes=values if kind is CodeKind.FP8 else values.view(np.int8),
                scales=_spread(dequantize_plain(scale), outputs, rows),
                zeros=zeros,
                permutation=None,
                group_rows=group_rows,
                group_columns=group_columns,
            )

        def look() -> Beside:
            return Beside(point is not None and has_other_bytes(point, 0), None)

        sources = (codes, scale) if point is None else (codes, scale, point)
        return QuantizedTensor(
            ref.name, kind, (outputs, inputs), sources, group_rows, group_columns, decode, look
        )

    def _scale_shapes(self, outputs: int, inputs: int) -> dict[tuple[int, ...], Block]:
        """Each shape that a scale may have, and the (outputs, inputs) that share one value. If two
        kinds have the same shape, the config's own comes first."""
        shapes: dict[tuple[int, ...], Block] = {
            (-(-outputs // rows), -(-inputs // columns)): (rows, columns)
            for rows, columns in sorted(self.blocks)
        }
        an_output: Block = (1, inputs)
        a_tensor: Block = (outputs, inputs)
        shapes = {(outputs, 1): an_output, (outputs,): an_output} | shapes
        return {(): a_tensor, (1,): a_tensor, (1, 1): a_tensor} | shapes


def _spread(values: NDArray[T], outputs: int, rows: int) -> NDArray[T]:
    """[groups of outputs, groups of inputs]. A single group of outputs is repeated per output."""
    if rows < outputs:
        return values.reshape(-(-outputs // rows), -1)
    return np.repeat(values.reshape(1, -1), outputs, axis=0)


def _block(config: Fields, name: str) -> Block:
    sizes = config.integers(name)
    if len(sizes) != 2 or not all(1 <= size <= _MAX_BLOCK for size in sizes):
        raise config.malformed(name, "the numbers of outputs and inputs per scale")
    return sizes[0], sizes[1]


def _refuse_compressed(config: Fields) -> None:
    """Refuses options of a checkpoint that would change the meaning of its codes."""
    if config.text("format") not in _COMPRESSED:
        raise config.unsupported("format", ", ".join(_COMPRESSED))
    sparsity = config.section("sparsity_config")
    if sparsity is not None and sparsity.text("format", default="dense") != "dense":
        raise sparsity.unsupported("format", "dense")
    if config.section("transform_config") is not None:
        raise config.unsupported("transform_config", "none")
