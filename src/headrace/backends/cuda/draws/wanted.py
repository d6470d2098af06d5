"""What a plan needs from the logits, as flat arrays: one wanted row for each target to be scored
and each token to be drawn, of which a row with drafts has several.

Rows whose logits are adjusted (bias, masks, allowed and banned tokens, penalties) are listed
separately, so that the others cost nothing extra. Does not see the logits; the order of operations
is in backends/reference/sampling.py.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from headrace.backends.shared.places import place_extras
from headrace.core.sampling import FILTERS
from headrace.core.step import NO_EXTRA, RowExtra, StepPlan

Ints = NDArray[np.int32]
Doubles = NDArray[np.float64]

# What is the same in every step in which each sequence draws a token and wants nothing else. Made
# once; nobody writes to them.
_SEQUENCES = 1024
_EACH: Ints = np.arange(_SEQUENCES, dtype=np.int32)
_NO_TARGETS: Ints = np.full(_SEQUENCES, -1, np.int32)
_NO_TOPS: Ints = np.zeros(_SEQUENCES, np.int32)
_NO_ROWS: Ints = np.empty(0, np.int32)
for _kept in (_EACH, _NO_TARGETS, _NO_TOPS, _NO_ROWS):
    _kept.flags.writeable = False


class Wanted:
    """A plan's wanted rows, in order. `sampled`, `scored` and `topped` are indexes of wanted rows
    that need more than the argmax: a draw, a target, alternatives. `adjusting` lists the draws that
    change the logits first: the wanted row, the row of the plan, and the place in that."""

    def __init__(self, plan: StepPlan) -> None:
        self.plan = plan
        count = len(plan)
        # Rows of the step; targets, or -1 where a token is drawn; and alternatives wanted.
        self.rows: Ints = _EACH[:count]
        self.targets: Ints = _NO_TARGETS[:count]
        self.tops: Ints = _NO_TOPS[:count]
        self.scored = self.topped = _NO_ROWS
        # Of each row of the plan: its draw's number, the first if there are drafts; or -1.
        self.drawn_at: Ints = _EACH[:count]
        self.places = place_extras(plan)
        if plan.batch_tokens > count or count > _SEQUENCES:
            self.rows = np.cumsum(plan.counts, dtype=np.int32) - 1
        if plan.extras or plan.drafts or None in plan.draws or count > _SEQUENCES:
            self._number(self.rows)
        self._find_draws()

    def _number(self, lasts: Ints) -> None:
        """Where some rows draw nothing, or want more than a draw. `lasts` are the rows of the
        step with their last tokens."""
        plan = self.plan
        drawing = np.array([draw is not None for draw in plan.draws], bool)
        scores = {row: e.targets for row, e in plan.extras.items() if e.targets is not None}
        sizes = drawing.astype(np.int32)
        for row, targets in scores.items():
            sizes[row] += len(targets)
        behind = np.zeros(len(sizes), np.int32)  # drafts of each row
        for row, drafts in plan.drafts.items():
            behind[row] = len(drafts)
        sizes += behind
        ends = np.cumsum(sizes, dtype=np.int32)
        self.drawn_at = np.where(drawing, ends - 1 - behind, -1)
        count = int(ends[-1]) if len(ends) else 0
        self.rows = np.zeros(count, np.int32)
        # A row's draws are its last wanted rows, after its last tokens.
        draws = drawing + behind
        numbers = np.arange(int(draws.sum()), dtype=np.int32)
        numbers -= np.repeat((np.cumsum(draws) - draws).astype(np.int32), draws)  # in their rows
        at = np.repeat(self.drawn_at, draws) + numbers
        self.rows[at] = np.repeat(lasts - behind, draws) + numbers
        self.targets = np.full(count, -1, np.int32)
        self.tops = np.zeros(count, np.int32)
        for row, targets in scores.items():
            first, last = int(ends[row] - sizes[row]), int(lasts[row])
            self.rows[first : first + len(targets)] = range(last + 1 - len(targets), last + 1)
            self.targets[first : first + len(targets)] = targets
        for row, extra in plan.extras.items():
            self.tops[ends[row] - sizes[row] : ends[row]] = extra.top_logprobs
        self.scored = np.flatnonzero(self.targets >= 0).astype(np.int32)
        self.topped = np.flatnonzero(self.tops).astype(np.int32)

    def _find_draws(self) -> None:
        """The draws that are more than the argmax of the unchanged logits."""
        plan = self.plan
        rows: list[int] = [row for row, draw in enumerate(plan.draws) if draw and draw.samples]
        if plan.extras or plan.drafts:
            adjusting = [row for row, e in plan.extras.items() if e.adjusts and plan.draws[row]]
            adjusting += [row for row, some in self.places.items() if any(e.adjusts for e in some)]
            rows = sorted({*rows, *adjusting})
        params = [draw for row in rows if (draw := plan.draws[row]) is not None]
        uniforms = [plan.uniforms[row] for row in rows]
        self.sampled: Ints = self.drawn_at[rows]
        places = [0] * len(rows)
        if plan.drafts:
            sizes = [len(plan.drafts.get(row, ())) + 1 for row in rows]
            places = [place for size in sizes for place in range(size)]
            self.sampled = np.repeat(self.sampled, sizes) + np.array(places, np.int32)
            params = [draw for draw, size in zip(params, sizes, strict=True) for _ in range(size)]
            uniforms = [
                uniform
                for row, first in zip(rows, uniforms, strict=True)
                for uniform in (first, *(plan.drafts[row].uniforms if row in plan.drafts else ()))
            ]
            rows = [row for row, size in zip(rows, sizes, strict=True) for _ in range(size)]
        self.draws: Doubles = np.array([draw.filters for draw in params], np.float64)
        self.draws = self.draws.reshape(-1, len(FILTERS))
        self.uniforms: Doubles = np.array(uniforms, np.float64)
        is_special = bool(plan.extras or plan.drafts)
        self.adjusting: list[tuple[int, int, int]] = [
            (number, row, place)
            for number, row, place, draw in zip(
                self.sampled.tolist(), rows, places, params, strict=True
            )
            if draw.adjusts or (is_special and self.extra_at(row, place).adjusts)
        ]

    def extra_at(self, row: int, place: int) -> RowExtra:
        """What a draw depends on besides its parameters."""
        if row in self.places:
            return self.places[row][place]
        return self.plan.extras.get(row, NO_EXTRA)

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
