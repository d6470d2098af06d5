"""Medians, and how far values are spread around them. Knows numbers only."""

from __future__ import annotations

import statistics
from collections.abc import Sequence


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
