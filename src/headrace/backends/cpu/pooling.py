"""Sums of hidden states, for embeddings: read from the native program's memory after a step.

The program keeps the last layer's rows until its next run. The norm and the sum are little work
compared with the model, so numpy does them. Knows neither models nor requests.
"""

from __future__ import annotations

import numpy as np

from headrace.backends.cpu import _native
from headrace.backends.cpu.ops import Prepared
from headrace.core.step import StepPlan, StepResult


class Pooling:
    """`slot` holds the rows; `weight` [hidden] and `eps` are the final norm's."""

    def __init__(self, program: _native.Program, slot: int, weight: Prepared, eps: float) -> None:
        assert isinstance(weight, np.ndarray)
        self._program = program
        self._slot = slot
        self._weight = weight.astype(np.float64)
        self._eps = eps

    def add(self, plan: StepPlan, result: StepResult) -> None:
        """Adds the sums to the results of rows that ask for them. Call right after their step."""
        for row, extra in plan.extras.items():
            if extra.pool:
                end = sum(plan.counts[: row + 1])
                view = self._program.slot_view(self._slot, end)
                hidden = view[end - plan.counts[row] :].astype(np.float64)
                scale = np.sqrt(np.mean(hidden * hidden, axis=1, keepdims=True) + self._eps)
                pooled = (hidden / scale).sum(axis=0) * self._weight
                result.extras[row].pooled = pooled.tolist()
