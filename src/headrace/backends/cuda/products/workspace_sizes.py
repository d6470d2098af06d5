"""How large the memory is that products share: product.py allocates it, layout.py predicts it.

Knows matrices' sizes; creates no tensor.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from headrace.backends.cuda.products.formats import WIDENED, MatrixFormat, MatrixSize

PARTIAL_VALUES = 4 << 20  # partial sums of programs that share a tile
COUNTERS = 4096  # tiles that may be shared at one time
WIDE_ROWS = 2048  # rows whose gate and up values exist at one time
_QUANTIZES_ROWS = (MatrixFormat.FP8, MatrixFormat.FP8_BLOCK, MatrixFormat.INT8)


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkspaceSizes:
    """Numbers of values. Rows, wide and widened have the activations' type, codes one byte, the
    rest four."""

    max_rows: int
    width: int
    codes: int
    scales: int
    wide: int
    widened: int

    @classmethod
    def of(
        cls, matrices: Iterable[MatrixSize], max_rows: int, *, normed_columns: int | None = None
    ) -> WorkspaceSizes:
        """`normed_columns`: the most columns of any product with a norm; None: of any product."""
        found = set(matrices)  # most layers are alike
        columns = max(m.columns for m in found)
        permuted = max((m.columns for m in found if m.is_permuted), default=0)
        groups = max(-(-m.columns // (m.row_group or m.columns)) for m in found)
        wide = max((m.rows for m in found if _needs_wide(m)), default=0)
        # Only if steps have enough rows to make widening a matrix worthwhile.
        widest = max((m.rows * m.columns for m in found if m.format in WIDENED), default=0)
        return cls(
            max_rows=max_rows,
            width=columns if normed_columns is None else max(normed_columns, permuted),
            codes=max_rows * columns * any(m.format in _QUANTIZES_ROWS for m in found),
            scales=max_rows * groups,
            wide=min(max_rows, WIDE_ROWS) * wide,
            widened=widest * (max_rows > 64),
        )

    def bytes(self, value_bytes: int) -> int:
        """`value_bytes`: of the activations' type."""
        values = self.max_rows * self.width + self.wide + self.widened
        return values * value_bytes + self.codes + 4 * (self.scales + PARTIAL_VALUES + COUNTERS)


def _needs_wide(matrix: MatrixSize) -> bool:
    """Whether its product needs memory for all outputs before the epilogue."""
    return matrix.gated or matrix.has_bias or matrix.format is MatrixFormat.FP8
