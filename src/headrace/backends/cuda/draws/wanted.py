"""What a plan needs from the logits, as flat arrays: one wanted row for each target to be scored
and each token to be drawn.

Rows whose logits are adjusted (bias, masks, allowed and banned tokens, penalties) are listed
separately, so that the others cost nothing extra. Does not see the logits; the order of operations
is in backends/reference/sampling.py.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from headrace.core.sampling import FILTERS
from headrace.core.step import RowExtra, StepPlan

Ints = NDArray[np.int32]
Doubles = NDArray[np.float64]

_NOTHING = RowExtra()


class Wanted:
    """A plan's wanted rows, in order. `sampled`, `scored` and `topped` are indexes of wanted rows
    that need more than the argmax: a draw, a target, alternatives. `adjusting` lists the draws that
    change the logits first: the wanted row, and the row of the plan."""

    def __init__(self, plan: StepPlan) -> None:
        self.plan = plan
        ends = np.cumsum(plan.counts, dtype=np.int32)
        drawing = np.array([draw is not None for draw in plan.draws], bool)
        scores = {row: e.targets for row, e in plan.extras.items() if e.targets is not None}
        # For each row: its first wanted row (targets come first), and that of its draw, or -1.
        sizes = drawing.astype(np.int32)
        for row, targets in scores.items():
            sizes[row] += len(targets)
        lasts = np.cumsum(sizes, dtype=np.int32) - 1
        self.drawn_at: Ints = np.where(drawing, lasts, -1)
        count = int(lasts[-1]) + 1 if len(lasts) else 0
        self.rows: Ints = np.zeros(count, np.int32)  # of the step
        self.rows[lasts[drawing]] = ends[drawing] - 1
        self.targets: Ints = np.full(count, -1, np.int32)  # -1: a token is drawn
        for row, targets in scores.items():
            first, end = int(lasts[row]) + 1 - int(sizes[row]), int(ends[row])
            self.rows[first : first + len(targets)] = range(end - len(targets), end)
            self.targets[first : first + len(targets)] = targets
        self._find_draws()
        self.tops: Ints = np.zeros(count, np.int32)
        for row, extra in plan.extras.items():
            if extra.top_logprobs:
                last = int(lasts[row])
                self.tops[last + 1 - int(sizes[row]) : last + 1] = extra.top_logprobs
        self.scored: Ints = np.flatnonzero(self.targets >= 0).astype(np.int32)
        self.topped: Ints = np.flatnonzero(self.tops).astype(np.int32)

    def _find_draws(self) -> None:
        """The draws that are more than the argmax of the unchanged logits."""
        plan = self.plan
        rows: list[int] = [row for row, draw in enumerate(plan.draws) if draw and draw.samples]
        if plan.extras:
            adjusting = [row for row, e in plan.extras.items() if e.adjusts and plan.draws[row]]
            rows = sorted({*rows, *adjusting})
        params = [draw for row in rows if (draw := plan.draws[row]) is not None]
        self.sampled: Ints = self.drawn_at[rows]
        self.draws: Doubles = np.array([draw.filters for draw in params], np.float64)
        self.draws = self.draws.reshape(-1, len(FILTERS))
        self.uniforms: Doubles = np.array([plan.uniforms[row] for row in rows], np.float64)
        self.adjusting: list[tuple[int, int]] = [
            (int(self.drawn_at[row]), row)
            for row, draw in zip(rows, params, strict=True)
            if draw.adjusts or plan.extras.get(row, _NOTHING).adjusts
        ]

    @property
    def is_drawn_only(self) -> bool:
        """Whether every row wants only a token."""
        return not (len(self.scored) or len(self.topped))

    def draws_within(self, first: int, end: int) -> bool:
        """Whether one of these wanted rows needs a draw."""
        low, high = np.searchsorted(self.sampled, (first, end))
        return bool(low < high)

    @property
    def most_tops(self) -> int:
        return int(self.tops.max(initial=0)) if len(self.topped) else 0
