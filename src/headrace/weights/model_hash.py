"""Which model a file is, without reading all of it: a hash over every tensor's name, format and
shape, a few of its bytes, and the model's description.

Knows files; not where they came from.
"""

from __future__ import annotations

import hashlib
import json
from dataclasses import asdict

from headrace.models.spec import ModelSpec
from headrace.weights.load import WeightsFile
from headrace.weights.tensor import Tensor

SAMPLE_BYTES = 4096  # of a tensor's start and of its middle
SAMPLED = f"every tensor's name, format, shape and twice {SAMPLE_BYTES} of its bytes"


def hash_model(file: WeightsFile, spec: ModelSpec) -> str:
    digest = hashlib.sha256(json.dumps(asdict(spec), sort_keys=True).encode())
    for name, tensor in sorted(file.stored.items()):
        digest.update(f"\n{name} {tensor.format.name} {tensor.shape}\n".encode())
        for sample in _samples(tensor):
            digest.update(sample)
    return digest.hexdigest()


def _samples(tensor: Tensor) -> list[memoryview]:
    middle = tensor.data.nbytes // 2
    return [tensor.data[:SAMPLE_BYTES], tensor.data[middle : middle + SAMPLE_BYTES]]
