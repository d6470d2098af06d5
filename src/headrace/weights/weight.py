"""A model's weight as found: tensors of a file stacked by output rows. No arithmetic.

Backends prepare what they need from it (a packed copy, a float array); the bytes stay mapped.
"""

from __future__ import annotations

from dataclasses import dataclass

from headrace.weights.tensor import Tensor


@dataclass(frozen=True, slots=True, kw_only=True)
class Weight:
    """A matrix [sum of the parts' rows, columns], or a vector [d] (one part)."""

    parts: tuple[Tensor, ...]
    bias: tuple[Tensor, ...] = ()  # one a part, or none
    offset: float = 0.0  # to be added to every value

    @property
    def rows(self) -> int:
        return sum(part.shape[0] for part in self.parts)

    @property
    def columns(self) -> int:
        return self.parts[0].shape[-1]
