"""A quantized matrix of a hub checkpoint: what its codes mean, independent of the method.

awq.py, gptq.py and fp8.py know how each method lays its tensors out, and return this one form.
No arithmetic on activations here, and no packing for a device: backends do that.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from headrace.core.errors import UnsupportedModelError, WeightsError
from headrace.models.refs import TensorRef
from headrace.weights.files.mapped import DAMAGED, shown
from headrace.weights.tensor import Tensor, TensorFormat

Floats = NDArray[np.float32]
Codes = NDArray[np.uint8] | NDArray[np.int8]

OTHER_MODEL = "Weights and configuration belong to different models: fetch them together."
ANOTHER_COPY = "Use another copy of the model: in BF16 or F16, or quantized in another way."


INT4_ZERO = 8


class CodeKind(StrEnum):
    INT4 = "INT4"  # codes 0 to 15, uint8; without zero points, 8 is zero
    INT8 = "INT8"  # codes -128 to 127, int8; without zero points, 0 is zero
    FP8 = "FP8"  # the bits of a float8_e4m3fn, uint8; never zero points


QUANTIZED_FORMATS = {
    CodeKind.INT4: TensorFormat("INT4", 2, 1),
    CodeKind.INT8: TensorFormat("INT8", 1, 1),
    CodeKind.FP8: TensorFormat("FP8", 1, 1),
}


@dataclass(frozen=True, slots=True, eq=False)
class QuantizedMatrix:
    """A matrix [out, in], unpacked. Its value at output o and input `permutation[k]` is

        (codes[o, k] - zeros[o // group_rows, k // group_columns]) * scales[the same]

    with codes as numbers (FP8: the floats with these bits). `permutation` None: input k.
    `zeros` None: symmetric, with the kind's own zero.
    A product may gather its input rows by the permutation once: x[:, permutation] @ values.T.
    """

    kind: CodeKind
    codes: Codes  # [out, in]
    scales: Floats  # [ceil(out / group_rows), ceil(in / group_columns)]
    zeros: Codes | None  # shaped as scales, of the codes' type
    permutation: NDArray[np.int32] | None  # [in], each input once
    group_rows: int  # 1, except for block scales
    group_columns: int  # the number of inputs for per-channel scales


@dataclass(frozen=True, slots=True, eq=False)
class Beside:
    """What decides which kernels can read the codes, found without reading the codes."""

    has_zeros: bool  # whether `unpack` returns zero points
    permutation: NDArray[np.int32] | None


@dataclass(frozen=True, slots=True, eq=False)
class QuantizedTensor:
    """A part of a Weight in place of a Tensor. Its sources were checked, but not read."""

    name: str  # as in an unquantized checkpoint: "….weight"
    kind: CodeKind
    shape: tuple[int, int]  # [out, in]
    sources: tuple[Tensor, ...]  # the tensors of the file, to release or to count them
    group_rows: int  # as in the result of `unpack`
    group_columns: int
    decode: Callable[[], QuantizedMatrix]
    look: Callable[[], Beside]

    @property
    def format(self) -> TensorFormat:
        return QUANTIZED_FORMATS[self.kind]

    @property
    def values(self) -> int:
        return self.shape[0] * self.shape[1]

    def unpack(self) -> QuantizedMatrix:
        """Read the codes. Raises an error if they are inconsistent (an input in a group that does
        not exist)."""
        return self.decode()


class QuantizedFile(Protocol):
    """The part of an open folder that a method uses."""

    @property
    def path(self) -> Path: ...

    @property
    def tensors(self) -> Mapping[str, Tensor]: ...

    @property
    def codes(self) -> Mapping[str, Tensor]: ...


class Method(Protocol):
    """A quantization method with the parameters from a checkpoint's config. The tensors that exist
    show which modules are quantized, so lists of exceptions are not needed."""

    def plain_names(self, file: QuantizedFile, names: Collection[str]) -> list[str]:
        """The names that an unquantized copy of this checkpoint would have."""
        ...

    def find(self, role: str, ref: TensorRef, file: QuantizedFile) -> QuantizedTensor | None:
        """The matrix that `ref` names, or None if this checkpoint stores it in float."""
        ...


def value_rows(matrix: QuantizedMatrix, first: int, end: int) -> Floats:
    """The values of some outputs in float32, with inputs in their original order: exact except for
    one rounding, of the product of a code and a float32 scale."""
    groups = np.arange(first, end) // matrix.group_rows
    columns = np.arange(matrix.codes.shape[1]) // matrix.group_columns
    codes = matrix.codes[first:end]
    found = E4M3[codes] if matrix.kind is CodeKind.FP8 else codes.astype(np.float32)
    if matrix.zeros is not None:
        found -= matrix.zeros[groups][:, columns]
    elif matrix.kind is CodeKind.INT4:
        found -= np.float32(INT4_ZERO)
    found *= matrix.scales[groups][:, columns]
    if matrix.permutation is None:
        return found
    values = np.empty_like(found)
    values[:, matrix.permutation] = found
    return values


def zero_points(zeros: Codes, symmetric: int) -> Codes | None:
    """None if all of them are the kind's own zero."""
    return None if (zeros == symmetric).all() else zeros.copy(order="C")


def has_other_bytes(tensor: Tensor, byte: int) -> bool:
    return bool((np.frombuffer(tensor.data, np.uint8) != byte).any())


def _e4m3_values() -> Floats:
    """Sign, four bits of exponent (bias 7), three of mantissa; no infinities, 0x7f and 0xff are
    NaN."""
    bits = np.arange(256)
    exponent, mantissa = bits >> 3 & 15, bits & 7
    normal = np.ldexp(1 + mantissa / 8, exponent - 7)
    values = np.where(exponent == 0, np.ldexp(mantissa / 8, -6), normal)
    values[bits & 127 == 127] = np.nan
    return np.where(bits & 128, -values, values).astype(np.float32)


E4M3 = _e4m3_values()


def find_stored(
    file: QuantizedFile,
    name: str,
    role: str,
    dtypes: Collection[str],
    shapes: Sequence[tuple[int, ...]],
) -> Tensor:
    """A tensor that belongs to a quantized matrix, of one of these dtypes and shapes."""
    tensor = file.codes.get(name) or file.tensors.get(name)
    where = f"{file.path}: tensor {shown(name)} ({role})"
    if tensor is None:
        raise WeightsError(
            f"{where}: missing, or of an unsupported type; expected {' or '.join(dtypes)}.",
            "The file lacks part of a quantized matrix: fetch it again.",
        )
    if tensor.format.name not in dtypes:
        raise WeightsError(
            f"{where}: type: found {tensor.format.name}; expected {' or '.join(dtypes)}.", DAMAGED
        )
    if tensor.shape not in shapes:
        expected = " or ".join(str(list(shape)) for shape in shapes)
        raise WeightsError(
            f"{where}: shape: found {list(tensor.shape)}; expected {expected}.", OTHER_MODEL
        )
    return tensor


def check_divides(file: QuantizedFile, ref: TensorRef, what: str, size: int, by: int) -> None:
    """Refuse a matrix whose size is not a multiple of the word or group size."""
    if size % by:
        raise UnsupportedModelError(
            f"{file.path}: tensor {shown(ref.name)}: {what}: found {size}; expected a "
            f"multiple of {by}.",
            ANOTHER_COPY,
        )


def as_bytes(tensor: Tensor) -> NDArray[np.uint8]:
    """The bytes of a tensor of words, with the bytes of a word along a new last axis."""
    raw = np.frombuffer(tensor.data, np.uint8)
    return raw.reshape(*tensor.shape, tensor.format.block_bytes)


def nibbles(words: NDArray[np.uint8]) -> NDArray[np.uint8]:
    """The halves of bytes, low before high: [..., k] -> [..., 2k]"""
    halves = np.stack([words & 15, words >> 4], axis=-1)
    return halves.reshape(*words.shape[:-1], 2 * words.shape[-1])
