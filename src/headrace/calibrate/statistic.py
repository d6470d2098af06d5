"""Medians and means, and how far values are spread around them. Knows numbers only."""

from __future__ import annotations

import statistics
from collections.abc import Sequence

CUT = 2.5  # medians: what is above it counts as so much


def median(values: Sequence[float]) -> float:
    return statistics.median(values)


def mean(values: Sequence[float]) -> float:
    """A mean, since throughput and queues are made of means, with what is far off cut: a stall of
    the machine in one of a few rounds says nothing of a step."""
    most = CUT * median(values)
    return statistics.fmean(min(value, most) for value in values)


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
