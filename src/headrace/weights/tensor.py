"""A named tensor as it is stored in a file: its format, shape and bytes. No arithmetic.

A format is a run of `block_values` values stored in `block_bytes` bytes; float formats are blocks
of one. The names are GGUF's.
"""

from __future__ import annotations

import math
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class TensorFormat:
    name: str
    block_values: int
    block_bytes: int


FORMATS = {
    f.name: f
    for f in (
        TensorFormat("F32", 1, 4),
        TensorFormat("F16", 1, 2),
        TensorFormat("BF16", 1, 2),
        TensorFormat("Q4_0", 32, 18),
        TensorFormat("Q4_1", 32, 20),
        TensorFormat("Q5_0", 32, 22),
        TensorFormat("Q5_1", 32, 24),
        TensorFormat("Q8_0", 32, 34),
        TensorFormat("Q4_K", 256, 144),
        TensorFormat("Q5_K", 256, 176),
        TensorFormat("Q6_K", 256, 210),
    )
}

# Types in which quantized checkpoints store their codes, by safetensors' names. weights/methods/
# knows what the codes mean.
CODE_FORMATS = {
    f.name: f
    for f in (TensorFormat("I8", 1, 1), TensorFormat("I32", 1, 4), TensorFormat("F8_E4M3", 1, 1))
}


@dataclass(frozen=True, slots=True)
class Tensor:
    """`data` is a read-only view into the mapped file, with exactly the bytes of the shape and
    format. Rows (the last axis) hold whole blocks. Shape is outermost first, as in numpy."""

    name: str
    format: TensorFormat
    shape: tuple[int, ...]
    data: memoryview

    @property
    def values(self) -> int:
        return math.prod(self.shape)
