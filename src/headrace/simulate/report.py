"""What came of simulated requests: latencies, rates, goodput under an objective, and whether the
queue kept growing.

Rates are those of the steady part: without the start, while the batch fills, and without the end,
while it empties. TTFT counts from a request's arrival; TPOT is (last token - first token) /
(tokens - 1), without the first token. Knows requests and times; neither engine nor machine.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property

from headrace.simulate.served import Served
from headrace.simulate.verdict import Verdict, judge, last_arrival_s
from headrace.workload.slo import Slo

WARM_SHARE = 0.10  # of requests in order of arrival: the first are left out of what is measured,
DRAIN_SHARE = 0.05  # and the last


@dataclass(frozen=True, slots=True, kw_only=True)
class Percentiles:
    """In seconds; between two values by linear interpolation."""

    mean: float
    p50: float
    p90: float
    p95: float
    p99: float
    most: float


def quantile(ordered: Sequence[float], share: float) -> float:
    """Of values in ascending order."""
    place = share * (len(ordered) - 1)
    at = int(place)
    above = ordered[min(at + 1, len(ordered) - 1)]
    return ordered[at] + (above - ordered[at]) * (place - at)


def percentiles(values: Iterable[float]) -> Percentiles | None:
    """None if there are none."""
    ordered = sorted(values)
    if not ordered:
        return None
    return Percentiles(
        mean=math.fsum(ordered) / len(ordered),
        p50=quantile(ordered, 0.50),
        p90=quantile(ordered, 0.90),
        p95=quantile(ordered, 0.95),
        p99=quantile(ordered, 0.99),
        most=ordered[-1],
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class Band:
    """A figure as a range: the least, the median and the most of several runs."""

    low: float
    middle: float
    high: float


def band(values: Iterable[float]) -> Band:
    """Of at least one value."""
    ordered = sorted(values)
    return Band(low=ordered[0], middle=quantile(ordered, 0.5), high=ordered[-1])


@dataclass(frozen=True, kw_only=True)
class Report:
    """`served` are all requests, in order of arrival, ended ones and refused ones alike."""

    served: tuple[Served, ...]
    steps: int = 0
    preemptions: int = 0
    draft_tokens: int = 0  # guessed
    accepted_tokens: int = 0  # of them right
    busy_s: float = 0.0  # of all devices together
    warm_share: float = WARM_SHARE
    drain_share: float = DRAIN_SHARE

    # -- which part is measured ----------------------------------------------------------------

    @cached_property
    def measured(self) -> tuple[Served, ...]:
        """The requests that latencies are taken from, refused ones included. Requests that arrived
        at one time are all in it or all out."""
        if not self.served:
            return ()
        arrivals = [each.arrival_s for each in self.served]
        first_s = quantile(arrivals, self.warm_share)
        last_s = quantile(arrivals, 1 - self.drain_share)
        return tuple(each for each in self.served if first_s <= each.arrival_s <= last_s)

    @cached_property
    def window_s(self) -> tuple[float, float]:
        """The part of time that rates are taken from: from when the first tenth of the requests
        had ended until requests (or sessions) stop arriving, or until nine tenths have ended."""
        if not self.done:
            return (0.0, 0.0)
        ends = sorted(_end(each) for each in self.done)
        begin_s = quantile(ends, self.warm_share) if self.warm_share else self.served[0].arrival_s
        if not self.drain_share:
            return (begin_s, ends[-1])
        until_s = min(ends[-1], self._until_s(quantile(ends, 1 - 2 * self.drain_share)))
        return (begin_s, until_s) if until_s > begin_s else (self.served[0].arrival_s, ends[-1])

    def _until_s(self, most_ended_s: float) -> float:
        """Sessions that have begun go on after the last has come, with ever fewer of them."""
        last_s, alone_s = self.served[-1].arrival_s, last_arrival_s(self.served)
        if alone_s is not None and alone_s < last_s:
            return alone_s
        return max(last_s, most_ended_s)

    @property
    def done(self) -> list[Served]:
        """Served to the end."""
        return [each for each in self.served if each.is_done]

    @property
    def refused(self) -> int:
        return sum(1 for each in self.served if each.refused is not None)

    # -- latency -------------------------------------------------------------------------------

    @cached_property
    def ttft_s(self) -> Percentiles | None:
        return self._latency(lambda each: each.ttft_s)

    @cached_property
    def tpot_s(self) -> Percentiles | None:
        """Of requests with more than one token."""
        return percentiles(
            each.tpot_s for each in self.measured if each.is_done and each.tokens > 1
        )

    @cached_property
    def e2e_s(self) -> Percentiles | None:
        return self._latency(lambda each: each.e2e_s)

    @cached_property
    def queue_s(self) -> Percentiles | None:
        return self._latency(lambda each: each.queue_s)

    def _latency(self, of: Callable[[Served], float]) -> Percentiles | None:
        return percentiles(of(each) for each in self.measured if each.is_done)

    # -- rates ---------------------------------------------------------------------------------

    @cached_property
    def output_tokens_s(self) -> float:
        """Generated tokens a second, in the steady part. Between a request's first token and its
        last its tokens are taken to be spread evenly."""
        begin_s, end_s = self.window_s
        if end_s <= begin_s:
            return 0.0
        total = math.fsum(_tokens_within(each, begin_s, end_s) for each in self.done)
        return total / (end_s - begin_s)

    @cached_property
    def requests_s(self) -> float:
        """Requests served a second: output tokens over the mean length of an output, which is
        steadier than counting those that happened to end."""
        done = self.done
        tokens = sum(each.tokens for each in done)
        return self.output_tokens_s * len(done) / tokens if tokens else 0.0

    @cached_property
    def input_tokens_s(self) -> float:
        """Prompt tokens a second, cached ones included."""
        done = self.done
        if not done:
            return 0.0
        return self.requests_s * sum(each.ask.prompt_tokens for each in done) / len(done)

    @property
    def cached_share(self) -> float:
        """Of prompt tokens, those that came from the prefix cache."""
        whole = sum(each.ask.prompt_tokens for each in self.done)
        return sum(each.cached_tokens for each in self.done) / whole if whole else 0.0

    # -- judgement -----------------------------------------------------------------------------

    def met_share(self, slo: Slo) -> float:
        """The share of measured requests that were within the objective; a refused one was not."""
        if not self.measured:
            return 0.0
        met = sum(
            1
            for each in self.measured
            if each.is_done
            and slo.is_met_by(ttft_s=each.ttft_s, tpot_s=each.tpot_s, e2e_s=each.e2e_s)
        )
        return met / len(self.measured)

    def meets(self, slo: Slo) -> bool:
        """Whether it holds the objective, and goes on to: a queue that grows will break any."""
        return not self.saturated and self.met_share(slo) >= slo.share

    def goodput_s(self, slo: Slo) -> float:
        """Requests a second that were within the objective."""
        done = sum(1 for each in self.measured if each.is_done)
        return self.requests_s * self.met_share(slo) * len(self.measured) / done if done else 0.0

    @cached_property
    def verdict(self) -> Verdict:
        return judge(self.served)

    @property
    def saturated(self) -> bool:
        return self.verdict is Verdict.SATURATED


def _end(served: Served) -> float:
    assert served.end_s is not None
    return served.end_s


def _tokens_within(served: Served, begin_s: float, end_s: float) -> float:
    if served.first_s is None or served.end_s is None:
        return 0.0
    tokens = 1.0 if begin_s <= served.first_s < end_s else 0.0
    lasted_s = served.end_s - served.first_s
    if lasted_s <= 0:
        return tokens * served.tokens
    overlap_s = max(0.0, min(end_s, served.end_s) - max(begin_s, served.first_s))
    return tokens + (served.tokens - 1) * overlap_s / lasted_s
