"""A histogram that is recorded once and can be exported under several metric names.

The one in prometheus_client belongs to a single name. Knows numbers; neither names nor labels.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence
from itertools import accumulate, pairwise

# From 1 ms (a token of a small model) to 60 s (about as long as a person waits for an answer). Each
# decade has 1, 1.5, 2, 3, 5, 7: there is a bound at the usual objectives (50 ms, 200 ms, 1 s, 5 s),
# so that the number of requests that met one is exact, and other quantiles are off by a third at
# most. The two above a minute tell a slow batch job from one that hangs.
TIME_BOUNDS_S = (
    *(round(step * 10.0**decade, 6) for decade in (-3, -2, -1, 0) for step in (1, 1.5, 2, 3, 5, 7)),
    *(10.0, 15.0, 20.0, 30.0, 45.0, 60.0, 120.0, 300.0),
)
# What the page shows is worked out from buckets of so many parts: off by some percent at most.
TIME_PARTS = 8
# Lengths double: what matters about a prompt is its order of magnitude.
TOKEN_BOUNDS = tuple(float(1 << power) for power in range(18))
COUNT_BOUNDS = (1.0, 2.0, 5.0, 10.0, 20.0)  # continuations of a request, as vLLM's
# vLLM's bounds for the tokens of a step, extended by its series of 1, 2, 5 for long contexts.
STEP_TOKEN_BOUNDS = (1.0, *(float(1 << power) for power in range(3, 15)))
ANSWER_TOKEN_BOUNDS = tuple(step * 10.0**decade for decade in range(6) for step in (1, 2, 5))


def divided(bounds: tuple[float, ...], parts: int) -> tuple[float, ...]:
    """Each bucket in so many parts of one ratio, the first, which begins at 0, in equal ones."""
    found = [bounds[0] * part / parts for part in range(1, parts)]
    for low, high in pairwise(bounds):
        found += [low, *(low * (high / low) ** (part / parts) for part in range(1, parts))]
    return (*found, bounds[-1])


class Histogram:
    __slots__ = ("_bounds", "_counts", "_edges", "_parts", "sum")

    def __init__(
        self,
        bounds: tuple[float, ...],
        counts: Sequence[float] = (),
        total: float = 0.0,
        *,
        parts: int = 1,
    ) -> None:
        """Empty, or with the `counts` and the sum of another histogram. `parts`: each bucket is
        recorded in so many, for those who want quantiles nearer than what is exported."""
        self._bounds, self._parts = bounds, parts
        self._edges = bounds if parts == 1 else divided(bounds, parts)
        self._counts = list(counts) or [0] * (len(self._edges) + 1)
        self.sum = total

    def observe(self, value: float) -> None:
        self._counts[bisect_left(self._edges, value)] += 1
        self.sum += value

    @property
    def counts(self) -> list[float]:
        """How many values fell between two neighbouring bounds; the last count is above all."""
        parts, found = self._parts, self._counts
        if parts == 1:
            return list(found)
        return [*(sum(found[at : at + parts]) for at in range(0, len(found) - 1, parts)), found[-1]]

    @property
    def edges(self) -> tuple[float, ...]:
        """The bounds of all parts."""
        return self._edges

    @property
    def part_counts(self) -> list[float]:
        """As `counts`, between neighbouring edges."""
        return list(self._counts)

    def buckets(self) -> list[tuple[str, float]]:
        """(upper bound, number of values up to it), as Prometheus expects."""
        bounds = [*(repr(bound) for bound in self._bounds), "+Inf"]
        return list(zip(bounds, map(float, accumulate(self.counts)), strict=True))


def quantile(bounds: Sequence[float], counts: Sequence[float], share: float) -> float | None:
    """The value below which that share of the counted values lies, as Prometheus works it out: even
    inside a bucket, and the last bound for what is above all. None where nothing was counted."""
    whole = sum(counts)
    if whole <= 0:
        return None
    wanted, below = share * whole, 0.0
    for place, count in enumerate(counts):
        if count > 0 and below + count >= wanted:
            if place >= len(bounds):
                return bounds[-1]
            low = bounds[place - 1] if place else 0.0
            return low + (bounds[place] - low) * max(0.0, wanted - below) / count
        below += count
    return bounds[-1]
