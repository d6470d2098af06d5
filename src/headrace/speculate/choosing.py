"""How many tokens to guess for each sequence of a step: as many as give the most tokens a second.

A guess is a row more in the step. What it gives is the chance that it and all guesses before it are
right; what it costs is the step's time with that row. Both are estimates that others learn
(chances.py, step_curve.py). Pure functions of values: the engine, the simulator and the tests use
the same.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from headrace.speculate.step_curve import GUESS_ATTENDS, cell_of

# Guesses must promise to be so much faster than none, since estimates are noisy: more to begin with
# them than to go on.
BEGIN_MARGIN = 0.05
STAY_MARGIN = 0.02
LEAST_GAIN = 0.05  # a row that gives fewer tokens than this never pays

# The time of a step with so many rows that attend to so many tokens together.
StepTime = Callable[[int, float], float]


@dataclass(frozen=True, slots=True, kw_only=True)
class Candidates:
    """A step without guesses, and what guesses would give."""

    rows: int
    attended: float
    # For each sequence, for each of its guesses: the chance that it and all before it are right.
    gains: Sequence[Sequence[float]]
    contexts: Sequence[int]  # tokens that a row of each sequence attends to
    most_rows: int  # guesses in all


@dataclass(frozen=True, slots=True, kw_only=True)
class Choice:
    counts: list[int]  # guesses for each sequence
    gain: float  # tokens a second against none; 1.0 where there are none


def choose(
    step: Candidates,
    step_s: StepTime,
    *,
    margin: float,
    draft_s: float = 0.0,
    added_s: float = 0.0,
) -> Choice:
    """The guesses with the most tokens a second, or none if they gain less than `margin`. `draft_s`
    is the time to draft one more token for all sequences, `added_s` that of guessing at all."""
    none = Choice(counts=[0] * len(step.gains), gain=1.0)
    plain_s = step_s(step.rows, step.attended)
    deepest = max((len(each) for each in step.gains), default=0)
    if not deepest or step.most_rows < 1 or not step.rows:
        return none
    best, best_rate = none, (1 + margin) * step.rows / plain_s
    # Drafting takes one step of the draft model for each token of the longest draft. Where it takes
    # no time there is no reason to look at shorter ones.
    for depth in range(1, deepest + 1) if draft_s else (deepest,):
        counts, rate = _best_within(step, step_s, depth, depth * draft_s + added_s)
        if rate > best_rate:
            best, best_rate = Choice(counts=counts, gain=rate * plain_s / step.rows), rate
    return best


def _best_within(
    step: Candidates, step_s: StepTime, depth: int, added_s: float
) -> tuple[list[int], float]:
    """The best rate with at most `depth` guesses a sequence. Guesses are taken by what they give:
    each costs about the same, and none gives more than the one before it."""
    ranked = sorted(
        (
            (gain, -at)
            for at, gains in enumerate(step.gains)
            for gain in gains[:depth]
        ),
        reverse=True,
    )[: step.most_rows]  # fmt: skip
    counts = [0] * len(step.gains)
    best_counts, best_rate = counts, 0.0
    tokens, attended = float(step.rows), step.attended
    last = len(ranked)
    for taken, (gain, minus_at) in enumerate(ranked, start=1):
        counts[-minus_at] += 1
        tokens += gain
        attended += GUESS_ATTENDS * step.contexts[-minus_at]
        rows = step.rows + taken
        if taken < last and cell_of(rows) == cell_of(rows + 1):
            continue  # the curve does not tell these apart
        rate = tokens / (step_s(rows, attended) + added_s)
        if rate > best_rate:
            best_counts, best_rate = list(counts), rate
    return best_counts, best_rate


def needed_chance(rows: int, attended: float, step_s: StepTime, most_rows: int) -> float:
    """The mean chance that guesses need at least to pay in a step of so many rows. Above 1: none
    can, however good."""
    plain_s = step_s(rows, attended)
    each = GUESS_ATTENDS * attended / max(rows, 1)
    least, more = float("inf"), 1
    while more <= most_rows:
        grown = step_s(rows + more, attended + more * each) / plain_s
        least = min(least, (grown - 1) * rows / more)
        more = more + 1 if more < 8 else more * 5 // 4
    return least
