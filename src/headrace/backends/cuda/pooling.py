"""Sums of hidden states, for embeddings: of the rows that the body left, after the final norm.

Added up on the device in double precision. Knows neither models nor requests.
"""

from __future__ import annotations

from operator import attrgetter
from typing import Protocol

import numpy as np
import torch

from headrace.core.step import StepEntry

_POOL = attrgetter("pool")


class Pooled(Protocol):
    """A step whose results are yet to come."""

    @property
    def entries(self) -> list[StepEntry]: ...

    def take_pooled(self, numbers: list[int], sums: torch.Tensor) -> None:
        """Sums [n, hidden] of the entries with these numbers."""
        ...


class Pooling:
    """`hidden` [rows, hidden] holds the rows; `weight` and `eps` are the final norm's."""

    def __init__(self, hidden: torch.Tensor, weight: torch.Tensor, eps: float) -> None:
        self._hidden = hidden
        self._weight = weight.double()
        self._eps = eps

    def add(self, step: Pooled) -> None:
        """Right after a step's body, before another's."""
        if not any(map(_POOL, step.entries)):  # as most steps: this looks at every entry
            return
        asking = [number for number, entry in enumerate(step.entries) if entry.pool]
        counts = [len(entry.token_ids) for entry in step.entries]
        ends = np.cumsum(counts)
        sums = []
        for number in asking:
            rows = self._hidden[int(ends[number]) - counts[number] : int(ends[number])].double()
            scale = torch.rsqrt(rows.square().mean(1, keepdim=True) + self._eps)
            sums.append((rows * scale).sum(0) * self._weight)
        step.take_pooled(asking, torch.stack(sums))
