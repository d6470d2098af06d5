"""Random weights for a config.json without a checkpoint, for benchmarks.

A DummyTensor is a shape and a seed; backends generate the values where they need them: the CUDA
backend on the GPU, the others with `dummy_values`. Values may differ between backends.
"""

from __future__ import annotations

import math
import zlib
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from headrace.core.closes import Closes
from headrace.models.refs import TensorRef
from headrace.weights.files.safetensors import read_config
from headrace.weights.tensor import FORMATS, Tensor, TensorFormat

# Of a matrix: a usual value for initialising models. Sums stay small, so that no value of a deep
# decoder exceeds the range of bfloat16.
DUMMY_STD = 0.02


@dataclass(frozen=True, slots=True)
class DummyTensor:
    """A part of a Weight in place of a Tensor, with normally distributed values."""

    name: str
    shape: tuple[int, ...]
    seed: int  # from the name: the same in every process
    mean: float = 0.0
    std: float = DUMMY_STD

    @property
    def format(self) -> TensorFormat:
        return FORMATS["BF16"]

    @property
    def values(self) -> int:
        return math.prod(self.shape)


class DummyFolder(Closes):
    """Implements `load.WeightsFile` for a folder; only reads its config.json."""

    def __init__(self, path: Path, config: dict[str, object]) -> None:
        self.path = path
        self.config = config
        self.tensors: dict[str, Tensor] = {}
        self.stored = self.tensors
        self.left_out: dict[str, str] = {}

    @classmethod
    def open(cls, folder: Path) -> DummyFolder:
        return cls(folder, read_config(folder))

    def release(self, tensor: Tensor) -> None:
        """Nothing to release."""

    def close(self) -> None:
        """Nothing to close."""


def dummy_tensor(ref: TensorRef, offset: float = 0.0) -> DummyTensor:
    """A random matrix, or a vector: ones for a norm (minus its offset), zeros for a bias."""
    seed = zlib.crc32(ref.name.encode())
    if len(ref.shape) > 1:
        return DummyTensor(ref.name, ref.shape, seed)
    is_bias = ref.name.endswith(".bias")
    return DummyTensor(ref.name, ref.shape, seed, mean=0.0 if is_bias else 1.0 - offset, std=0.0)


def dummy_values(tensor: DummyTensor) -> NDArray[np.float32]:
    """The values, rounded to the BF16 that they would be stored in."""
    if tensor.std == 0.0:
        return np.full(tensor.shape, tensor.mean, np.float32)
    noise = np.random.default_rng(tensor.seed).standard_normal(tensor.shape, np.float32)
    return round_to_bf16(noise * np.float32(tensor.std) + np.float32(tensor.mean))


def round_to_bf16(values: NDArray[np.float32]) -> NDArray[np.float32]:
    """To the nearest, ties to even; finite values only."""
    bits = values.view(np.uint32)
    rounded = bits + np.uint32(0x7FFF) + (bits >> 16 & 1)
    return (rounded & np.uint32(0xFFFF0000)).view(np.float32)
