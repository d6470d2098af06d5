"""Prefill: TTFT that is work, attention that grows too steeply, prompts that hold up decode."""

from __future__ import annotations

import statistics
from itertools import pairwise

from headrace.doctor.finding import Confidence, Finding, Gain, Kind, Rule, no_gain
from headrace.doctor.fixes import setting, word
from headrace.doctor.observation import Observation, Probe, prompt_of, ttft_of
from headrace.doctor.rules.words import ms, percent, spread
from headrace.doctor.step_curve import token_cost_s

_STEEP = 1.8  # a token of the long prompt against one of the medium prompt
_STALL = 5.0
_LEAST_STEP = 16  # tokens; engines compute fewer in a step hardly faster
_HELD = 0.4  # of the long prompt's time to its first token


def steep_attention(seen: Observation) -> Finding | None:
    """Row 5: the time per prompt token grows with the prompt's length, alone. The slowest medium
    prompt beside the fastest long one: a machine that was slow for a second is no kernel."""
    probe = seen.probe
    if probe is None:
        return None
    base, first = ttft_of(probe.short), prompt_of(probe.short)
    costs = []
    for group, end in ((probe.medium, max), (probe.long, min)):
        tokens = prompt_of(group)
        times = [a.ttft_s for a in group if a.is_good and a.ttft_s is not None]
        if tokens is None or not times or base is None or first is None:
            return None
        ttft = end(times)
        if tokens <= 2 * first or ttft <= 1.2 * base:
            return None  # too short to tell
        costs.append(((ttft - base) / (tokens - first), tokens, ttft))
    (low, some, _), (high, many, slow) = costs
    wanted = (seen.floor and seen.floor.long_ratio) or seen.long_ratio or 1.0
    if high / low < _STEEP * wanted:
        return None
    return Finding(
        rule=5,
        kind=Kind.FAULT,
        symptom="TTFT grows steeply with the prompt's length, at batch 1",
        evidence=(f"a token costs {ms(low)} in a prompt of {some:,.0f} and {ms(high)} in one of "
                  f"{many:,.0f}: × {high / low:.2g} (TTFT {ms(slow)})",),
        cause="attention that writes out all scores, without a flash-class kernel",
        fix=(word(seen, "attention", "a flash-class attention kernel: a newer engine"),),
        gain=Gain(of="prefill of long prompts", low=1.0, high=high / low,
                  basis="the medium prompt's cost a token"),
        confidence=Confidence.MEDIUM,
        unless="others' requests ran beside the long prompts",
    )  # fmt: skip


def prefill_is_slow(seen: Observation) -> Finding | None:
    """Row 12: TTFT is the work, without a queue."""
    limit = seen.objective.ttft_s
    wait, first = seen.mean("queue_time"), seen.mean("ttft")
    if limit is None or first is None or first <= limit:
        return None
    if wait is None or wait > 0.2 * first:
        return None
    length = seen.mean("prompt_length")
    hit = _hit_share(seen)
    evidence = [
        f"mean TTFT {ms(first)} (objective {ms(limit)}), of which {ms(wait)} waiting",
        f"TTFT p95: {spread(seen.histograms.get('ttft'), 0.95)}",
    ]
    if length is not None:
        evidence.append(f"prompts have {length:,.0f} tokens on average")
    if hit is not None:
        evidence.append(f"{percent(hit)} of prompt tokens come from the prefix cache")
    fix = ["the stable part of prompts first, so that the prefix cache finds it; shorter prompts"]
    if seen.config.get("prefix_cache") is False:
        fix.insert(0, setting(seen, prefix_cache=True))
    fix.append("a pool for prefill alone, or a GPU with a higher rate of operations")
    return Finding(
        rule=12,
        kind=Kind.LIMIT,
        symptom="TTFT is the work on prompts, not a wait",
        evidence=tuple(evidence),
        cause="prefill: long prompts, computed in full",
        fix=tuple(fix),
        gain=_prefix_gain(hit),
        confidence=Confidence.HIGH,
        unless="prompts must be as long, and nothing in them is shared",
    )


def _hit_share(seen: Observation) -> float | None:
    hits = seen.deltas.get("prefix_hits", seen.deltas.get("cached_tokens"))
    asked = seen.deltas.get("prefix_queries", seen.deltas.get("prompt_tokens"))
    return hits / asked if hits is not None and asked else None


def _prefix_gain(hit: float | None) -> Gain:
    if hit is None:
        return no_gain("how much of the prompts is shared is not known")
    # If half of what is computed now were found: a bound for planning, not a promise.
    return Gain(of="prefill", low=1.0, high=(1 - hit) / (0.5 * (1 - hit)) if hit < 1 else 1.0,
                basis="up to half of what is computed now were shared")  # fmt: skip


def prompts_hold_up_decode(seen: Observation) -> Finding | None:
    """Row 18: the gap in a stream while a long prompt arrives."""
    stalls = _probe_stall(seen)
    if stalls is not None:
        usual, worst, tokens = stalls
        evidence = [
            f"tokens come every {ms(usual)}; while a prompt of {tokens:,.0f} tokens arrived, one "
            f"took {ms(worst)}"
        ]
        confidence = Confidence.HIGH
    else:
        itl = seen.histograms.get("itl")
        middle, tail = (itl.quantile(0.5), itl.quantile(0.99)) if itl else (None, None)
        if itl is None or middle is None or tail is None or itl.count < 200:
            return None
        if tail.low < 2 * _STALL * middle.high or tail.low < 0.1:
            return None
        if not seen.rate("prompt_tokens"):
            return None
        usual, worst = middle.middle, tail.low
        evidence = [f"between tokens: p50 {middle.shown(1e3, ' ms')}, p99 {tail.shown(1e3, ' ms')}"]
        confidence = Confidence.MEDIUM
    budget = seen.number("max_batch_tokens")
    if budget is not None:
        evidence.append(f"a step computes up to {budget:,.0f} tokens")
    target = _budget(seen, usual)
    return Finding(
        rule=18,
        kind=Kind.FAULT,
        symptom="streams stop while prompts of others arrive",
        evidence=tuple(evidence),
        cause="prefill holds up decode: a step with a large piece of a prompt takes that long",
        fix=(f"smaller steps: {setting(seen, max_batch_tokens=target)}",
             "a pool for prefill alone"),
        gain=_shorter_gap(seen, usual, worst, target),
        confidence=confidence,
        unless="throughput matters and gaps do not, as in batch work",
    )  # fmt: skip


def stream_gaps(probe: Probe) -> tuple[list[float], list[float]]:
    """Between the tokens of one long answer: before another's long prompt came, and while that was
    computed."""
    begin, intruder = probe.intruder_at_s, probe.intruder
    if probe.stream is None or intruder is None or intruder.ttft_s is None or begin is None:
        return [], []
    end = begin + intruder.ttft_s
    gaps = [(at, at - last) for last, at in pairwise(probe.stream.arrivals_s)]
    before = [gap for at, gap in gaps if at <= begin]
    return before, [gap for at, gap in gaps if at > begin and at - gap < end]


def _probe_stall(seen: Observation) -> tuple[float, float, float] | None:
    """Usual gap, worst gap during the intruder's prefill, its prompt's tokens."""
    probe = seen.probe
    if probe is None or probe.intruder is None or probe.intruder.ttft_s is None:
        return None
    prompt, pace = probe.intruder.prompt_tokens, seen.objective.tpot_s
    before, during = stream_gaps(probe)
    if prompt is None or prompt < 256 or len(before) < 8 or not during:
        return None
    usual, worst = statistics.median(before), max(during)
    stops = [gap for gap in during if gap >= _STALL * usual and gap >= 2 * (pace or 0.05)]
    # One late token is the machine's; a prefill that holds up others fills its own time with it.
    if sum(stops) < _HELD * probe.intruder.ttft_s:
        return None
    return usual, worst, float(prompt)


def _costs(seen: Observation) -> tuple[float, float] | None:
    """What a token of a prompt takes: early in it, and at the end of a long one, where attention
    makes it dearer."""
    probe = seen.probe
    early = token_cost_s(probe) if probe is not None else None
    if probe is None or early is None:
        return None
    tokens, base = prompt_of(probe.long), prompt_of(probe.short)
    late, first = ttft_of(probe.long), ttft_of(probe.short)
    if tokens is None or base is None or late is None or first is None or tokens <= 2 * base:
        return early, early
    mean = (late - first) / (tokens - base)  # half of what attention adds at the end
    return early, max(early, 2 * mean - early)


def _shorter_gap(seen: Observation, usual: float, worst: float, target: int) -> Gain:
    """A step then has a piece of that size beside the tokens that are decoded."""
    costs, of = _costs(seen), "the longest gap, as speed,"
    if costs is None:
        return no_gain("needs a probe, for what a token of a prompt takes")
    low, high = (max(1.0, worst / (usual + target * cost)) for cost in reversed(costs))
    return Gain(of=of, low=low, high=high, basis=f"steps of {target} tokens at {ms(costs[0])} to "
                f"{ms(costs[1])} a token")  # fmt: skip


def _budget(seen: Observation, usual: float) -> int:
    """So many tokens that a step with them takes no longer than twice the pace that is wanted."""
    costs, now = _costs(seen), seen.number("max_batch_tokens") or 2048
    if costs is None:
        return max(64, int(now / 4))
    wanted = max(usual, 2 * (seen.objective.tpot_s or 0.05) - usual)
    fits = int(wanted / max(costs[1], 1e-9))
    return max(_LEAST_STEP, min(int(now / 2), 1 << max(0, fits.bit_length() - 1)))


RULES: dict[int, Rule] = {5: steep_attention, 12: prefill_is_slow, 18: prompts_hold_up_decode}
