"""A model's weight as found: tensors stacked by output rows. No arithmetic.

Backends prepare it in their own form (a packed copy, a float array); the file stays mapped.
"""

from __future__ import annotations

from dataclasses import dataclass

from headrace.weights.dummy import DummyTensor
from headrace.weights.methods.quantized import QuantizedTensor
from headrace.weights.tensor import Tensor

# A tensor of a file, a quantized matrix of several tensors, or random values to be generated: each
# has a name, a format and a shape.
Part = Tensor | QuantizedTensor | DummyTensor


@dataclass(frozen=True, slots=True, kw_only=True)
class Weight:
    """A matrix [sum of the parts' rows, columns], or a vector [d] (one part)."""

    parts: tuple[Part, ...]
    bias: tuple[Part, ...] = ()  # one per part, or none
    offset: float = 0.0  # to be added to every value

    @property
    def rows(self) -> int:
        return sum(part.shape[0] for part in self.parts)

    @property
    def columns(self) -> int:
        return self.parts[0].shape[-1]


def are_tied(embed: Weight | None, head: Weight | None) -> bool:
    """Whether an output layer is the embedding again, to be kept once."""
    return embed is not None and head is not None and embed.parts == head.parts
