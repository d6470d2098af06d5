"""Whether a queue kept growing while requests arrived, and between which rates that begins.

Beyond saturation a latency says how long the run was, and nothing about the server: a small error
in capacity turns milliseconds into minutes. So what is given there is a verdict and a bracket.
Knows requests and times only.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from enum import StrEnum

from headrace.core.errors import ConfigError
from headrace.simulate.served import Served

PARTS = 20  # of the time in which requests arrived
SKIPPED_PARTS = 5  # while the batch fills
LATE_PARTS = 8
REFUSED_SHARE = 0.01  # a full queue refuses: with more than this it is saturated
LEAST_REQUESTS = 60
CLIENTS_SHARE = 0.1  # of requests that came by themselves: with fewer it may be a closed loop
TURNS = 4  # the shortest time that can be judged, in times of a request's service


@dataclass(frozen=True, slots=True, kw_only=True)
class Growth:
    """What is called growth of a number of requests."""

    share: float  # of the requests that arrived meanwhile, and
    sure: float  # this many times the standard error of the line


# Requests that wait hardly vary in a stable server. Those that are in the server vary with chance,
# by their root at least, but grow first where there are more places than are ever filled.
WAITING = Growth(share=0.02, sure=5.0)
PRESENT = Growth(share=0.05, sure=8.0)


class Verdict(StrEnum):
    STABLE = "stable"
    SATURATED = "saturated"  # more came than was served
    UNCLEAR = "unclear"  # too few requests, or in too short a time


def judge(served: Sequence[Served]) -> Verdict:
    """`served` in order of arrival. The numbers of requests that wait, and of those in the server,
    are averaged over parts of the time in which requests arrive; a line is laid through each."""
    if sum(1 for each in served if each.refused is not None) > REFUSED_SHARE * len(served):
        return Verdict.SATURATED
    if len(served) < LEAST_REQUESTS:
        return Verdict.UNCLEAR
    begin_s, end_s = served[0].arrival_s, last_arrival_s(served)
    if end_s is None:
        return Verdict.STABLE
    arrived = sum(1 for each in served if each.arrival_s <= end_s)
    if end_s - begin_s < TURNS * _span_s(served):
        return Verdict.UNCLEAR
    arrivals = arrived * (PARTS - SKIPPED_PARTS) / PARTS
    waiting = present(served, begin_s, end_s, PARTS, _left_queue_s)[SKIPPED_PARTS:]
    if _grows(waiting, arrivals, WAITING):
        return Verdict.SATURATED
    inside = present(served, begin_s, end_s, PARTS)[SKIPPED_PARTS:]
    usual = math.sqrt(math.fsum(inside) / len(inside))
    # A batch that fills up rises ever more slowly.
    still = line(inside[-LATE_PARTS:])[0] > 0.5 * line(inside)[0]
    rise = line(inside)[0] * len(inside)
    if _grows(inside, arrivals, PRESENT) and rise > 5 * usual and still:
        return Verdict.SATURATED
    return Verdict.STABLE


def _grows(parts: Sequence[float], arrivals: float, growth: Growth) -> bool:
    slope, error = line(parts)
    return slope * len(parts) > growth.share * arrivals and slope > growth.sure * error


def last_arrival_s(served: Sequence[Served]) -> float | None:
    """Of those that came by themselves: turns of sessions that have begun go on after it. None: a
    closed loop, whose clients wait for their answers, so that no queue can grow."""
    alone = [each.arrival_s for each in served if each.ask.after_s is None]
    begin_s, end_s = served[0].arrival_s, served[-1].arrival_s
    last_s = max(alone, default=begin_s)
    if len(alone) <= CLIENTS_SHARE * len(served) and last_s - begin_s < (end_s - begin_s) / 2:
        return None
    return last_s


def _span_s(served: Sequence[Served]) -> float:
    """The mean time of what comes by itself, in the server and between turns: a request from its
    start to its end, or a session, without the time that its requests waited."""
    times: list[float] = []
    sessions: dict[int, tuple[float, float, float]] = {}  # begin, end, waited
    for each in served:
        if each.end_s is None or each.started_s is None:
            continue
        if each.ask.session is None:
            times.append(each.end_s - each.started_s)
            continue
        begin_s, _, waited_s = sessions.get(each.ask.session, (each.arrival_s, 0.0, 0.0))
        sessions[each.ask.session] = (begin_s, each.end_s, waited_s + each.queue_s)
    times += [end_s - begin_s - waited_s for begin_s, end_s, waited_s in sessions.values()]
    return math.fsum(times) / len(times) if times else 0.0


def _left_s(served: Served) -> float:
    return math.inf if served.end_s is None else served.end_s


def _left_queue_s(served: Served) -> float:
    return _left_s(served) if served.started_s is None else served.started_s


def present(
    served: Sequence[Served],
    begin_s: float,
    end_s: float,
    parts: int,
    until_s: Callable[[Served], float] = _left_s,
) -> list[float]:
    """The mean number of requests that are there, from arrival until `until_s`, in each of so many
    equal parts of a time."""
    width_s = (end_s - begin_s) / parts
    sums = [0.0] * parts
    for each in served:
        left_s = until_s(each)
        first = max(0, int((each.arrival_s - begin_s) / width_s))
        for part in range(first, parts):
            from_s = begin_s + part * width_s
            if from_s >= left_s:
                break
            sums[part] += max(0.0, min(from_s + width_s, left_s) - max(from_s, each.arrival_s))
    return [each / width_s for each in sums]


def line(values: Sequence[float]) -> tuple[float, float]:
    """The slope of a line through values at 0, 1, 2, ..., and the slope's standard error."""
    count = len(values)
    centre = (count - 1) / 2
    mean = math.fsum(values) / count
    spread = math.fsum((at - centre) ** 2 for at in range(count))
    slope = math.fsum((at - centre) * value for at, value in enumerate(values)) / spread
    rest = math.fsum((value - mean - slope * (at - centre)) ** 2 for at, value in enumerate(values))
    return slope, math.sqrt(rest / max(1, count - 2) / spread)


@dataclass(frozen=True, slots=True, kw_only=True)
class Bracket:
    """Saturation lies between two rates, in requests a second."""

    stable: float  # the highest rate at which the queue did not grow; 0: none was found
    saturated: float  # the lowest at which it did; infinity: none was found
    rates: tuple[float, ...]  # that were tried

    def __str__(self) -> str:
        return f"between {self.stable:.3g} and {self.saturated:.3g} requests/s"


def find_saturation(
    judged: Callable[[float], Verdict],
    guess: float,
    *,
    tolerance: float = 0.05,
    most_runs: int = 16,
) -> Bracket:
    """`judged` runs a workload at a rate. Goes up and down from the guess until the two sides are
    known, then halves what lies between them until it is `tolerance` wide. Where runs are unclear
    the bracket stays around them."""
    if not guess > 0:
        raise ConfigError(
            f"The rate to begin with is {guess}; expected one above 0.", "Give another."
        )
    known = _Known()
    rates: list[float] = []
    step = 1.25
    while len(rates) < most_runs and not known.is_within(tolerance):
        rates.append(known.next_rate(guess, step))
        if known.low == 0 or known.high == math.inf:
            step = min(2.0, step * step) if rates[1:] else step
        known.learn(rates[-1], judged(rates[-1]))
    return Bracket(stable=known.low, saturated=known.high, rates=tuple(rates))


@dataclass(slots=True)
class _Known:
    """low | stable side | first unclear ... last unclear | saturated side | high"""

    low: float = 0.0
    high: float = math.inf
    unclear: tuple[float, float] | None = None

    def learn(self, rate: float, verdict: Verdict) -> None:
        if verdict is Verdict.UNCLEAR:
            first, last = self.unclear or (rate, rate)
            self.unclear = (min(first, rate), max(last, rate))
            return
        if verdict is Verdict.STABLE:
            self.low = max(self.low, rate)
        else:
            self.high = min(self.high, rate)
        if (
            self.unclear is not None
            and not self.low < self.unclear[0] <= self.unclear[1] < self.high
        ):
            self.unclear = None  # a clear answer beyond it counts more

    @property
    def _sides(self) -> tuple[tuple[float, float], tuple[float, float]]:
        """Where the two ends of the bracket may still move to."""
        first, last = self.unclear or (self.high, self.low)
        return (self.low, first), (last, self.high)

    def is_within(self, tolerance: float) -> bool:
        return all(low > 0 and high <= low * (1 + tolerance) for low, high in self._sides)

    def next_rate(self, guess: float, step: float) -> float:
        below, above = self._sides
        if self.low == 0:
            return below[1] / step if below[1] < math.inf else guess
        if self.high == math.inf:
            return above[0] * step
        low, high = max(below, above, key=lambda side: side[1] / side[0])
        return math.sqrt(low * high)
