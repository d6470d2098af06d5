"""A histogram's buckets: what was added between two readings, and quantiles with their resolution.

A quantile of buckets is known only up to the bucket that it is in: it comes as an interval, and a
rule that needs a number takes the end that speaks against its finding.
"""

from __future__ import annotations

import math
from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class Quantile:
    """Between two bounds of buckets; `high` is infinite in the last bucket."""

    low: float
    high: float

    @property
    def middle(self) -> float:
        """A single number to show: by halves on a log scale, the low end where there is no high."""
        if math.isinf(self.high):
            return self.low
        return math.sqrt(self.low * self.high) if self.low > 0 else self.high / 2

    def shown(self, scale: float = 1.0, unit: str = "") -> str:
        if math.isinf(self.high):
            return f"over {self.low * scale:,.4g}{unit}"
        return f"{self.low * scale:,.4g} to {self.high * scale:,.4g}{unit}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Buckets:
    """Counts by upper bound, not cumulative, in ascending order; the last bound is infinite."""

    bounds: tuple[float, ...]
    counts: tuple[float, ...]
    total: float  # the sum of all values

    @property
    def count(self) -> float:
        return sum(self.counts)

    @property
    def mean(self) -> float | None:
        return self.total / self.count if self.count > 0 else None

    def quantile(self, share: float) -> Quantile | None:
        """The bucket that holds the value below which `share` of all values lie."""
        wanted = share * self.count
        if self.count <= 0:
            return None
        seen, low = 0.0, 0.0
        for bound, count in zip(self.bounds, self.counts, strict=True):
            seen += count
            if count > 0 and seen >= wanted - 1e-9:
                return Quantile(low=low, high=bound)
            low = bound if not math.isinf(bound) else low
        return None

    def about(self, share: float) -> float | None:
        """A quantile as one number: as far into its bucket as its rank is."""
        wanted, before = share * self.count, 0.0
        found = self.quantile(share)
        if found is None or math.isinf(found.high):
            return None if found is None else found.low
        for bound, count in zip(self.bounds, self.counts, strict=True):
            if bound == found.high:
                return found.low + (found.high - found.low) * (wanted - before) / count
            before += count
        return found.middle

    def share_at_most(self, value: float) -> float | None:
        """The share of values that are certainly at most this."""
        if self.count <= 0:
            return None
        under = sum(c for b, c in zip(self.bounds, self.counts, strict=True) if b <= value)
        return under / self.count


def of_cumulative(cumulative: dict[float, float], total: float) -> Buckets:
    """From `le` counts, which include all smaller ones. Never negative, whatever was exported."""
    bounds = tuple(sorted(cumulative))
    counts, last = [], 0.0
    for bound in bounds:
        counts.append(max(0.0, cumulative[bound] - last))
        last = max(last, cumulative[bound])
    return Buckets(bounds=bounds, counts=tuple(counts), total=total)


def added(before: Buckets | None, after: Buckets) -> Buckets:
    """What came between two readings. If anything fell, the engine was restarted in between, and
    everything that `after` has came since."""
    if before is None or before.bounds != after.bounds:
        return after
    counts = tuple(b - a for a, b in zip(before.counts, after.counts, strict=True))
    if min(counts, default=0.0) < 0:
        return after
    return Buckets(bounds=after.bounds, counts=counts, total=after.total - before.total)
