"""Over a server's life: slow starts, and throughput that falls with uptime."""

from __future__ import annotations

from headrace.doctor.finding import Confidence, Finding, Gain, Kind, Rule
from headrace.doctor.observation import Observation
from headrace.doctor.step_curve import alone_rate

_COLD_S = 300.0
_USUAL_S = 60.0
_FELL = 0.9


def cold_start(seen: Observation) -> Finding | None:
    """Row 7."""
    took = seen.highest("startup_s") or seen.number("load_s")
    if took is None or took < _COLD_S:
        return None
    return Finding(
        rule=7,
        kind=Kind.FAULT,
        symptom="a start takes many minutes",
        evidence=(f"this server took {took:,.0f} s until it was ready",),
        cause="the model is downloaded or converted at every start",
        fix=("weights on a local disk or a volume, pulled before the start (HF_HOME, "
             "`headrace pull`)", "compiled kernels and graphs in a cache that survives"),
        gain=Gain(of="starts, as speed,", low=1.0, high=took / _USUAL_S,
                  basis="a start from a local disk takes about a minute"),
        confidence=Confidence.MEDIUM,
        unless="it loads hundreds of gigabytes from a slow disk",
    )  # fmt: skip


def falls_with_uptime(seen: Observation) -> Finding | None:
    """Row 25: the same probe on the same settings, earlier and now."""
    rate = alone_rate(seen.probe) if seen.probe is not None else None
    before = seen.earlier
    if rate is None or before is None or rate > _FELL * before.rate:
        return None
    same = all(seen.config.get(name) == value for name, value in before.config.items())
    started = seen.highest("started_at_s")
    if not same or (before.uptime_s is not None and started is None):
        return None
    uptime = seen.number("uptime_s")
    if before.uptime_s is not None and uptime is not None and uptime <= before.uptime_s:
        return None  # it was restarted in between
    return Finding(
        rule=25,
        kind=Kind.FAULT,
        symptom="throughput falls with uptime",
        evidence=(f"one stream gave {before.rate:,.4g} tokens/s on {before.when}, now "
                  f"{rate:,.4g}, with the same settings",),
        cause="fragmentation, a leak, or heat",
        fix=("look at which: memory of the processes, clocks and temperature (nvidia-smi -q -d "
             "PERFORMANCE)", "rolling restarts until it is found"),
        gain=Gain(of="tokens/s of one stream", low=1.0, high=before.rate / rate,
                  basis="what it was"),
        confidence=Confidence.MEDIUM,
        unless="others' requests ran beside this probe and not beside the earlier one",
    )  # fmt: skip


RULES: dict[int, Rule] = {7: cold_start, 25: falls_with_uptime}
