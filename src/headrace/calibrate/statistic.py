"""Medians, and how far values are spread around them. Knows numbers only."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from itertools import pairwise


def median(values: Sequence[float]) -> float:
    return statistics.median(values)


def spread(values: Sequence[float]) -> float:
    """Half of the range between the quartiles, divided by the median; of fewer than four values,
    half of their whole range."""
    middle = statistics.median(values)
    if middle <= 0:
        return 0.0
    if len(values) < 4:
        return (max(values) - min(values)) / 2 / middle
    low, _, high = statistics.quantiles(values, n=4, method="inclusive")
    return (high - low) / 2 / middle


def relative_parts(values: Sequence[float], count: int = 20) -> tuple[float, ...]:
    """The values in order of size, in so many equal parts: each part's mean, divided by the median
    of all. Drawing one of them has the mean of all values, whatever their extremes are."""
    ordered = sorted(values)
    middle = statistics.median(ordered)
    if len(ordered) < count or middle <= 0:
        return ()
    ends = [round(at * len(ordered) / count) for at in range(count + 1)]
    return tuple(statistics.fmean(ordered[low:high]) / middle for low, high in pairwise(ends))
