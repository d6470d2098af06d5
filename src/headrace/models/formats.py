"""How a matrix's values are kept: bits, and the scales that belong to them.

Sizes are those of the published formats; GGUF's are checked against the gguf package. No values are
converted here.
"""

from __future__ import annotations

from dataclasses import dataclass

_BITS = 8


@dataclass(frozen=True, slots=True, kw_only=True)
class Format:
    """Bits of a value, and bits of scales for each group of columns in each block of rows."""

    name: str
    bits: float
    group: int | None = None  # columns that share scales; None: the whole row
    rows: int | None = 1  # rows that share scales; None: the whole matrix
    scale_bits: int = 0  # scales, minima and zero points of one group
    column_bits: int = 0  # of each column: GPTQ's order of activations

    def value_bytes(self, rows: int, columns: int) -> float:
        return rows * columns * self.bits / _BITS

    def scale_bytes(self, rows: int, columns: int) -> float:
        if not self.scale_bits:
            return 0.0
        groups = 1 if self.group is None else -(-columns // self.group)
        blocks = 1 if self.rows is None else -(-rows // self.rows)
        return (blocks * groups * self.scale_bits + columns * self.column_bits) / _BITS


FP32 = Format(name="FP32", bits=32)
BF16 = Format(name="BF16", bits=16)
FP16 = Format(name="FP16", bits=16)
FP8 = Format(name="FP8", bits=8, rows=None, scale_bits=32)  # one scale for a matrix
FP8_BLOCK = Format(name="FP8 in blocks of 128 x 128", bits=8, group=128, rows=128, scale_bits=32)
INT8 = Format(name="INT8", bits=8, scale_bits=16)  # one scale for a row
INT4 = Format(name="INT4 in groups of 128", bits=4, group=128, scale_bits=32)  # scale, minimum
INT4_32 = Format(name="INT4 in groups of 32", bits=4, group=32, scale_bits=16)
AWQ = Format(name="AWQ", bits=4, group=128, scale_bits=16 + 4)
GPTQ = Format(name="GPTQ", bits=4, group=128, scale_bits=16 + 4, column_bits=32)
NVFP4 = Format(name="NVFP4", bits=4, group=16, scale_bits=8)
MXFP4 = Format(name="MXFP4", bits=4, group=32, scale_bits=8)

# GGUF: bytes of values and bytes of scales in a block.
_GGUF = {
    "F32": (1, 4, 0),
    "F16": (1, 2, 0),
    "Q8_0": (32, 32, 2),
    "Q4_0": (32, 16, 2),
    "Q4_1": (32, 16, 4),
    "Q5_0": (32, 20, 2),
    "Q5_1": (32, 20, 4),
    "Q2_K": (256, 64, 20),
    "Q3_K": (256, 96, 14),
    "Q4_K": (256, 128, 16),
    "Q5_K": (256, 160, 16),
    "Q6_K": (256, 192, 18),
    "IQ4_NL": (32, 16, 2),
    "IQ4_XS": (256, 128, 8),
}
GGUF: dict[str, Format] = {
    name: Format(
        name=f"GGUF {name}", bits=values * _BITS / block, group=block, scale_bits=scales * _BITS
    )
    for name, (block, values, scales) in _GGUF.items()
}
