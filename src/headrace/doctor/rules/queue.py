"""Queues: too few places, no batching, waiting without a bound, batches that wait to fill."""

from __future__ import annotations

import math

from headrace.doctor.buckets import Buckets
from headrace.doctor.finding import Confidence, Finding, Gain, Kind, Rule, no_gain
from headrace.doctor.fixes import places, setting, waiting_limit, word
from headrace.doctor.gains import gain_in_burst, gain_of_places, next_power
from headrace.doctor.observation import Observation, ttft_of
from headrace.doctor.rules.words import load_of, ms, percent, spread
from headrace.doctor.step_curve import alone_rate, burst_rate, overlap

_NO_HELP = 1.15  # a predicted gain below this is no fault


def too_few_places(seen: Observation) -> Finding | None:
    """Row 4."""
    load = load_of(seen)
    limit = seen.number("max_sequences")
    if not load.is_free:
        return None
    queued = load.most_waiting >= 1 and load.most_running >= 1 and load.is_flat and load.is_lasting
    if load.is_burst and limit is not None and load.most_wanted <= limit:
        queued = False  # there was a place for each: they waited for the step that admits them
    together = max((overlap(b) for b in seen.probe.bursts), default=0.0) if seen.probe else 0.0
    asked = max((len(b) for b in seen.probe.bursts), default=0) if seen.probe else 0
    narrow = limit is not None and limit < asked and 0 < together <= 1.1 * limit
    if not queued and not narrow:
        return None
    now = load.most_running if queued else together
    wanted = max(now, load.most_wanted) if queued else float(asked)
    at_limit = limit is None or now >= 0.9 * limit or narrow
    is_burst = load.is_burst or not queued
    gain = (
        gain_in_burst(seen, asked, limit or now) if is_burst else gain_of_places(seen, now, wanted)
    )
    helps = gain.high is None or gain.high >= _NO_HELP
    evidence = [load.shown] if queued else []
    if together:
        evidence.append(f"of {asked} requests at once, {together:.1f} were answered together")
    if limit is not None:
        evidence.append(f"the engine has {limit:g} place{'' if limit == 1 else 's'}")
    return Finding(
        rule=4,
        kind=Kind.FAULT if helps else Kind.LIMIT,
        symptom="requests wait while the KV pool is free, and no more of them run",
        evidence=tuple(evidence),
        cause=_cause(helps, at_limit),
        fix=_place_fixes(seen, wanted, helps, at_limit),
        gain=gain,
        confidence=Confidence.HIGH if limit is not None else Confidence.MEDIUM,
        unless="a limit is wanted, so that each answer stays fast"
        if helps
        else "steps are shorter than the probes saw",
    )


def _cause(helps: bool, at_limit: bool) -> str:
    if not helps:
        return "the engine is saturated: a step of more sequences takes as much longer"
    if at_limit:
        return "too few places: the most sequences at one time"
    return "the token budget of a step is used up before all places are"


def _place_fixes(seen: Observation, wanted: float, helps: bool, at_limit: bool) -> tuple[str, ...]:
    if not helps:
        return ("another replica", f"a bound on waiting: {waiting_limit(seen, 100)}")
    if at_limit:
        return (places(seen, next_power(wanted)),)
    budget = seen.number("max_batch_tokens") or 2048
    return (setting(seen, max_batch_tokens=int(2 * budget)),)


def no_batching(seen: Observation) -> Finding | None:
    """Row 2: bursts are answered one after the other, or are no faster than one."""
    probe = seen.probe
    if probe is None or not probe.bursts:
        return None
    asked = max(len(burst) for burst in probe.bursts)
    rates = [rate for burst in probe.bursts if (rate := burst_rate(burst))]
    one = alone_rate(probe)
    limit = seen.number("max_sequences")
    if asked < 4 or not rates or one is None or (limit is not None and limit < asked):
        return None
    together = max(overlap(burst) for burst in probe.bursts)
    ratio = max(rates) / one
    # Never two at a time is proof by itself; a few at a time only if nothing was gained.
    serial = 0 < together <= 1.2 or (together < 0.4 * asked and ratio < 1.5)
    busy = seen.gpu_busy
    idle = busy is not None and busy < 0.4 and ratio < 1.3
    if not serial and not idle:
        return None
    evidence = [
        f"{asked} at once give {max(rates):,.4g} tokens/s, one alone {one:,.4g}: × {ratio:.2g}",
        f"{together:.1f} of them were answered at the same time",
    ]
    if busy is not None:
        evidence.append(f"the GPU is {percent(busy)} busy")
    return Finding(
        rule=2,
        kind=Kind.FAULT,
        symptom="throughput stays flat as load grows",
        evidence=tuple(evidence),
        cause="requests are answered one by one, or in batches that start and end together",
        fix=(places(seen, next_power(asked)) if seen.engine.name in ("ollama", "llama.cpp")
             else "an engine with continuous batching (Headrace, vLLM, SGLang, TensorRT-LLM)",),
        gain=gain_in_burst(seen, asked, together if serial else None),
        confidence=Confidence.HIGH if serial else Confidence.MEDIUM,
        unless="others' requests took the engine's time during the bursts",
    )  # fmt: skip


def queueing(seen: Observation) -> Finding | None:
    """Row 11: TTFT is the wait."""
    shares = _ttft_parts(seen)
    if shares is None:
        return None
    wait, first = shares
    tpot = seen.mean("tpot") or seen.mean("itl")
    limit, pace = seen.objective.ttft_s, seen.objective.tpot_s
    if limit is None or first <= limit or wait < 0.5 * first:
        return None
    is_slow = tpot is not None and pace is not None and tpot > pace
    load = load_of(seen)
    more = (load.most_running + load.most_waiting) / max(load.most_running, 1.0)
    return Finding(
        rule=11,
        kind=Kind.LIMIT,
        symptom="saturated: requests wait, and those that run get their tokens late"
        if is_slow
        else "TTFT is the wait in the queue; tokens then come fast enough",
        evidence=(
            f"mean TTFT {ms(first)}, of which {ms(wait)} waiting (objective {ms(limit)})",
            *((f"time per token {ms(tpot)} (objective {ms(pace)})",)
              if is_slow and tpot is not None and pace is not None else ()),
            f"TTFT p95: {spread(seen.histograms.get('ttft'), 0.95)}", load.shown,
        ),
        cause="saturated: more requests come than this engine serves",
        fix=(f"{more:.2g} times the replicas, or requests turned away: "
             f"{waiting_limit(seen, max(1, int(load.most_running)))}",),
        gain=Gain(of="TTFT, as speed,", low=1.0, high=first / max(first - wait, 1e-9),
                  basis="without the wait"),
        confidence=Confidence.HIGH,
        unless="the queue was a moment's: watch it",
    )  # fmt: skip


def _ttft_parts(seen: Observation) -> tuple[float, float] | None:
    """Mean wait and mean TTFT."""
    wait, first = seen.mean("queue_time"), seen.mean("ttft")
    return None if wait is None or first is None else (wait, first)


def unbounded(seen: Observation) -> Finding | None:
    """Row 30."""
    waiting, running = seen.levels.get("waiting", ()), seen.level("running")
    if len(waiting) < 2 or running is None:
        return None
    some = seen.levels.get("running", ())
    wanted = (
        [r + w for r, w in zip(some, waiting, strict=True)]
        if len(some) == len(waiting)
        else waiting
    )
    # Between two steps all that ran may be counted as waiting: those are not more than before.
    grows = waiting[-1] > waiting[0] and wanted[-1] > wanted[0]
    if waiting[-1] < 4 * max(running, 1.0) or not grows:
        return None
    if seen.deltas.get("rejected", 0.0) > 0:
        return None
    limit = seen.number("max_waiting")
    if limit is not None and limit <= 2 * waiting[-1]:
        return None
    told = "none that it tells of" if limit is None else f"{limit:g}"
    return Finding(
        rule=30,
        kind=Kind.FAULT,
        symptom="the queue grows without a bound",
        evidence=(f"waiting {waiting[0]:g} → {waiting[-1]:g} in {seen.period_s:.3g} s beside "
                  f"{running:.3g} running; limit: {told}; none was turned away",),
        cause="overload becomes latency: whoever waits longest gives up, and its work was for "
        "nothing",
        fix=(waiting_limit(seen, max(1, int(2 * running))), "clients that honour 429"),
        gain=no_gain("it bounds the wait; it does not make more tokens"),
        confidence=Confidence.MEDIUM if limit is None else Confidence.HIGH,
        unless="a gateway in front turns requests away",
    )  # fmt: skip


def waits_to_fill(seen: Observation) -> Finding | None:
    """Row 31: a request alone is slower than one in a batch that fills at once."""
    probe = seen.probe
    if probe is None:
        return None
    alone, delay = ttft_of(probe.short), None
    fast = [t for burst in probe.bursts if (t := ttft_of(burst)) is not None]
    if alone is not None and fast and alone - min(fast) > max(0.02, 0.3 * alone):
        delay = alone - min(fast)
    idle = (seen.highest("running") or 0) <= 1 and (seen.highest("waiting") or 0) == 0
    wait = seen.mean("queue_time") if _is_constant(seen.histograms.get("queue_time")) else None
    if delay is None and not (idle and wait is not None and wait >= 0.02):
        return None
    evidence = []
    if delay is not None and alone is not None:
        evidence.append(f"TTFT alone {ms(alone)}, in a burst {ms(min(fast))}")
    if idle and wait is not None:
        evidence.append(f"requests wait {ms(wait)} on average although nothing else runs")
    lost = delay or wait or 0.0
    first = alone or lost
    return Finding(
        rule=31,
        kind=Kind.FAULT,
        symptom="requests wait for a batch to fill",
        evidence=tuple(evidence),
        cause="a batching delay",
        fix=(word(seen, "delay", "continuous batching, without a delay"),),
        gain=Gain(of="TTFT, as speed,", low=1.0, high=first / max(first - lost, 0.1 * first),
                  basis="without the delay"),
        confidence=Confidence.MEDIUM,
        unless="the first requests of the probe met an engine that was waking up",
    )  # fmt: skip


def _is_constant(waits: Buckets | None) -> bool:
    """Even the luckiest tenth waits. Triton tells only the mean."""
    least = waits.quantile(0.1) if waits is not None else None
    return least is not None and (math.isinf(least.high) or least.low >= 0.01)


def mixed_sizes(seen: Observation) -> Finding | None:
    """Row 14: short requests behind long ones."""
    lengths, first = seen.histograms.get("prompt_length"), seen.histograms.get("ttft")
    if lengths is None or first is None or min(lengths.count, first.count) < 20:
        return None
    middle, long = lengths.quantile(0.5), lengths.quantile(0.95)
    usual, slow = first.quantile(0.5), first.quantile(0.95)
    limit = seen.objective.ttft_s
    if not (middle and long and usual and slow) or limit is None:
        return None
    if long.low < 16 * middle.high or slow.low < 5 * usual.high or slow.low < limit:
        return None
    return Finding(
        rule=14,
        kind=Kind.FAULT,
        symptom="very different requests share one endpoint",
        evidence=(f"prompts: half below {middle.high:,.0f} tokens, a twentieth above "
                  f"{long.low:,.0f}",
                  f"TTFT p50 {usual.shown(1e3, ' ms')}, p95 {slow.shown(1e3, ' ms')}"),
        cause="short requests wait behind long ones",
        fix=("a pool for each kind, or a lower priority for long prompts",
             f"smaller chunks: {setting(seen, max_batch_tokens=_smaller(seen))}"),
        gain=Gain(of="TTFT of short requests, as speed,", low=1.0, high=slow.low / usual.high,
                  basis="p95 over p50 now"),
        confidence=Confidence.MEDIUM,
        unless="the slow ones are the long ones themselves: then it is prefill",
    )  # fmt: skip


def _smaller(seen: Observation) -> int:
    return max(256, int((seen.number("max_batch_tokens") or 2048) / 2))


RULES: dict[int, Rule] = {
    2: no_batching,
    4: too_few_places,
    11: queueing,
    14: mixed_sizes,
    30: unbounded,
    31: waits_to_fill,
}
