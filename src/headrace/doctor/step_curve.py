"""The time of a decode step as a function of how many sequences are in it, from the probes.

    step(b) = alone + (b - 1) × each

`alone` is the time per token of one stream. `each`, what one more sequence adds, is measured where
a burst really ran together. Where it did not (one place, say), it lies between what a prompt token
costs and three times that: a prompt's tokens share the reading of weights perfectly, decoded ones
add their own keys and values to it. From that come predicted gains, as bands.
"""

from __future__ import annotations

import math
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
    """What one more prompt token costs: the slope between short and long prompts."""
    for many in (probe.long, probe.medium, probe.cold):
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
    alone = tpot_of(probe.short)
    if alone is None or alone <= 0:
        return None
    together = [overlap(burst) for burst in probe.bursts]
    batch = max(together, default=0.0)
    tpots = [tpot_of(burst) for burst in probe.bursts]
    stretched = [each for each in tpots if each is not None]
    if batch >= 2 and stretched:
        each = max(0.0, (min(stretched) - alone) / (batch - 1))
        return StepCurve(
            alone_s=alone,
            each_low_s=each / _MEASURED_BAND,
            each_high_s=each * _MEASURED_BAND,
            basis=f"measured at {batch:.1f} sequences",
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


def gain_of_places(seen: Observation, now: float, then: float) -> Gain:
    found = curve(seen.probe)
    if found is None:
        return no_gain("needs a probe, for the time of a step at several batch sizes")
    return found.gain(max(now, 1.0), max(then, 1.0))


def next_power(count: float) -> int:
    return 1 << max(0, math.ceil(math.log2(max(count, 1))))
