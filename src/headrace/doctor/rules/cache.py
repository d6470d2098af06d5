"""The prefix cache: off, of no use on this model, or counted wrongly. The probe decides."""

from __future__ import annotations

import statistics

from headrace.doctor.finding import Confidence, Finding, Gain, Kind, Rule, no_gain
from headrace.doctor.fixes import larger_pool, setting, word
from headrace.doctor.observation import Observation, prompt_of, ttft_of
from headrace.doctor.rules.words import ms, percent
from headrace.doctor.step_curve import prompt_line

_NO_HELP = 0.75  # warm / cold
_HELPS = 0.5
_LARGE_BLOCK = 256
_BLOCK = 16.0  # tokens that are found together, where the engine does not tell


def _times(seen: Observation) -> tuple[float, float, float] | None:
    """TTFT of a prefix for the first time and again, and of a short prompt; None where the prefix
    is too short beside everything else to tell."""
    probe = seen.probe
    if probe is None:
        return None
    cold, warm = ttft_of(probe.cold), ttft_of(probe.warm)
    short = ttft_of(probe.beside) or ttft_of(probe.short)
    tokens = prompt_of(probe.cold)
    if cold is None or warm is None or short is None or len(probe.warm) < 2:
        return None
    if tokens is not None and tokens < 128:
        return None
    return (cold, warm, short) if cold >= 2 * short else None


def _reported(seen: Observation) -> float | None:
    """Cached tokens that usage told, or counters, in the prefix probe."""
    probe = seen.probe
    if probe is None:
        return None
    told = [float(a.cached_tokens) for a in probe.warm if a.cached_tokens is not None]
    if told:
        return sum(told)
    for name in ("prefix_hits", "cached_tokens"):
        if name in probe.warm_deltas:
            return probe.warm_deltas[name]
    return None


def prefix_computed_again(seen: Observation) -> Finding | None:
    """Row 19."""
    times = _times(seen)
    if times is None:
        return _evicted(seen)
    cold, warm, short = times
    if warm < _NO_HELP * cold:
        return _evicted(seen)
    off = seen.config.get("prefix_cache") is False
    reported = _reported(seen)
    if reported:
        return None  # it was found, and still took as long: not the cache
    evidence = [f"a prefix of {prompt_of(seen.probe.cold):,.0f} tokens: TTFT {ms(cold)}, the same "
                f"again {ms(warm)}" if seen.probe else ""]  # fmt: skip
    if off:
        evidence.append("the engine says that its prefix cache is off")
    if reported == 0:
        evidence.append("no token was reported as cached")
    return Finding(
        rule=19,
        kind=Kind.FAULT,
        symptom="the same prefix is computed again",
        evidence=tuple(evidence),
        cause="prefix caching is off" if off else
        "prefix caching is off, prompts are salted, or a gateway sends them to different replicas",
        fix=(setting(seen, prefix_cache=True),),
        gain=_found_gain(seen, statistics.median(_both(seen)), short),
        confidence=Confidence.HIGH if off else Confidence.MEDIUM,
        unless="your prompts share nothing: then nothing is lost",
    )  # fmt: skip


def _both(seen: Observation) -> list[float]:
    """Where nothing is found, the first time and the second one take the same: one sample."""
    probe = seen.probe
    answers = (*probe.cold, *probe.warm) if probe is not None else ()
    return [a.ttft_s for a in answers if a.is_good and a.ttft_s is not None]


def _found_gain(seen: Observation, now_s: float, short: float) -> Gain:
    """From what a repeated prefix takes now. One that is found leaves the question to compute, the
    rest of a block before it, and attention to the prefix."""
    probe = seen.probe
    asked = prompt_of(probe.question) if probe is not None else None
    first, line = (ttft_of(probe.question), prompt_line(probe)) if probe else (None, None)
    prefix = (prompt_of(probe.cold) if probe is not None else None) or 0.0
    pair_s = _pair_s(seen)
    of = "TTFT of a repeated prefix, as speed,"
    if asked is None or first is None or line is None:
        base = (prompt_of(probe.short) if probe is not None else None) or 0.0
        slow = short + pair_s * prefix * min(base, prefix)
        basis = "a short prompt's TTFT, without and with attention to the prefix"
        return Gain(of=of, low=now_s / slow, high=now_s / short, basis=basis)
    block = seen.number("block_tokens") or _BLOCK

    def found_s(rows: float) -> float:
        return first + line(rows) - line(asked) + pair_s * prefix * rows

    return Gain(of=of, low=now_s / found_s(asked + block), high=now_s / found_s(asked),
                basis=f"{asked:.0f} to {asked + block:.0f} tokens to compute, and attention to "
                f"{prefix:,.0f}")  # fmt: skip


def _pair_s(seen: Observation) -> float:
    """What attention of one token to one before it takes: a token of a longer prompt costs more
    than one of a shorter prompt by that alone. The median over all pairs of prompts, since a
    machine may be slow in any one of them."""
    probe = seen.probe
    first = ttft_of(probe.short) if probe is not None else None
    base = prompt_of(probe.short) if probe is not None else None
    if probe is None or first is None or base is None:
        return 0.0
    costs = [
        (a.prompt_tokens, (a.ttft_s - first) / (a.prompt_tokens - base))
        for a in (*probe.medium, *probe.cold, *probe.warm, *probe.long)
        if a.is_good and a.ttft_s is not None and a.prompt_tokens is not None
        and a.prompt_tokens > 2 * base and (a.cached_tokens or 0) < base
    ]  # fmt: skip
    found = [
        2 * (more - less) / (many - some)
        for some, less in costs
        for many, more in costs
        if many > 1.5 * some
    ]
    return max(0.0, statistics.median(found)) if found else 0.0


def _evicted(seen: Observation) -> Finding | None:
    """Headrace says why a prefix was not found."""
    misses = seen.groups.get("prefix_misses", {})
    evicted, every = misses.get("evicted", 0.0), sum(misses.values())
    if evicted < 10 or evicted < 0.3 * every:
        return None
    return Finding(
        rule=19,
        kind=Kind.FAULT,
        symptom="the same prefix is computed again",
        evidence=(f"{evicted:g} of {every:g} look-ups missed a block that had been evicted",),
        cause="the pool is too small for the prefixes that come back",
        fix=(f"a larger pool: {larger_pool(seen)}",),
        gain=Gain(
            of="prefill",
            low=1.0,
            high=1 / max(1 - evicted / every, 0.1),
            basis="without the look-ups that missed so",
        ),
        confidence=Confidence.HIGH,
        unless="-",
    )


def hybrid(seen: Observation) -> Finding | None:
    """Row 36: caching is on, and a repeated prefix is no faster, on a model whose state is not
    kept by the block."""
    times = _times(seen)
    if times is None or times[1] < _NO_HELP * times[0] or seen.config.get("prefix_cache") is False:
        return None
    block = seen.number("block_tokens")
    is_hybrid = seen.config.get("is_hybrid") is True
    if not is_hybrid and (block is None or block < _LARGE_BLOCK):
        return None
    cold, warm, short = times
    evidence = [f"TTFT {ms(cold)} for a new prefix, {ms(warm)} for the same again"]
    if block is not None:
        evidence.append(f"a block has {block:,.0f} tokens: shorter prefixes are never found")
    if is_hybrid:
        evidence.append("the model has recurrent or windowed layers")
    fix = word(seen, "hybrid", "a mode that keeps the state at block ends")
    return Finding(
        rule=36,
        kind=Kind.FAULT,
        symptom="prefix caching is on and gives nothing on this model",
        evidence=tuple(evidence),
        cause="the state of recurrent or windowed layers is not cached, or only in large blocks",
        fix=(fix, "know the least length that is found: one block"),
        gain=Gain(of="TTFT of a repeated prefix, as speed,", low=1.0, high=cold / short,
                  basis="a short prompt's TTFT"),
        confidence=Confidence.MEDIUM,
        unless="the prefix of the probe was shorter than one block",
    )  # fmt: skip


def counter_of_hits(seen: Observation) -> Finding | None:
    """Row 37: the counter says nothing was found, the clock says otherwise."""
    times = _times(seen)
    probe = seen.probe
    if times is None or probe is None or times[1] > _HELPS * times[0]:
        return None
    names = [name for name in ("prefix_hits", "cached_tokens") if name in probe.warm_deltas]
    if not names or any(probe.warm_deltas[name] > 0 for name in names):
        return None
    cold, warm, _ = times
    return Finding(
        rule=37,
        kind=Kind.COUNTER,
        symptom="the counter says that no prefix was found, the probe says otherwise",
        evidence=(f"TTFT {ms(cold)} for a new prefix, {ms(warm)} for the same again "
                  f"({percent(warm / cold)})",
                  f"{' and '.join(names)} did not move"),
        cause="a counter that is not wired",
        fix=("trust the probe; watch TTFT instead of the hit rate",),
        gain=no_gain("a number is wrong, nothing is slow"),
        confidence=Confidence.HIGH,
        unless="a gateway keeps whole answers",
    )  # fmt: skip


RULES: dict[int, Rule] = {19: prefix_computed_again, 36: hybrid, 37: counter_of_hits}
