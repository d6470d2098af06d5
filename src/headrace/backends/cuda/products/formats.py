"""The formats of matrices on the device, which one a weight gets, and how much memory it takes.

Decided from shapes and from the small tensors beside a quantized checkpoint's codes, before any
weight is read, so that memory can be predicted without a GPU and without torch. Knows no kernel:
matrix.py makes the matrices.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum

import numpy as np

from headrace.weights.methods.quantized import Beside, CodeKind, QuantizedTensor
from headrace.weights.weight import Weight

FP8_BLOCK = 128
INT4_GROUPS = (128, 64, 32)
INT4_CHUNK = 128  # columns whose codes are stored together
# (columns of the matrix, columns of x that share a scale). An outlier costs the values in its group
# precision, so small groups are better; narrow matrices can afford them, as their products are not
# bound by the matrix units.
_INT8_ROW_GROUPS = ((2048, 128), (1024, 64), (0, 32))
# Up to this many weights, FP8 rows save less time on the matrix units, even for a thousand rows,
# than the launch that quantizes them takes.
SMALL_WEIGHTS = 2 << 20
SMALL_FP8_GROUP = 32  # columns that share a scale in such small FP8 matrices


class MatrixFormat(StrEnum):
    F32 = "f32"  # only for tests
    BF16 = "bf16"
    F16 = "f16"
    FP8 = "fp8"
    FP8_BLOCK = "fp8_block"
    INT8 = "int8"
    INT4 = "int4"

    @property
    def dense(self) -> bool:
        return self in (MatrixFormat.F32, MatrixFormat.BF16, MatrixFormat.F16)


def is_small(outputs: int, columns: int) -> bool:
    return outputs * columns <= SMALL_WEIGHTS


WIDENED = (
    MatrixFormat.INT4,
    MatrixFormat.INT8,
    MatrixFormat.FP8_BLOCK,
)  # torch has no product for these
VECTORS = frozenset(
    ("attn_norm", "mlp_norm", "q_norm", "k_norm", "attn_post_norm", "mlp_post_norm", "final_norm")
)
# Only the layers' weights: embedding and output layer are not quantized, as in most quantized
# checkpoints.
QUANTIZED_ROLES = frozenset(("qkv", "attn_out", "gate_up", "down"))
FORMATS = {"fp8": MatrixFormat.FP8, "int8": MatrixFormat.INT8, "int4": MatrixFormat.INT4}


@dataclass(frozen=True, slots=True, kw_only=True)
class MatrixSize:
    """What a matrix takes on the device, as numbers."""

    format: MatrixFormat
    rows: int  # outputs
    columns: int
    group: int = 0  # int4 and fp8_block: columns that share a scale
    scale_bytes: int = 2  # int4: of a scale in the file
    is_permuted: bool = False
    has_bias: bool = False
    gated: bool = False

    @property
    def outputs(self) -> int:
        """The recorder's name for `rows`."""
        return self.rows

    @property
    def row_group(self) -> int:
        return row_group(self.format, self.columns, self.group)

    @property
    def bytes(self) -> int:
        """Codes, scales and bias; matrix.py says how they lie in memory."""
        return self.code_bytes + self.scale_total_bytes + 4 * self.rows * self.has_bias

    @property
    def code_bytes(self) -> int:
        if self.format is MatrixFormat.INT4:
            return -(-self.columns // INT4_CHUNK) * self.rows * INT4_CHUNK // 2
        return self.rows * self.columns * VALUE_BYTES[self.format]

    @property
    def scale_total_bytes(self) -> int:
        """Scales and zero points, and the order of columns where a checkpoint has its own."""
        if self.format.dense:
            return 0
        if self.format is MatrixFormat.INT4:
            # A scale and a zero point in one number of twice the scale's size.
            groups = -(-self.columns // INT4_CHUNK) * (INT4_CHUNK // self.group)
            return groups * self.rows * 2 * self.scale_bytes + 4 * self.columns * self.is_permuted
        groups = -(-self.columns // self.group) if self.group else 1
        return 4 * self.rows * groups


VALUE_BYTES = {
    MatrixFormat.F32: 4,
    MatrixFormat.BF16: 2,
    MatrixFormat.F16: 2,
    MatrixFormat.FP8: 1,
    MatrixFormat.FP8_BLOCK: 1,
    MatrixFormat.INT8: 1,
}


def row_group(format: MatrixFormat, columns: int, group: int) -> int:
    """Columns of x that share a scale if x is quantized; 0: one scale per row."""
    if format is MatrixFormat.FP8_BLOCK:
        return group
    if format is not MatrixFormat.INT8:
        return 0
    return next(each for least, each in _INT8_ROW_GROUPS if columns >= least)


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


def int4_group(columns: int) -> int:
    """The largest group size that divides the columns: some models' inputs are not a multiple of
    128."""
    return next((group for group in (128, 64, 32) if columns % group == 0), 128)


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
