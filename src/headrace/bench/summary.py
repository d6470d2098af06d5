"""A run in figures: throughput over the wall clock, latencies with intervals, goodput, failures.

Only whole answers have latencies; failures stand apart, by cause. Throughput is tokens divided by
the time from the first scheduled request to the last token, never a mean of rates. Knows no output
format.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from headrace.bench.health import Health, judge
from headrace.bench.interval import Estimate, grouped_percentile, mean, percentile, quantile
from headrace.bench.record import CountedBy, Record
from headrace.client.answer import Failure
from headrace.workload.slo import Slo

SHARES = (0.5, 0.9, 0.95, 0.99)
_SLICES = 10


@dataclass(frozen=True, slots=True, kw_only=True)
class Spread:
    """Of one kind of time, in seconds. A percentile that the values can't give is None."""

    count: int
    mean: float
    deviation: float
    median: float
    percentiles: dict[float, Estimate | None]  # by share
    groups: int | None = None  # whose values are alike, such as the gaps of one answer


def spread_of(values: Sequence[float]) -> Spread | None:
    if not values:
        return None
    ordered = sorted(values)
    return _spread(ordered, {share: percentile(ordered, share) for share in SHARES}, None)


def grouped_spread(groups: Sequence[Sequence[float]]) -> Spread | None:
    groups = [group for group in groups if group]
    ordered = sorted(value for group in groups for value in group)
    if not ordered:
        return None
    found = {share: grouped_percentile(groups, share) for share in SHARES}
    return _spread(ordered, found, len(groups))


def _spread(
    ordered: Sequence[float], found: dict[float, Estimate | None], groups: int | None
) -> Spread:
    middle = math.fsum(ordered) / len(ordered)
    return Spread(
        count=len(ordered),
        mean=middle,
        deviation=math.sqrt(math.fsum((one - middle) ** 2 for one in ordered) / len(ordered)),
        median=quantile(ordered, 0.5),
        percentiles=found,
        groups=groups,
    )


@dataclass(frozen=True, kw_only=True)
class Summary:
    """Figures of the records of one run, without its warm-up."""

    records: Sequence[Record]
    health: Health
    slo: Slo | None = None
    most_at_once: int = 0
    samples: Sequence[tuple[float, int]] = ()  # (when, requests at once)
    notes: tuple[str, ...] = ()
    began_unix_s: float = 0.0
    ended_by: str = ""  # why it ended before its time; empty: it did not
    has_given_up: bool = False  # it ended because the endpoint only failed

    @cached_property
    def good(self) -> list[Record]:
        return [one for one in self.records if one.is_good]

    @cached_property
    def failures(self) -> dict[str, int]:
        """By cause; 429 is one of its own."""
        found = Counter(_cause(one) for one in self.records if not one.is_good)
        return dict(found.most_common())

    @cached_property
    def failures_said(self) -> dict[str, str]:
        """By cause: what the endpoint, or the connection, said most often."""
        said: dict[str, Counter[str]] = {}
        for one in self.records:
            detail, cause = one.answer.detail, _cause(one)
            if not one.is_good and detail:
                detail = detail.removeprefix(f"{cause[-3:]}: ")  # of an HTTP status
                said.setdefault(cause, Counter())[detail] += 1
        return {cause: found.most_common(1)[0][0] for cause, found in said.items()}

    @property
    def failed(self) -> int:
        return len(self.records) - len(self.good)

    @property
    def rate_limited(self) -> int:
        return sum(one.answer.failure is Failure.RATE_LIMITED for one in self.records)

    @cached_property
    def wall_s(self) -> float:
        """From the first scheduled request to the last token of any."""
        if not self.good:
            return 0.0
        start_s = min(one.scheduled_s for one in self.records)
        return max(one.last_s for one in self.good) - start_s

    @cached_property
    def output_tokens(self) -> int:
        return sum(one.tokens for one in self.good)

    @cached_property
    def input_tokens(self) -> int:
        return sum(one.prompt_tokens for one in self.good)

    @property
    def output_tokens_s(self) -> float:
        return self.output_tokens / self.wall_s if self.wall_s else 0.0

    @property
    def requests_s(self) -> float:
        return len(self.good) / self.wall_s if self.wall_s else 0.0

    @property
    def total_tokens_s(self) -> float:
        return (self.input_tokens + self.output_tokens) / self.wall_s if self.wall_s else 0.0

    @cached_property
    def output_rate(self) -> Estimate | None:
        """The rate's interval: from ten slices of the run, which are about independent."""
        if not self.wall_s or len(self.good) < _SLICES:
            return None
        start_s = min(one.scheduled_s for one in self.records)
        slice_s = self.wall_s / _SLICES
        tokens = [0.0] * _SLICES
        for one in self.good:
            times = one.answer.times_s
            for at_s in times:
                place = min(_SLICES - 1, int((at_s - start_s) / slice_s))
                tokens[place] += one.tokens / len(times)
        found = mean([each / slice_s for each in tokens])
        if found is None:
            return None
        reach = (found.high - found.low) / 2
        rate = self.output_tokens_s
        return Estimate(value=rate, low=max(0.0, rate - reach), high=rate + reach)

    @cached_property
    def within(self) -> list[Record]:
        slo = self.slo
        if slo is None:
            return []
        return [
            one
            for one in self.good
            if slo.is_met_by(ttft_s=one.ttft_s, tpot_s=one.tpot_s or 0.0, e2e_s=one.e2e_s)
        ]

    @property
    def met_share(self) -> float | None:
        """Of all requests: one that failed has missed."""
        if self.slo is None or not self.records:
            return None
        return len(self.within) / len(self.records)

    @property
    def is_met(self) -> bool | None:
        return None if self.slo is None else (self.met_share or 0.0) >= self.slo.share

    @property
    def goodput_s(self) -> float | None:
        if self.slo is None:
            return None
        return len(self.within) / self.wall_s if self.wall_s else 0.0

    @cached_property
    def spreads(self) -> dict[str, Spread | None]:
        """By name: those from the scheduled time, then service times, then what is per token."""
        good = self.good
        return {
            "ttft": spread_of([one.ttft_s for one in good]),
            "visible": spread_of([v for one in good if (v := one.visible_s) is not None]),
            "tpot": spread_of([v for one in good if (v := one.tpot_s) is not None]),
            "itl": grouped_spread([one.gaps_s for one in good]),
            "chunk_gap": grouped_spread([one.chunk_gaps_s for one in good]),
            "e2el": spread_of([one.e2e_s for one in good]),
            "service_ttft": spread_of([one.service_ttft_s for one in good]),
            "service_e2el": spread_of([one.service_s for one in good]),
        }

    @cached_property
    def most_tokens_in_a_second(self) -> float:
        """Tokens by the second in which they came."""
        seconds: Counter[int] = Counter()
        for one in self.good:
            at_s = one.first_s
            seconds[int(at_s)] += 1
            for gap_s in one.gaps_s:
                at_s += gap_s
                seconds[int(at_s)] += 1
        return float(max(seconds.values(), default=0))

    @property
    def counted_by(self) -> dict[CountedBy, int]:
        return dict(Counter(one.counted_by for one in self.good))

    @property
    def disagreed(self) -> tuple[int, int] | None:
        """Requests whose usage is not the tokenizer's count: (how many, of how many)."""
        both = [
            one for one in self.good if one.retokenized is not None and one.answer.output_tokens
        ]
        if not both:
            return None
        return sum(one.retokenized != one.answer.output_tokens for one in both), len(both)

    @property
    def cached_share(self) -> float | None:
        """Of prompt tokens, by the endpoint's usage; None: it does not say."""
        told = [one for one in self.good if one.answer.cached_tokens is not None]
        every = sum(one.prompt_tokens for one in told)
        return sum(one.answer.cached_tokens or 0 for one in told) / every if every else None


def _cause(record: Record) -> str:
    answer = record.answer
    if answer.failure is Failure.HTTP:
        return f"HTTP {answer.detail[:3]}"
    return str(answer.failure or Failure.EMPTY)


def summarize(
    records: Sequence[Record],
    *,
    lags_s: Sequence[float],
    cpu_share: float,
    **more: Any,
) -> Summary:
    """Health is judged against this run's own median TTFT; `more` are fields of the summary."""
    ttfts = sorted(one.ttft_s for one in records if one.is_good)
    health = judge(
        lags_s,
        [one.late_s for one in records],
        cpu_share,
        quantile(ttfts, 0.5) if ttfts else None,
    )
    return Summary(records=records, health=health, **more)


def is_narrow(records: Sequence[Record], share: float) -> bool:
    """Whether medians of TTFT and TPOT are known within this share of themselves."""
    good = [one for one in records if one.is_good]
    kinds: tuple[Callable[[Record], float | None], ...] = (
        lambda one: one.ttft_s,
        lambda one: one.tpot_s,
    )
    if len(good) < 30:
        return False
    for kind in kinds:
        values = sorted(value for one in good if (value := kind(one)) is not None)
        found = percentile(values, 0.5) if values else None
        if found is not None and found.half_width > share:
            return False
    return True
