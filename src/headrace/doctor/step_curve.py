"""The time of a decode step as a function of how many sequences are in it, from the probes.

    step(b) = alone + (b - 1) × each

`alone` is the time per token of one stream. `each`, what one more sequence adds, is measured where
a burst really ran together. Where it did not (one place, say), it lies between what a prompt token
costs and three times that: a prompt's tokens share the reading of weights perfectly, decoded ones
add their own keys and values to it. From that come predicted gains, as bands.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import pairwise

from headrace.doctor.finding import Gain, no_gain
from headrace.doctor.observation import Answer, Observation, Probe, prompt_of, tpot_of, ttft_of

_MEASURED_BAND = 1.3  # a burst's own spread
_SMALL_BATCH = 3.0  # how much more than a prompt token a decoded one may cost


@dataclass(frozen=True, slots=True, kw_only=True)
class StepCurve:
    alone_s: float
    each_low_s: float
    each_high_s: float
    basis: str

    def rate(self, sequences: float, each_s: float) -> float:
        """Tokens per second of so many sequences together."""
        return sequences / (self.alone_s + (sequences - 1) * each_s)

    def gain(self, now: float, then: float, of: str = "output tokens/s") -> Gain:
        """From `now` sequences at a time to `then`."""
        ratios = [
            self.rate(then, each) / self.rate(now, each)
            for each in (self.each_low_s, self.each_high_s)
        ]
        low, high = min(ratios), max(ratios)
        shown = f"{self.basis}; {now:.3g} → {then:.3g} sequences"
        return Gain(of=of, low=max(1.0, low), high=max(1.0, high), basis=shown)


def overlap(burst: tuple[Answer, ...]) -> float:
    """How many of a burst's answers were being written at the same time, on average over the time
    in which any was."""
    spans = [
        (a.ttft_s, a.end_s)
        for a in burst
        if a.is_good and a.ttft_s is not None and a.end_s is not None and a.end_s > a.ttft_s
    ]
    edges = sorted({edge for span in spans for edge in span})
    busy = weighted = 0.0
    for low, high in pairwise(edges):
        inside = sum(1 for first, last in spans if first <= low and last >= high)
        if inside:
            busy += high - low
            weighted += inside * (high - low)
    return weighted / busy if busy > 0 else 0.0


def burst_rate(burst: tuple[Answer, ...]) -> float | None:
    """Tokens of all answers over the wall time from the schedule to the last token."""
    good = [a for a in burst if a.is_good and a.end_s is not None]
    ends = [a.end_s for a in good if a.end_s is not None]
    return sum(a.tokens for a in good) / max(ends) if ends else None


def alone_rate(probe: Probe) -> float | None:
    tpot = tpot_of(probe.short)
    return 1 / tpot if tpot else None


def token_cost_s(probe: Probe) -> float | None:
    """What one more prompt token costs: the slope from short prompts to the next longer ones, since
    attention makes those of long prompts dearer."""
    for many in (probe.medium, probe.cold, probe.long):
        tokens, base = prompt_of(many), prompt_of(probe.short)
        late, early = ttft_of(many), ttft_of(probe.short)
        if tokens is None or base is None or late is None or early is None:
            continue
        if tokens > 2 * base and late > early:
            return (late - early) / (tokens - base)
    return None


def curve(probe: Probe | None) -> StepCurve | None:
    if probe is None:
        return None
    alone = tpot_of(probe.references) or tpot_of(probe.short)
    if alone is None or alone <= 0:
        return None
    joined = max((overlap(burst) for burst in probe.bursts), default=0.0)
    adds = sorted(add for burst in probe.bursts for add in _adds(burst, alone))
    if joined >= 2 and len(adds) >= 4:
        quarter = len(adds) // 4
        return StepCurve(
            alone_s=alone,
            each_low_s=max(0.0, adds[quarter] / _MEASURED_BAND),
            each_high_s=max(0.0, adds[-1 - quarter] * _MEASURED_BAND),
            basis=f"measured at {joined:.1f} sequences",
        )
    cost = token_cost_s(probe)
    if cost is None:
        return None
    return StepCurve(
        alone_s=alone,
        each_low_s=cost,
        each_high_s=_SMALL_BATCH * cost,
        basis=f"from {cost * 1e3:.3g} ms a prompt token",
    )


def _adds(burst: tuple[Answer, ...], alone_s: float) -> Iterator[float]:
    """What another sequence added to a step, by each answer: its median gap, which the few steps
    with prompts in them do not move, and how many were being written beside it."""
    good = [a for a in burst if a.is_good and a.tpot_s and len(a.arrivals_s) >= 4]
    for one in good:
        first, last = one.arrivals_s[0], one.arrivals_s[-1]
        if last <= first:
            continue
        beside = sum(
            max(0.0, min(last, a.arrivals_s[-1]) - max(first, a.arrivals_s[0])) for a in good
        ) / (last - first)
        chunk_tokens = max(1.0, (one.tokens - 1) / (len(one.arrivals_s) - 1))
        gap = statistics.median(b - a for a, b in pairwise(one.arrivals_s)) / chunk_tokens
        if beside > 1.5:
            yield (gap - alone_s) / (beside - 1)


def gain_of_places(seen: Observation, now: float, then: float) -> Gain:
    """Of the endpoint's own traffic: steps of more sequences."""
    found = curve(seen.probe)
    if found is None:
        return no_gain("needs a probe, for the time of a step at several batch sizes")
    return found.gain(max(now, 1.0), max(then, 1.0))


def gain_in_burst(seen: Observation, then: float) -> Gain:
    """Of the bursts: all prompts first, then steps of `then` sequences, against what was measured.
    This is what `verify` looks at."""
    probe, found = seen.probe, curve(seen.probe)
    rates = [rate for b in probe.bursts if (rate := burst_rate(b))] if probe is not None else []
    first = ttft_of(probe.short) if probe is not None else None
    if probe is None or found is None or not rates or first is None:
        return no_gain("needs a probe, for the time of a step at several batch sizes")
    answers = [a for burst in probe.bursts for a in burst if a.is_good]
    tokens = statistics.median(a.tokens for a in answers)
    prompts = (then - 1) * (prompt_of(tuple(answers)) or 0.0) * (token_cost_s(probe) or 0.0)
    now = statistics.median(rates)
    gains = []
    for each in (found.each_low_s, found.each_high_s):
        # Prompts may share steps with others' tokens: from all of their time down to half of it.
        part = 1.0 if each == found.each_high_s else 0.5
        step = found.alone_s + (then - 1) * each
        gains.append(then * tokens / (first + part * prompts + (tokens - 1) * step) / now)
    low, high = min(gains), max(gains)
    basis = f"{found.basis}; {then:g} together instead of {now:,.3g} tokens/s"
    return Gain(of="output tokens/s", low=max(1.0, low), high=max(1.0, high), basis=basis)


def next_power(count: float) -> int:
    return 1 << max(0, math.ceil(math.log2(max(count, 1))))
