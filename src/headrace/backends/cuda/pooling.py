"""Sums of hidden states, for embeddings: over the rows that the body computed, after the final
norm.

Summed on the device in double precision. Knows neither models nor requests.
"""

from __future__ import annotations

import torch

from headrace.backends.cuda.step.results import StepInFlight


class Pooling:
    """`hidden` [rows, hidden] holds the rows; `weight` and `eps` are the final norm's."""

    def __init__(self, hidden: torch.Tensor, weight: torch.Tensor, eps: float) -> None:
        self._hidden = hidden
        self._weight = weight.double()
        self._eps = eps

    def add(self, step: StepInFlight) -> None:
        """Call right after a step's body, before the next step's."""
        plan = step.plan
        asking = [row for row, extra in plan.extras.items() if extra.pool]
        if not asking:
            return
        sums = []
        for row in asking:
            end = sum(plan.counts[: row + 1])
            hidden = self._hidden[end - plan.counts[row] : end].double()
            scale = torch.rsqrt(hidden.square().mean(1, keepdim=True) + self._eps)
            sums.append((hidden * scale).sum(0) * self._weight)
        step.take_pooled(asking, torch.stack(sums))
