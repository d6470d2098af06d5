"""The names of a model's weights in a file, and the shape that each should have.

A family writes these; weights/load.py finds the tensors. No bytes here.
"""

from __future__ import annotations

from dataclasses import dataclass

from headrace.core.errors import UnsupportedModelError
from headrace.models.decoder import DecoderWeights


@dataclass(frozen=True, slots=True)
class TensorRef:
    name: str
    shape: tuple[int, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class WeightRef:
    """Tensors to be stacked by output rows."""

    parts: tuple[TensorRef, ...]
    bias: tuple[TensorRef, ...] = ()  # one per part, or none
    offset: float = 0.0  # Gemma's norm weights are stored as their difference from one


def matrix_ref(columns: int, *parts: tuple[str, int], bias: bool = False) -> WeightRef:
    """Matrices of these (name, rows), stacked; `bias`: each has one beside it."""
    return WeightRef(
        parts=tuple(TensorRef(f"{name}.weight", (rows, columns)) for name, rows in parts),
        bias=tuple(TensorRef(f"{name}.bias", (rows,)) for name, rows in parts) if bias else (),
    )


def norm_ref(name: str, size: int, offset: float = 0.0) -> WeightRef:
    return WeightRef(parts=(TensorRef(f"{name}.weight", (size,)),), offset=offset)


def referenced(weights: DecoderWeights[WeightRef]) -> set[str]:
    """The names of all tensors that the weights refer to."""
    found: set[str] = set()

    def note(_role: str, ref: WeightRef) -> None:
        found.update(tensor.name for tensor in ref.parts + ref.bias)

    weights.map(note)
    return found


def unread(name: str) -> UnsupportedModelError:
    return UnsupportedModelError(
        f"The weights contain the tensor {name[:80]!r}, which Headrace does not support for this "
        "architecture.",
        "Choose another version of this model: without biases, adapters or experts, and quantized "
        "only as its quantization_config says.",
    )
