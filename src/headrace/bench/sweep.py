"""From rate to rate: where an endpoint saturates, and the highest rate that meets an objective.

Saturated means: while the rate stayed the same, the number of requests at once rose and so did
TTFT, both significantly, and the first by a real share of what was sent: queues come and go below
saturation too, and at the start of a run everything rises, so that the first third is left out. A
run ends early when more than that is seen, which saves what would only fill the queue. Rates double
until one is too much, then the bracket is halved until it is narrow: the answer is two rates, the
highest that was kept and the lowest that was not, never one.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, replace

from headrace.bench.interval import slope
from headrace.bench.record import Record
from headrace.bench.run import Progress
from headrace.bench.summary import Summary

NARROW = 1.15  # the bracket's two rates, divided
MOST_POINTS = 14
_SLICES = 10
_LEAST_S = 4.0  # before which nothing is called saturated
_LEAST_RECORDS = 12
_LEFT_OUT = 1 / 3  # of the time, from its start
# What stays in the endpoint, of all that is sent: below the first it keeps up; above the second
# there is no need to wait for the end.
_LEAST_SHARE, _CLEAR_SHARE = 0.05, 0.3
_MOST_FAILED = 0.01  # of requests, at a rate that is kept
_CLEAR_SENT, _CLEAR_S = 60, 8.0  # requests and seconds, before a run is ended early


@dataclass(frozen=True, slots=True, kw_only=True)
class Point:
    """One rate that was tried. `is_kept`: it did not saturate and did not fail; for an objective,
    it met it too."""

    rate_s: float
    summary: Summary
    is_saturated: bool
    is_kept: bool

    @property
    def has_failed(self) -> bool:
        """More than single requests: a limit of requests a minute, or an endpoint that gives up."""
        failed = self.summary.failed
        return failed > 1 and failed > _MOST_FAILED * len(self.summary.records)

    @property
    def only_missed(self) -> bool:
        """Nothing but the objective was not kept."""
        has_answers = bool(self.summary.good)
        return has_answers and not (self.is_kept or self.is_saturated or self.has_failed)


@dataclass(frozen=True, slots=True, kw_only=True)
class Bracket:
    """None: no rate was kept, or none was too much."""

    low_s: float | None
    high_s: float | None
    points: tuple[Point, ...]  # in the order of trying

    def __str__(self) -> str:
        if self.low_s is None and self.high_s is None:
            return "at a rate that is not known"
        if self.low_s is None:
            return f"below {self.high_s:.3g} requests/s"
        if self.high_s is None:
            return f"above {self.low_s:.3g} requests/s"
        return f"between {self.low_s:.3g} and {self.high_s:.3g} requests/s"


Probe = Callable[[float], Awaitable[Point | None]]  # None: it could not be tried


async def bracket(
    probe: Probe,
    start_s: float,
    *,
    narrow: float = NARROW,
    goes_on: Callable[[], bool] = lambda: True,
) -> Bracket:
    """Tries rates from `start_s` on, until the bracket is narrow or `goes_on` says no: what was
    tried last is then left out, unless it is all there is."""
    points: list[Point] = []
    low: float | None = None
    high: float | None = None
    rate_s = start_s
    while len(points) < MOST_POINTS:
        point = await probe(rate_s)
        if point is None or (not goes_on() and points):
            break
        points.append(point)
        if not goes_on():
            break
        if point.is_kept:
            low = rate_s
        else:
            high = rate_s
        if low is None:
            rate_s /= 2
        elif high is None:
            rate_s *= 2
        elif high / low <= narrow:
            break
        else:
            rate_s = (low * high) ** 0.5
    return Bracket(low_s=low, high_s=high, points=tuple(points))


def is_saturated(
    samples: Sequence[tuple[float, int]],
    records: Sequence[Record],
    *,
    until_s: float,
    rate_s: float,
    share: float = _LEAST_SHARE,
) -> bool:
    """By what happened up to that time, of a run at one rate. Requests that are still on their way
    have no TTFT yet; that they wait is seen in the number at once."""
    from_s = _LEFT_OUT * until_s
    known = [one for one in records if one.is_good and one.scheduled_s <= until_s]
    later = [one for one in known if one.scheduled_s >= from_s]
    # Far above saturation those that came later have no first token yet.
    known = later if len(later) >= _LEAST_RECORDS else known
    if until_s < _LEAST_S or len(known) < _LEAST_RECORDS:
        return False
    ttfts = [(one.scheduled_s, one.ttft_s) for one in known]
    at_once = _sliced(samples, from_s, until_s)
    rising = slope([at for at, _ in at_once], [value for _, value in at_once])
    slower = slope([at for at, _ in ttfts], [value for _, value in ttfts])
    if rising is None or slower is None:
        return False
    is_much = rising.value >= share * rate_s  # requests a second that come and do not leave
    return rising.is_positive and slower.is_positive and is_much


def _sliced(
    samples: Sequence[tuple[float, int]], from_s: float, until_s: float
) -> list[tuple[float, float]]:
    """Means of ten slices of the time: samples that follow each other are alike."""
    width = (until_s - from_s) / _SLICES
    found: list[list[int]] = [[] for _ in range(_SLICES)]
    for at_s, value in samples:
        if from_s <= at_s < until_s:
            found[min(_SLICES - 1, int((at_s - from_s) / width))].append(value)
    return [
        (from_s + (place + 0.5) * width, sum(values) / len(values))
        for place, values in enumerate(found)
        if values
    ]


def saturated_so_far(progress: Progress, rate_s: float) -> bool:
    """For `Run`: ends a run at a rate that is clearly too much."""
    is_long = progress.sent >= _CLEAR_SENT and progress.elapsed_s >= _CLEAR_S
    return is_long and is_saturated(
        progress.samples,
        progress.records,
        until_s=progress.elapsed_s,
        rate_s=rate_s,
        share=_CLEAR_SHARE,
    )


def judge_point(rate_s: float, summary: Summary, sent_for_s: float, *, by_objective: bool) -> Point:
    """`sent_for_s`: how long requests were sent; what came later only drained."""
    saturated = is_saturated(summary.samples, summary.records, until_s=sent_for_s, rate_s=rate_s)
    kept = not saturated and bool(summary.good)
    if by_objective:
        kept = kept and summary.is_met is True
    point = Point(rate_s=rate_s, summary=summary, is_saturated=saturated, is_kept=kept)
    return replace(point, is_kept=kept and not point.has_failed)
