"""A hash of a model's weights without reading all of them: every tensor's name, format and shape,
and a few of its bytes. Knows files of weights alone."""

from __future__ import annotations

import hashlib

from headrace.weights.load import WeightsFile
from headrace.weights.tensor import Tensor

SAMPLE_BYTES = 4096  # of a tensor's start and of its middle
SAMPLED = f"every tensor's name, format, shape and twice {SAMPLE_BYTES} of its bytes"


def hash_tensors(file: WeightsFile, *, start: bytes = b"") -> str:
    """`start` is hashed before the tensors."""
    digest = hashlib.sha256(start)
    for name, tensor in sorted(file.stored.items()):
        digest.update(f"\n{name} {tensor.format.name} {tensor.shape}\n".encode())
        for sample in _samples(tensor):
            digest.update(sample)
    return digest.hexdigest()


def _samples(tensor: Tensor) -> list[memoryview]:
    middle = tensor.data.nbytes // 2
    return [tensor.data[:SAMPLE_BYTES], tensor.data[middle : middle + SAMPLE_BYTES]]
