"""Percentiles with intervals, and refusals: what a number of values can say, and what it can't.

A percentile's interval is a pair of order statistics (the binomial distribution, no assumption on
the shape). Where even the least and the largest value do not enclose it with 95%, the percentile is
refused: P99 needs 299 values, P95 59, P90 29. Knows numbers only.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass

from headrace.core.ratio import student

CONFIDENCE = 0.95
LEAST_GROUPS = 10  # two for each of five batches


@dataclass(frozen=True, slots=True, kw_only=True)
class Estimate:
    """A value, and the interval that holds it with 95%."""

    value: float
    low: float
    high: float

    @property
    def half_width(self) -> float:
        """Of the interval, divided by the value."""
        return (self.high - self.low) / 2 / self.value if self.value > 0 else math.inf

    def scaled(self, factor: float) -> Estimate:
        return Estimate(value=self.value * factor, low=self.low * factor, high=self.high * factor)


def quantile(ordered: Sequence[float], share: float) -> float:
    """Between two values by their distance, as most tools do."""
    place = share * (len(ordered) - 1)
    below = math.floor(place)
    above = min(below + 1, len(ordered) - 1)
    return ordered[below] + (ordered[above] - ordered[below]) * (place - below)


def least_count(share: float) -> int:
    """How many values this percentile needs."""
    count = 2
    while 1 - share**count - (1 - share) ** count < CONFIDENCE:
        count += 1
    return count


def percentile(ordered: Sequence[float], share: float) -> Estimate | None:
    """Of sorted values; None: there are too few."""
    count = len(ordered)
    if count < 2 or 1 - share**count - (1 - share) ** count < CONFIDENCE:
        return None
    low, high = _ranks(count, share)
    return Estimate(value=quantile(ordered, share), low=ordered[low], high=ordered[high])


def _ranks(count: int, share: float) -> tuple[int, int]:
    """Two places among sorted values (from 0) that enclose the percentile with 95%."""
    both = 1 - CONFIDENCE
    # What the largest value alone leaves out above, and the least one below: if that is more than
    # half of what may be missed, the other side gets the rest.
    above, below = share**count, (1 - share) ** count
    low_tail = both - above if above > both / 2 else both / 2
    high_tail = both - below if below > both / 2 else max(both / 2, above)
    low, at_most = 0, 0.0  # P(at most k values lie below the percentile), by the binomial
    for k in range(count):
        at_most += math.exp(
            math.lgamma(count + 1) - math.lgamma(k + 1) - math.lgamma(count - k + 1)
            + k * math.log(share) + (count - k) * math.log1p(-share)
        )  # fmt: skip
        if at_most <= low_tail:
            low = k
        if at_most >= 1 - high_tail:
            return low, k
    return low, count - 1


def mean(values: Sequence[float]) -> Estimate | None:
    """By Student's t; None: fewer than three values."""
    if len(values) < 3:
        return None
    middle = statistics.fmean(values)
    reach = student(len(values) - 1) * statistics.stdev(values) / math.sqrt(len(values))
    return Estimate(value=middle, low=middle - reach, high=middle + reach)


def grouped_percentile(groups: Sequence[Sequence[float]], share: float) -> Estimate | None:
    """Of values that are alike within a group, such as the gaps of one answer: the interval comes
    from percentiles of batches of groups, and is None where these are too few to say."""
    every = sorted(value for group in groups for value in group)
    batches = min(20, len(groups) // 2)
    if percentile(every, share) is None or len(groups) < LEAST_GROUPS:
        return None
    found = []
    for number in range(batches):
        batch = sorted(value for group in groups[number::batches] for value in group)
        if batch:
            found.append(quantile(batch, share))
    spread = mean(found)
    if spread is None:
        return None
    reach = (spread.high - spread.low) / 2
    middle = quantile(every, share)
    return Estimate(value=middle, low=max(0.0, middle - reach), high=middle + reach)


@dataclass(frozen=True, slots=True, kw_only=True)
class Slope:
    value: float
    low: float
    high: float

    @property
    def is_positive(self) -> bool:
        """Significantly: the whole interval is above 0."""
        return self.low > 0


def slope(xs: Sequence[float], ys: Sequence[float]) -> Slope | None:
    """Of the line through the points (least squares); None: fewer than three of them."""
    count = len(xs)
    if count < 3 or max(xs) == min(xs):
        return None
    fit = statistics.linear_regression(xs, ys)
    middle = statistics.fmean(xs)
    spread = sum((x - middle) ** 2 for x in xs)
    missed = sum((y - fit.intercept - fit.slope * x) ** 2 for x, y in zip(xs, ys, strict=True))
    reach = student(count - 2) * math.sqrt(missed / (count - 2) / spread)
    return Slope(value=fit.slope, low=fit.slope - reach, high=fit.slope + reach)
