"""Which kernel, with which tiles, multiplies a matrix with a given number of rows.

Shapes that were measured on this GPU model are looked up in a table: the one shipped here, then the
user's own in the cache folder. A rule decides for every other shape. Launches no kernel: tables are
measured and written by benchmarks/cuda/.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from importlib import resources
from pathlib import Path

from headrace.backends.cuda.products.formats import MatrixFormat, is_small
from headrace.backends.cuda.products.matrix import Matrix
from headrace.core.errors import ConfigError
from headrace.fetch.model_folder import cache_folder

SHIPPED = "choices.json"
MEASURED_ROWS = (1, 8, 16, 32, 64, 128, 256, 512)  # a choice is used for up to this many rows

KERNELS = ("row", "dot", "library", "widened")


@dataclass(frozen=True, slots=True, kw_only=True)
class KernelChoice:
    """`row`: a single row. `dot`: tiles on the matrix units. `library`: torch's product. `widened`:
    the matrix is converted to bf16 first, then torch's product."""

    kernel: str
    block_m: int = 16
    block_n: int = 64
    block_k: int = 128
    parts: int = 1  # programs that share a tile, each computing some of the columns (split-K)
    warps: int = 4
    stages: int = 3
    swap: bool = False
    fuse_norm: bool = False  # dense matrices and whole rows, one part
    whole_rows: bool = False  # FP8 only: weights are converted to bf16, rows are not quantized
    late: bool = False  # INT4 only: the next kernel may start only when the sums are complete


def key_of(format: MatrixFormat, outputs: int, columns: int, rows: int) -> str:
    return f"{format}:{outputs}x{columns}:{rows}"


def bucket_of(rows: int) -> int | None:
    """The measured row count that is used for `rows`; None if it is above all of them."""
    return next((bucket for bucket in MEASURED_ROWS if rows <= bucket), None)


class Choices:
    """Choices by shape: measured ones first, the rule for the rest."""

    def __init__(self, measured: dict[str, KernelChoice] | None = None) -> None:
        self._measured = dict(measured or {})

    @classmethod
    def load(cls, device_name: str) -> Choices:
        measured = read_table(resources.files(__package__).joinpath(SHIPPED).read_text(), SHIPPED)
        found = measured.get(device_name, {})
        own = own_path()
        if own.is_file():
            found |= read_table(own.read_text(), str(own)).get(device_name, {})
        return cls(found)

    def replaced(self, measured: dict[str, KernelChoice]) -> Choices:
        """A copy in which these come first."""
        return Choices(self._measured | measured)

    def launch(self, matrix: Matrix, rows: int) -> KernelChoice:
        bucket = bucket_of(rows)
        if bucket is not None:
            key = key_of(matrix.format, matrix.rows, matrix.columns, bucket)
            if (found := self._measured.get(key)) is not None:
                return found
        return rule(matrix.format, matrix.rows, matrix.columns, rows)


class InvariantChoices(Choices):
    """One choice for any number of rows, without split sums: a row then has the same bits in every
    step. Tiles of 64 rows, as smaller ones would use other instructions."""

    def launch(self, matrix: Matrix, rows: int) -> KernelChoice:
        if matrix.format is MatrixFormat.INT4:
            return KernelChoice(kernel="dot", block_m=64, block_n=128, stages=3)
        whole = keeps_rows(matrix.format, matrix.rows, matrix.columns)
        deep = 64 if matrix.format.dense or whole else 128
        return KernelChoice(
            kernel="dot", block_m=64, block_n=64, block_k=deep, stages=4, whole_rows=whole
        )


def own_path() -> Path:
    return cache_folder() / "cuda" / SHIPPED


def read_table(text: str, name: str) -> dict[str, dict[str, KernelChoice]]:
    try:
        table = {
            device: {key: KernelChoice(**launch) for key, launch in found.items()}
            for device, found in json.loads(text).items()
        }
    except (ValueError, TypeError, AttributeError) as error:
        raise ConfigError(
            f"{name} is not a table of kernel choices: {error}.",
            "Delete it: Headrace then uses the choices that it comes with.",
        ) from None
    return table


def rule(format: MatrixFormat, outputs: int, columns: int, rows: int) -> KernelChoice:
    """For shapes that were not measured: what the measured ones have in common."""
    if rows == 1 and (format.dense or format is MatrixFormat.FP8):
        return KernelChoice(
            kernel="row", block_n=8, block_k=512 if columns <= 2048 else 1024, stages=1
        )
    if format in (MatrixFormat.INT4, MatrixFormat.FP8_BLOCK) and rows > 256:
        return KernelChoice(kernel="widened")
    if format is MatrixFormat.INT4:
        return _int4(outputs, columns, rows)
    if keeps_rows(format, outputs, columns):
        return _whole_rows(columns, rows)
    if rows <= 64:
        return _skinny(format, outputs, columns, rows)
    if format.dense or format is MatrixFormat.FP8:
        return KernelChoice(kernel="library")
    return KernelChoice(kernel="dot", block_m=64, block_n=128, warps=4, stages=3)


def keeps_rows(format: MatrixFormat, outputs: int, columns: int) -> bool:
    """Whether rows are never quantized for this matrix, as it is FP8 and too small to gain."""
    return format in (MatrixFormat.FP8, MatrixFormat.FP8_BLOCK) and is_small(outputs, columns)


def _whole_rows(columns: int, rows: int) -> KernelChoice:
    """For few programs with little work, which are bound by latency: the sum is split, and the norm
    is fused."""
    block_m = min(64, max(16, 1 << (rows - 1).bit_length()))
    return KernelChoice(
        kernel="dot",
        block_m=block_m,
        block_n=32 if block_m < 64 else 64,
        block_k=64,
        parts=min(4, max(1, columns // 512)) if rows <= 64 else 1,
        stages=4,
        fuse_norm=rows <= 16,
        whole_rows=True,
    )


def _skinny(format: MatrixFormat, outputs: int, columns: int, rows: int) -> KernelChoice:
    block_m = max(16, 1 << (rows - 1).bit_length())
    block_n = 64 if outputs >= 16384 else 32
    whole = format is MatrixFormat.FP8 and rows <= 16
    block_k = 256 if format in (MatrixFormat.FP8, MatrixFormat.INT8) and not whole else 128
    tiles = -(-outputs // block_n)
    parts = 1
    while parts < 4 and tiles * parts < 256 and columns // (2 * parts) >= 4 * block_k:
        parts *= 2
    return KernelChoice(
        kernel="dot",
        block_m=block_m,
        block_n=block_n,
        block_k=block_k,
        parts=parts,
        whole_rows=whole,
    )


def _int4(outputs: int, columns: int, rows: int) -> KernelChoice:
    """About four programs per multiprocessor, as each has few loads in flight."""
    block_m = min(128, max(8, 1 << (rows - 1).bit_length()))
    block_n, warps, stages = {8: (64, 2, 4), 16: (64, 2, 4), 32: (64, 2, 4), 64: (128, 4, 3)}.get(
        block_m, (128, 8, 3)
    )
    tiles = -(-outputs // block_n) * -(-rows // block_m)
    parts = 1
    while parts < 8 and tiles * parts < (400 if block_m < 64 else 200):
        if columns // (2 * parts) < 3 * 128:
            break
        parts *= 2
    return KernelChoice(
        kernel="dot", block_m=block_m, block_n=block_n, parts=parts, warps=warps, stages=stages
    )
