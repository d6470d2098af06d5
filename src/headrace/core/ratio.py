"""Whether two samples differ: Welch's interval of the ratio of their means, and the verdict.

Logarithms are compared, so that the interval holds the ratio of geometric means: times and rates
differ by factors. Two medians alone are never a verdict. Knows nothing of what was measured.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from enum import StrEnum
from functools import lru_cache

RISK = 0.05  # that the interval does not hold the true ratio
LEAST = 3  # values on each side
_STEPS = 64  # of Simpson's rule
_MANY = 200.0  # degrees of freedom, from which a series is as exact


class Verdict(StrEnum):
    BETTER = "better"
    WORSE = "worse"
    INCONCLUSIVE = "inconclusive"


def verdict_of(low: float, high: float) -> Verdict:
    """Of an interval of how many times as good something is."""
    if low > 1:
        return Verdict.BETTER
    return Verdict.WORSE if high < 1 else Verdict.INCONCLUSIVE


def ratio_of_means(
    before: Sequence[float], after: Sequence[float], risk: float = RISK
) -> tuple[float, float] | None:
    """An interval of mean(after) / mean(before), geometric; None: too few values, or one that has
    no logarithm."""
    if min(len(before), len(after)) < LEAST or min((*before, *after)) <= 0:
        return None
    logs = [[math.log(value) for value in side] for side in (before, after)]
    centre = statistics.fmean(logs[1]) - statistics.fmean(logs[0])
    parts = [statistics.variance(side) / len(side) for side in logs]
    whole = sum(parts)
    if whole == 0:
        return math.exp(centre), math.exp(centre)
    freedom = whole**2 / sum(
        part**2 / (len(side) - 1) for part, side in zip(parts, logs, strict=True)
    )
    reach = student(max(freedom, 1.0), risk) * math.sqrt(whole)
    return math.exp(centre - reach), math.exp(centre + reach)


@lru_cache(maxsize=512)
def student(freedom: float, risk: float = RISK) -> float:
    """Student's t that is passed, on either side, with this probability.

    With t = √f tan(u) the density becomes cos(u) to the power of f - 1. Its integral rises ever
    more slowly, so that Newton's steps from 0 on come near and never go too far.
    """
    if freedom >= _MANY:
        normal = statistics.NormalDist().inv_cdf(1 - risk / 2)
        first, second = normal**3 + normal, 5 * normal**5 + 16 * normal**3 + 3 * normal
        return normal + first / (4 * freedom) + second / (96 * freedom**2)
    whole = (
        math.sqrt(math.pi) / 2 * math.exp(math.lgamma(freedom / 2) - math.lgamma(freedom / 2 + 0.5))
    )
    at = 0.0
    for _ in range(50):
        step = ((1 - risk) * whole - _area(at, freedom)) / math.pow(math.cos(at), freedom - 1)
        at = min(at + step, math.pi / 2 - 1e-9)
        if abs(step) < 1e-10:
            break
    return math.sqrt(freedom) * math.tan(at)


def _area(end: float, freedom: float) -> float:
    width = end / _STEPS
    heights = [math.pow(math.cos(place * width), freedom - 1) for place in range(_STEPS + 1)]
    inner = 4 * sum(heights[1:-1:2]) + 2 * sum(heights[2:-1:2])
    return (heights[0] + inner + heights[-1]) * width / 3
