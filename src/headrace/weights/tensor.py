"""A named tensor as it lies in a file: its format, shape and bytes. No arithmetic.

A format is a run of `block_values` values stored in `block_bytes` bytes; float formats are blocks
of one. The names are GGUF's.
"""

from __future__ import annotations

import math
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Format:
    name: str
    block_values: int
    block_bytes: int

    @property
    def bits_per_value(self) -> float:
        return 8 * self.block_bytes / self.block_values


FORMATS = {
    f.name: f
    for f in (
        Format("F32", 1, 4),
        Format("F16", 1, 2),
        Format("BF16", 1, 2),
        Format("Q4_0", 32, 18),
        Format("Q4_1", 32, 20),
        Format("Q5_0", 32, 22),
        Format("Q5_1", 32, 24),
        Format("Q8_0", 32, 34),
        Format("Q4_K", 256, 144),
        Format("Q5_K", 256, 176),
        Format("Q6_K", 256, 210),
    )
}

# What quantized checkpoints keep their codes in, under safetensors' names. Numbers without a
# meaning of their own: awq.py, gptq.py and fp8.py know what they stand for.
CODE_FORMATS = {
    f.name: f for f in (Format("I8", 1, 1), Format("I32", 1, 4), Format("F8_E4M3", 1, 1))
}


@dataclass(frozen=True, slots=True)
class Tensor:
    """`data` is a read-only view into the mapped file, exactly as many bytes as shape and format
    say. Rows (the last axis) hold whole blocks. Shape is outermost first, as numpy's."""

    name: str
    format: Format
    shape: tuple[int, ...]
    data: memoryview

    @property
    def values(self) -> int:
        return math.prod(self.shape)
