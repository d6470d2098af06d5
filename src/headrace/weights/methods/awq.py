"""AWQ as AutoAWQ's "gemm" version saves it: 4-bit codes, one scale and zero point per group.

For a module of `in` inputs and `out` outputs, with groups of g inputs:

    qweight  I32 [in, out / 8]       eight outputs per word
    qzeros   I32 [in / g, out / 8]   as qweight
    scales   F16 [in / g, out]

Nibble i of a word, from the lowest, is output (0, 2, 4, 6, 1, 3, 5, 7)[i] of its eight. Knows
nothing of other packings of the same method.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from headrace.models.fields import Fields
from headrace.models.refs import TensorRef
from headrace.weights.dequantize import dequantize_plain
from headrace.weights.methods.quantized import (
    INT4_ZERO,
    Beside,
    CodeKind,
    QuantizedFile,
    QuantizedMatrix,
    QuantizedTensor,
    as_bytes,
    check_divides,
    find_stored,
    has_other_bytes,
    zero_points,
)
from headrace.weights.tensor import Tensor

SCALE_DTYPES = ("F16", "BF16", "F32")
WORD_CODES = 8
_ORDER = (0, 2, 4, 6, 1, 3, 5, 7)


@dataclass(frozen=True, slots=True)
class AwqMethod:
    """Implements `quantized.Method`."""

    group_size: int  # -1: one scale per output channel

    @classmethod
    def from_config(cls, config: Fields) -> AwqMethod:
        if config.integer("bits", default=4) != 4:
            raise config.unsupported("bits", "4")
        if config.text("version", default="gemm").lower() != "gemm":
            raise config.unsupported("version", "gemm")
        return cls(read_group_size(config))

    def plain_names(self, file: QuantizedFile, names: Collection[str]) -> list[str]:
        return plain_packed_names(file, names, ("qzeros", "scales"))

    def find(self, role: str, ref: TensorRef, file: QuantizedFile) -> QuantizedTensor | None:
        module = packed_module(ref, file)
        if module is None:
            return None
        outputs, inputs = ref.shape
        group = inputs if self.group_size == -1 else self.group_size
        check_divides(file, ref, "outputs", outputs, WORD_CODES)
        check_divides(file, ref, "inputs, in groups", inputs, group)
        words, groups = outputs // WORD_CODES, inputs // group
        codes = find_stored(file, f"{module}.qweight", role, ("I32",), [(inputs, words)])
        zeros = find_stored(file, f"{module}.qzeros", role, ("I32",), [(groups, words)])
        scales = find_stored(file, f"{module}.scales", role, SCALE_DTYPES, [(groups, outputs)])

        def decode() -> QuantizedMatrix:
            return QuantizedMatrix(
                kind=CodeKind.INT4,
                codes=_outputs(codes),
                scales=np.ascontiguousarray(dequantize_plain(scales).T),
                zeros=zero_points(_outputs(zeros), INT4_ZERO),
                permutation=None,
                group_rows=1,
                group_columns=group,
            )

        def look() -> Beside:
            return Beside(has_other_bytes(zeros, INT4_ZERO * 0x11), None)

        shape = (outputs, inputs)
        sources = (codes, zeros, scales)
        return QuantizedTensor(ref.name, CodeKind.INT4, shape, sources, 1, group, decode, look)


def _outputs(words: Tensor) -> NDArray[np.uint8]:
    """[n, out / 8] words -> [out, n] codes"""
    count, across = words.shape
    # Transposed while a byte still holds two codes: the rest works along rows.
    packed = np.ascontiguousarray(as_bytes(words).reshape(count, -1).T).reshape(across, -1, count)
    codes = np.empty((across, WORD_CODES, count), np.uint8)
    codes[:, _ORDER[0::2]] = packed & 15
    codes[:, _ORDER[1::2]] = packed >> 4
    return codes.reshape(-1, count)


def read_group_size(config: Fields) -> int:
    size = config.integer("group_size", low=-1, high=1 << 20)
    if size == 0:
        raise config.malformed("group_size", "-1, or the number of inputs per scale")
    return size


def packed_module(ref: TensorRef, file: QuantizedFile) -> str | None:
    """The module whose matrix is packed, or None if it is stored in float (or is a vector)."""
    module, _, last = ref.name.rpartition(".")
    is_packed = last == "weight" and len(ref.shape) == 2 and f"{module}.qweight" in file.codes
    return module if is_packed and ref.name not in file.tensors else None


def plain_packed_names(
    file: QuantizedFile, names: Collection[str], beside: Collection[str]
) -> list[str]:
    """Names with each "x.qweight" as "x.weight", and without the tensors `beside` it. Biases of
    zeros, which some tools write for every module, are left out too."""
    packed = {name.rpartition(".")[0] for name in names if name.endswith(".qweight")}
    plain: list[str] = []
    for name in names:
        module, _, last = name.rpartition(".")
        if module not in packed:
            plain.append(name)
        elif last == "qweight":
            plain.append(f"{module}.weight")
        elif last not in beside and not (last == "bias" and _is_zero(file, name)):
            plain.append(name)
    return plain


def _is_zero(file: QuantizedFile, name: str) -> bool:
    return name in file.tensors and not dequantize_plain(file.tensors[name]).any()
