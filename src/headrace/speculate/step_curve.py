"""The time of a step as a function of how many tokens it draws and how much they attend to.

Learnt from the steps themselves, as they come: for each number of drawn tokens (ranges, where
numbers are large) the mean time at its mean attention, and for all of them together what one more
attended token costs. More rows never take less time: cells that say so, by noise, are averaged.
Between numbers that were seen it interpolates, and what was not seen for long is forgotten. Steps
that compute prompts are not learnt from: their rows draw nothing. Knows seconds and counts, no
plans.
"""

from __future__ import annotations

from bisect import bisect_left

SMOOTHING = 0.2
FADE = 0.98  # of what is known about attention's cost, with each step
# A step that took so many times what was expected says something about the machine, not the curve.
OUTLIER = 3.0
# Before any larger step was seen: the fixed part of a step costs as much as so many rows.
GUESSED_ROWS = 8.0
MOST_ATTENTION = 0.7  # of the time of a step, in any cell
# Keys and values are read once for all rows of a sequence, so what a guess attends to counts for
# less. On two cores a second row of each of 16 sequences took a quarter of what the first one did.
GUESS_ATTENDS = 0.25
# A cell that was not seen in so many steps is forgotten. Not many: a cell that was learnt while the
# machine was busy keeps guesses off, and with them every step that could correct it.
KEPT_STEPS = 512
_FINE = 16  # up to here every number has its own cell, then there are eight to a doubling


def cell_of(rows: int) -> int:
    if rows <= _FINE:
        return rows
    doublings = rows.bit_length() - _FINE.bit_length()
    return _FINE + 8 * doublings + ((rows >> (doublings + 1)) - _FINE // 2)


class StepCurve:
    def __init__(self) -> None:
        # One entry for each cell that was seen, in ascending order.
        self._cells: list[int] = []
        self._rows: list[float] = []  # means
        self._times_s: list[float] = []
        self._attended: list[float] = []
        self._seen_at: list[int] = []  # the last step
        self._weights: list[float] = []  # how many steps each mean stands for
        self._steps = 0
        self._spread = self._together = 0.0  # sums of squares and products of deviations
        self._bare_s: list[float] = []  # times without attention; empty: to be computed
        self._each_s = 0.0  # what was taken off for each attended token

    def __len__(self) -> int:
        """Cells that were seen."""
        return len(self._cells)

    def has_seen(self, rows: int) -> bool:
        at = bisect_left(self._cells, cell_of(rows))
        return at < len(self._cells) and self._cells[at] == cell_of(rows)

    def learn(self, rows: int, attended: float, seconds: float) -> None:
        """A step drew `rows` tokens, which attended to so many tokens together."""
        expected_s = self.step_s(rows, attended)
        if expected_s is not None:
            seconds = min(seconds, OUTLIER * expected_s)
        self._steps += 1
        cell = cell_of(rows)
        at = bisect_left(self._cells, cell)
        if at == len(self._cells) or self._cells[at] != cell:
            self._cells.insert(at, cell)
            self._rows.insert(at, float(rows))
            self._times_s.insert(at, seconds)
            self._attended.insert(at, attended)
            self._seen_at.insert(at, 0)
            self._weights.insert(at, 1.0)
        else:
            aside, off_s = attended - self._attended[at], seconds - self._times_s[at]
            self._spread = self._spread * FADE + aside * aside
            self._together = self._together * FADE + aside * off_s
            self._times_s[at] += SMOOTHING * off_s
            self._attended[at] += SMOOTHING * aside
            self._rows[at] += SMOOTHING * (rows - self._rows[at])
            self._weights[at] += SMOOTHING * (1 / SMOOTHING - self._weights[at])
        self._seen_at[at] = self._steps
        self._bare_s = []
        if self._steps % (KEPT_STEPS // 8) == 0:
            self._forget()

    @property
    def attended_s(self) -> float:
        """What one more attended token adds to a step."""
        if self._spread <= 0:
            return 0.0
        # A machine that gets slower while contexts grow looks like dear attention.
        pairs = zip(self._times_s, self._attended, strict=True)
        most_s = min((time_s / attended for time_s, attended in pairs if attended > 0), default=0.0)
        return max(0.0, min(self._together / self._spread, MOST_ATTENTION * most_s))

    def step_s(self, rows: int, attended: float) -> float | None:
        """The expected time of a step; None before any was seen."""
        if not self._cells:
            return None
        if not self._bare_s:
            each_s = self._each_s = self.attended_s
            pairs = zip(self._times_s, self._attended, strict=True)
            bare_s = [time_s - each_s * attended for time_s, attended in pairs]
            self._bare_s = _rising(bare_s, self._weights)
        bare_s, known, each_s = self._bare_s, self._rows, self._each_s
        at = bisect_left(known, rows)
        if at < len(known) and known[at] == rows:
            found_s = bare_s[at]
        elif at == 0:
            # Fewer than any seen: in proportion, above the fixed part that is assumed.
            found_s = bare_s[0] * (GUESSED_ROWS + rows) / (GUESSED_ROWS + known[0])
        elif at == len(known):
            found_s = bare_s[-1] + self._slope_s() * (rows - known[-1])
        else:
            share = (rows - known[at - 1]) / (known[at] - known[at - 1])
            found_s = bare_s[at - 1] + (bare_s[at] - bare_s[at - 1]) * share
        return max(found_s + each_s * attended, 1e-9)

    def _slope_s(self) -> float:
        """What a row adds beyond the largest step that was seen: as between it and one that is well
        below it, or as is assumed where there is none."""
        bare_s, known = self._bare_s, self._rows
        for at in range(len(known) - 2, -1, -1):
            apart = known[-1] - known[at]
            if apart >= max(1.0, known[-1] / 4):
                return max(0.0, (bare_s[-1] - bare_s[at]) / apart)
        return bare_s[-1] / (GUESSED_ROWS + known[-1])

    def _forget(self) -> None:
        oldest = self._steps - KEPT_STEPS
        for at in range(len(self._cells) - 1, -1, -1):
            if self._seen_at[at] < oldest:
                del self._cells[at], self._rows[at], self._times_s[at]
                del self._attended[at], self._seen_at[at], self._weights[at]


def _rising(values: list[float], weights: list[float]) -> list[float]:
    """The nearest values that never fall, in the sense of least squares: runs that fall become
    their weighted mean."""
    runs: list[tuple[float, float, int]] = []  # mean, weight, length
    for value, weight in zip(values, weights, strict=True):
        length = 1
        while runs and runs[-1][0] > value:
            mean, more, longer = runs.pop()
            value = (mean * more + value * weight) / (more + weight)
            weight, length = weight + more, length + longer
        runs.append((value, weight, length))
    return [value for value, _, length in runs for _ in range(length)]
