"""Memory: spills, a KV pool that is too small, too wide or too full. Full VRAM alone is no finding:
most engines reserve it."""

from __future__ import annotations

from headrace.doctor.finding import Confidence, Finding, Gain, Kind, Rule, no_gain
from headrace.doctor.fixes import larger_pool, narrow_kv, places, setting
from headrace.doctor.gains import gain_in_burst, gain_of_places
from headrace.doctor.observation import Observation
from headrace.doctor.rules.words import load_of, percent
from headrace.doctor.step_curve import alone_rate, overlap

_FULL = 0.95
_NEARLY_FULL = 0.9  # of a GPU's memory
_SPILL_RATE = 5.0  # tokens/s of one stream
_WIDE_KV = ("f16", "fp16", "bf16", "float16", "bfloat16", "f32", "float32")


def spilled(seen: Observation) -> Finding | None:
    """Row 1."""
    rate = alone_rate(seen.probe) if seen.probe is not None else None
    share = seen.number("spilled_share")
    evidence: list[str] = []
    if share is not None and share > 0.01:
        size, held = seen.number("model_bytes") or 0, seen.number("gpu_bytes") or 0
        evidence.append(
            f"{held / 1e9:,.3g} of {size / 1e9:,.3g} GB are on the GPU: {percent(share)} spilled"
        )
        confidence = Confidence.HIGH
    else:
        full = [
            g for g in seen.gpus
            if g.used_bytes and g.memory_bytes and g.used_bytes >= _FULL * g.memory_bytes
        ]  # fmt: skip
        busy, cpu = seen.gpu_busy, seen.rate("process_cpu_s")
        if rate is None or rate >= _SPILL_RATE or not full or busy is None or busy >= 0.5:
            return None
        evidence.append(
            f"one stream: {rate:.2g} tokens/s; GPU memory is full, the GPU {percent(busy)} busy"
        )
        if cpu is not None:
            evidence.append(f"the process uses {cpu:.2g} CPU cores")
        confidence = Confidence.MEDIUM
    if rate is not None and share:
        evidence.append(f"one stream gives {rate:.3g} tokens/s")
    context = seen.number("context_tokens")
    fix = ["a smaller quantization of the model"]
    if context is not None and context > 4096:
        fix.append(f"a shorter context: {setting(seen, context_tokens=4096)}")
    fix.append(f"keys and values in 8 bits: {narrow_kv(seen)}")
    return Finding(
        rule=1,
        kind=Kind.FAULT,
        symptom="weights or keys and values are in host memory",
        evidence=tuple(evidence),
        cause="the model and its context do not fit into the GPU's memory",
        fix=tuple(fix),
        gain=_spill_gain(seen, share, rate),
        confidence=confidence,
        unless="the GPU is full because the engine reserves it, and something else is slow",
    )


def _spill_gain(seen: Observation, share: float | None, rate: float | None) -> Gain:
    if seen.floor is not None and rate is not None:
        best = 1 / seen.floor.tpot_s
        return Gain(of="tokens/s of one stream", low=0.5 * best / rate, high=best / rate,
                    basis=f"half to all of the bandwidth's floor, {seen.floor.source}")  # fmt: skip
    if share is not None and share < 1:
        return no_gain("needs the host's and the GPU's bandwidth: `headrace calibrate`, `fit`")
    return no_gain("the model or the GPU is not known here; `headrace fit` has the floor")


def pool_too_small(seen: Observation) -> Finding | None:
    """Row 3."""
    load = load_of(seen)
    if seen.gpu_busy is not None and seen.gpu_busy > 0.9:
        return None
    held = _burst_fits(seen)
    if load.is_full and load.most_waiting >= 1:
        now, wanted = load.most_running, load.most_wanted
        shown, is_burst = load.shown, load.is_burst
    elif held is not None:
        (now, wanted, shown), is_burst = held, True
    else:
        return None
    return Finding(
        rule=3,
        kind=Kind.FAULT,
        symptom="requests wait because the KV pool is full",
        evidence=(shown, *_pool_words(seen)),
        cause="the pool is too small for this context times this concurrency",
        fix=(f"a larger pool: {larger_pool(seen)}",
             f"keys and values in 8 bits, after an evaluation: {narrow_kv(seen)}",
             "smaller max_tokens in requests; more GPUs or replicas"),
        gain=gain_in_burst(seen, wanted, now)
        if is_burst
        else gain_of_places(seen, now, wanted),
        confidence=Confidence.HIGH,
        unless="the GPU is as busy as it can be: then more sequences only take longer each",
    )  # fmt: skip


def _burst_fits(seen: Observation) -> tuple[float, float, str] | None:
    """By the ledger: fewer of a burst's requests fit into the pool than were asked for, and no more
    than that were answered together. Gauges may miss a burst that is short."""
    pool, bursts = seen.number("kv_tokens"), seen.probe.bursts if seen.probe else ()
    sizes = [
        (a.prompt_tokens or 0) + a.tokens for burst in bursts for a in burst if a.is_good
    ]  # fmt: skip
    if pool is None or not sizes or seen.config.get("reserves_context"):
        return None
    block = int(seen.number("block_tokens") or 1)
    each = -(-max(sizes) // block) * block
    fits, asked = pool // each, max(len(burst) for burst in bursts)
    joined = max(overlap(burst) for burst in bursts)
    if not 0 < joined <= fits + 0.5 or fits >= asked:
        return None
    shown = (
        f"a request of the bursts grows to {each:,} tokens: {fits:.0f} of {asked} fit, and "
        f"{joined:.1f} were answered together"
    )
    return float(fits), float(asked), shown


def _pool_words(seen: Observation) -> tuple[str, ...]:
    tokens = seen.number("kv_tokens")
    return () if tokens is None else (f"the pool holds {tokens:,.0f} tokens",)


def out_of_memory(seen: Observation) -> Finding | None:
    """Row 9."""
    said = [
        e for e in (seen.probe.errors if seen.probe else ())
        if "out of memory" in e.lower() or "outofmemory" in e.lower()
    ]  # fmt: skip
    share = seen.number("gpu_memory")
    failed = seen.deltas.get("failed", 0.0)
    failed += seen.groups.get("finished", {}).get("error", 0.0)
    if not said and not (failed > 0 and share is not None and share >= _FULL):
        return None
    evidence = [f"an answer ended with: {said[0]}"] if said else []
    if failed:
        evidence.append(f"{failed:g} requests failed in {seen.period_s:.3g} s")
    if share is not None:
        evidence.append(f"the engine may take {percent(share)} of the GPU")
    now = seen.number("max_sequences")
    fix = [f"leave head-room: {setting(seen, gpu_memory=0.9)}"]
    if now is not None:
        fix.append(f"admit less: {places(seen, max(1, int(now / 2)))}")
    return Finding(
        rule=9,
        kind=Kind.FAULT,
        symptom="out of memory in the middle of answers",
        evidence=tuple(evidence),
        cause="admission by the prompt alone, or no memory left beside the engine's share",
        fix=tuple(fix),
        gain=no_gain("requests that fail now would not"),
        confidence=Confidence.HIGH if said else Confidence.MEDIUM,
        unless="the failures are refusals of requests that are wrong: look at their messages",
    )


def preempts(seen: Observation) -> Finding | None:
    """Row 15; row 20 is the same at its worst."""
    preempted, share = _preempted(seen)
    if preempted is None or preempted < 1 or share is None or not 0.01 <= share < 0.5:
        return None
    now = seen.highest("running") or seen.number("max_sequences") or 2
    return Finding(
        rule=15,
        kind=Kind.FAULT,
        symptom="sequences are preempted",
        evidence=_preemption_words(seen, preempted, share),
        cause="more sequences are admitted than the KV pool holds once their answers have grown",
        fix=(places(seen, max(1, int(now * 0.8))), "smaller max_tokens in requests",
             f"a larger pool: {larger_pool(seen)}"),
        gain=Gain(of="output tokens/s", low=1.0, high=1 + share,
                  basis="at most what is computed twice now"),
        confidence=Confidence.HIGH,
        unless="preemptions are moments of a peak that has passed: watch it",
    )  # fmt: skip


def storm(seen: Observation) -> Finding | None:
    """Row 20."""
    preempted, share = _preempted(seen)
    if preempted is None or share is None or share < 0.5 or preempted < 3:
        return None
    now = seen.highest("running") or seen.number("max_sequences") or 2
    lost = seen.deltas.get("preempted_tokens")
    made = seen.deltas.get("generation_tokens")
    high = 1 + lost / made if lost and made else None
    return Finding(
        rule=20,
        kind=Kind.FAULT,
        symptom="a storm of preemptions: work is thrown away and done again",
        evidence=_preemption_words(seen, preempted, share),
        cause="the KV pool is full, and each sequence that returns pushes another one out",
        fix=(places(seen, max(1, int(now / 2))), "smaller max_tokens in requests",
             f"a larger pool: {larger_pool(seen)}", f"8-bit keys and values: {narrow_kv(seen)}"),
        gain=Gain(of="output tokens/s", low=1 + share / 2, high=high or 14.0,
                  basis="tokens computed twice" if high else
                  "half of the requests are computed again; a user saw × 14 (sglang#26248)"),
        confidence=Confidence.HIGH,
        unless="-",
    )  # fmt: skip


def _preempted(seen: Observation) -> tuple[float | None, float | None]:
    """Preemptions in the period, and per finished request."""
    preempted = seen.deltas.get("preemptions")
    done = seen.deltas.get("finished") or seen.deltas.get("requests")
    if preempted is None:
        return None, None
    if not done:
        running = seen.highest("running")
        return preempted, preempted / running if running else None
    return preempted, preempted / done


def _preemption_words(seen: Observation, preempted: float, share: float) -> tuple[str, ...]:
    words = [
        f"{preempted:g} preemptions in {seen.period_s:.3g} s, {percent(share)} of finished requests"
    ]
    kv = seen.highest("kv_usage")
    if kv is not None:
        words.append(f"the KV pool is up to {percent(kv)} in use")
    lost = seen.deltas.get("preempted_tokens")
    if lost:
        words.append(f"{lost:,.0f} computed tokens were lost")
    return tuple(words)


def wide_kv(seen: Observation) -> Finding | None:
    """Row 32."""
    kind = str(seen.config.get("kv_dtype", "")).lower()
    load = load_of(seen)
    preempted = seen.deltas.get("preemptions", 0.0)
    if kind not in _WIDE_KV or not load.is_full or not (load.most_waiting >= 1 or preempted >= 1):
        return None
    return Finding(
        rule=32,
        kind=Kind.LIMIT,
        symptom="keys and values are in 16 bits where memory binds",
        evidence=(f"kv_dtype is {kind}", load.shown),
        cause="each token takes twice what 8 bits would",
        fix=(f"{narrow_kv(seen)}, after an evaluation on your own data",),
        gain=gain_of_places(seen, load.most_running, 2 * load.most_running),
        confidence=Confidence.MEDIUM,
        unless="your evaluation shows that answers get worse",
    )


def context_too_long(seen: Observation) -> Finding | None:
    """Row 29."""
    context = seen.number("context_tokens")
    if context is None:
        return None
    longest = _longest(seen)
    if longest is None or context < 8 * longest:
        return None
    load = load_of(seen)
    full = load.is_full and load.most_waiting >= 1
    # What is reserved and not used is a loss only where memory binds.
    binds = bool(seen.number("spilled_share")) or any(
        g.used_bytes and g.memory_bytes and g.used_bytes >= _NEARLY_FULL * g.memory_bytes
        for g in seen.gpus
    )
    if not (full or (binds and seen.config.get("reserves_context"))):
        return None
    wanted = max(1024, 1 << (int(2 * longest) - 1).bit_length())
    if wanted >= context:
        return None
    return Finding(
        rule=29,
        kind=Kind.FAULT,
        symptom="the context limit is far above what comes",
        evidence=(f"the limit is {context:,.0f} tokens; the longest seen is {longest:,.0f}",),
        cause="keys and values are reserved for the whole limit"
        if seen.config.get("reserves_context")
        else "the pool is shared by requests that may all grow to the limit",
        fix=(setting(seen, context_tokens=wanted),),
        gain=Gain(of="sequences that fit", low=1.0, high=context / wanted,
                  basis="limit now over limit then"),
        confidence=Confidence.MEDIUM,
        unless="longer requests come at other times of the day",
    )  # fmt: skip


def _longest(seen: Observation) -> float | None:
    """Prompt and answer of the longest requests, from histograms or a high-water mark."""
    mark = seen.highest("longest_tokens")
    if mark:
        return mark
    parts = [seen.histograms.get(name) for name in ("prompt_length", "generation_length")]
    if any(part is None or part.count < 20 for part in parts):
        return None
    highs = [q.high for part in parts if part and (q := part.quantile(0.99))]
    return None if len(highs) < 2 or float("inf") in highs else sum(highs)


def never_fits(seen: Observation) -> Finding | None:
    """Row 38."""
    context, pool = seen.number("context_tokens"), seen.number("kv_tokens")
    stuck = (
        seen.levels.get("waiting") is not None
        and (seen.lowest("waiting") or 0) >= 1
        and seen.highest("running") == 0
        and len(seen.levels["waiting"]) >= 3
    )
    small = context is not None and pool is not None and pool < context
    refuses = seen.engine.name == "headrace"  # at the door, with the numbers
    if not stuck and (not small or refuses):
        return None
    evidence = []
    if stuck:
        evidence.append(
            f"{seen.lowest('waiting'):g} requests wait and none runs, in every sample of "
            f"{seen.period_s:.3g} s"
        )
    if small:
        evidence.append(f"the pool holds {pool:,.0f} tokens, the context limit is {context:,.0f}")
    fix = [f"pool at least as large as the context: {larger_pool(seen)}"]
    if small and pool is not None:
        fix.insert(0, setting(seen, context_tokens=int(pool)))
    return Finding(
        rule=38,
        kind=Kind.FAULT,
        symptom="a request can wait for ever",
        evidence=tuple(evidence),
        cause="it fits the context limit, but not the KV pool, and nothing checks that at the door",
        fix=tuple(fix),
        gain=no_gain("requests behind it would run at all"),
        confidence=Confidence.HIGH if stuck else Confidence.MEDIUM,
        unless="the engine was just starting while it was read" if stuck else
        "no request is ever that long",
    )  # fmt: skip


RULES: dict[int, Rule] = {
    1: spilled,
    3: pool_too_small,
    9: out_of_memory,
    15: preempts,
    20: storm,
    29: context_too_long,
    32: wide_kv,
    38: never_fits,
}
