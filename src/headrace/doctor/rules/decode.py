"""Decode: time per token against the objective, the hardware's floor, and what changes it."""

from __future__ import annotations

import statistics
from itertools import pairwise

from headrace.doctor.finding import Confidence, Finding, Gain, Kind, Rule, no_gain
from headrace.doctor.fixes import narrow_kv, places, setting, word
from headrace.doctor.observation import Observation, tpot_of
from headrace.doctor.rules.words import ms, percent
from headrace.doctor.step_curve import alone_rate

_WIDE = ("bf16", "fp16", "f16", "f32", "fp32", "bfloat16", "float16", "float32", "half")
_UNDER = 0.5  # of the floor's rate


def _tpot(seen: Observation) -> tuple[float, str] | None:
    """Users' own where there is some, else one stream's."""
    for name in ("tpot", "itl"):
        mean = seen.mean(name)
        if mean is not None:
            return mean, "mean over the endpoint's own traffic"
    found = tpot_of(seen.probe.short) if seen.probe is not None else None
    return None if found is None else (found, "one stream of the probes")


def decode_is_slow(seen: Observation) -> Finding | None:
    """Row 13."""
    pace, found = seen.objective.tpot_s, _tpot(seen)
    if pace is None or found is None or found[0] <= pace:
        return None
    if (seen.highest("waiting") or 0) >= 1:
        return None
    tpot, whose = found
    running = seen.highest("running")
    evidence = [f"TPOT {ms(tpot)} ({whose}; objective {ms(pace)})", "nothing waits"]
    one = tpot_of(seen.probe.short) if seen.probe is not None else None
    batch = one is not None and tpot > 1.5 * one
    if running is not None:
        evidence.append(f"up to {running:g} sequences run together")
    if one is not None:
        evidence.append(f"one stream alone: {ms(one)}")
    if seen.floor is not None:
        evidence.append(f"the bandwidth's floor is {ms(seen.floor.tpot_s)} ({seen.floor.source})")
    fix = []
    if batch and running:
        fix.append(f"fewer at a time: {places(seen, max(1, int(running / 2)))}")
    fix += ["weights in fewer bits, after an evaluation",
            f"keys and values in 8 bits: {narrow_kv(seen)}",
            "speculation at few streams; tensor parallelism over NVLink"]  # fmt: skip
    high = (one is not None and batch and tpot / one) or (seen.floor and tpot / seen.floor.tpot_s)
    return Finding(
        rule=13,
        kind=Kind.LIMIT,
        symptom="tokens come slowly, and nothing waits",
        evidence=tuple(evidence),
        cause="decode: large batches make each step long" if batch else
        "decode: every token reads all weights and its keys and values",
        fix=tuple(fix),
        gain=Gain(of="speed of a stream", low=1.0, high=float(high),
                  basis="one stream alone" if batch else "the bandwidth's floor")
        if high else no_gain("the model's floor on this GPU is not known here"),
        confidence=Confidence.HIGH,
        unless="the objective is another one: --slo",
    )  # fmt: skip


def precision_too_wide(seen: Observation) -> Finding | None:
    """Row 6: only where decode is too slow, or memory binds; else there is nothing to win."""
    kind = str(seen.config.get("dtype", "")).lower()
    quantized = seen.config.get("quantization") not in (None, "", "none", "as-stored")
    pace, found = seen.objective.tpot_s, _tpot(seen)
    if quantized or kind not in _WIDE or pace is None or found is None or found[0] <= pace:
        return None
    ratio = seen.floor.narrower_ratio if seen.floor is not None else None
    return Finding(
        rule=6,
        kind=Kind.LIMIT,
        symptom="weights are wider than they may need to be",
        evidence=(f"dtype {kind}, not quantized; TPOT {ms(found[0])} (objective {ms(pace)})",),
        cause="decode reads twice the bytes of 8-bit weights, four times those of 4-bit ones",
        fix=(f"{setting(seen, quantization='fp8')}, after an evaluation on your own data",),
        gain=Gain(of="speed of a stream", low=1.0, high=ratio or 2.0,
                  basis="bytes of the weights, from the ledger" if ratio else "16 bits to 8"),
        confidence=Confidence.MEDIUM,
        unless="your evaluation shows that answers get worse",
    )  # fmt: skip


def under_the_floor(seen: Observation) -> Finding | None:
    """Row 8: far below what this model gives on this GPU."""
    rate = alone_rate(seen.probe) if seen.probe is not None else None
    if rate is None or seen.floor is None:
        return None
    best = 1 / seen.floor.tpot_s
    if rate >= _UNDER * best:
        return None
    fix = [
        f"a newer {seen.engine.label}; CUDA graphs on: {setting(seen, eager=False)}",
        "the kernel that the engine picks by itself: a flag for quantization may force a slow one",
    ]
    return Finding(
        rule=8,
        kind=Kind.FAULT,
        symptom="one stream is far below what this model gives on this GPU",
        evidence=(f"{rate:,.4g} tokens/s; the memory's bandwidth allows {best:,.4g} "
                  f"({seen.floor.source}): {percent(rate / best)}",),
        cause="an old version, eager mode, or the wrong kernel",
        fix=tuple(fix),
        gain=Gain(of="tokens/s of one stream", low=_UNDER * best / rate, high=best / rate,
                  basis="half to all of the floor"),
        confidence=Confidence.MEDIUM,
        unless="others' requests ran beside the probes, or the GPU is another one",
    )  # fmt: skip


def graphs(seen: Observation) -> Finding | None:
    """Row 26."""
    eager = seen.config.get("eager") is True
    used = seen.levels.get("graphs_used")
    never = bool(used) and max(used or (0,)) == 0 and (seen.rate("generation_tokens") or 0) > 0
    graph, weights = seen.highest("graph_bytes"), seen.highest("weight_bytes")
    memory = max((g.memory_bytes or 0 for g in seen.gpus), default=0) or None
    fat = graph is not None and memory is not None and graph > 0.1 * memory
    if not (eager or never or fat) or str(seen.config.get("device", "")) == "cpu":
        return None
    evidence = []
    if eager:
        evidence.append("the engine was started in eager mode")
    if never:
        evidence.append("no step used a graph while tokens were generated")
    if fat and graph is not None and memory is not None:
        evidence.append(f"graphs take {graph / 1e9:.3g} of the GPU's {memory / 1e9:.3g} GB")
    if fat and weights:
        evidence.append(f"the weights take {weights / 1e9:.3g} GB")
    return Finding(
        rule=26,
        kind=Kind.FAULT,
        symptom="CUDA graphs take much memory" if fat else "steps run without CUDA graphs",
        evidence=tuple(evidence),
        cause="a graph for each of many batch sizes" if fat else
        "every kernel is launched by the host, one by one",
        fix=(word(seen, "capture", "fewer capture sizes"),) if fat else
        (setting(seen, eager=False),),
        gain=no_gain("depends on how long kernels are: verify measures it") if not fat else
        no_gain("memory for keys and values"),
        confidence=Confidence.HIGH,
        unless="graphs were turned off because of a fault of theirs",
    )  # fmt: skip


def speculation(seen: Observation) -> Finding | None:
    """Row 27."""
    drafted, accepted = seen.deltas.get("draft_tokens"), seen.deltas.get("accepted_tokens")
    share = accepted / drafted if drafted and accepted is not None else None
    if share is None and seen.levels.get("acceptance"):
        share = seen.level("acceptance")
    running = seen.highest("running") or 0
    if share is None:
        return None
    drafts = seen.deltas.get("drafts")
    k = drafted / drafts if drafted and drafts else None
    if share >= 0.4 and not (running >= 64 and (k or 0) >= 3):
        return None
    evidence = [f"{percent(share)} of proposed tokens are accepted", f"{running:g} sequences run"]
    if k is not None:
        evidence.append(f"{k:.2g} tokens are proposed at a time, {share * k:.2g} accepted")
    return Finding(
        rule=27,
        kind=Kind.FAULT,
        symptom="speculation costs more than it gives",
        evidence=tuple(evidence),
        cause="few proposals are accepted" if share < 0.4 else
        "at a large batch a step is bound by operations, and verifying adds to them",
        fix=("fewer proposed tokens, or none above a number of sequences",
             word(seen, "speculation", "turn it off")),
        gain=no_gain("needs the time of a step with and without: turn it off, then verify"),
        confidence=Confidence.MEDIUM,
        unless="the engine lowers the number of proposals by itself under load",
    )  # fmt: skip


def long_answers_slow_down(seen: Observation) -> Finding | None:
    """Row 40: not a fault. Only the part before the long prompt arrives counts."""
    probe = seen.probe
    if probe is None or probe.stream is None:
        return None
    until = probe.intruder_at_s if probe.intruder_at_s is not None else float("inf")
    times = [at for at in probe.stream.arrivals_s if at <= until]
    gaps = [b - a for a, b in pairwise(times)]
    third = len(gaps) // 3
    if third < 12:
        return None
    first, last = statistics.median(gaps[:third]), statistics.median(gaps[-third:])
    middle = statistics.median(gaps[third:-third])
    grew = last - first
    is_steady = 0.25 * grew <= middle - first <= 0.75 * grew  # not a sudden disturbance
    if last < 1.15 * first or not is_steady or last > 3 * first:
        return None
    return Finding(
        rule=40,
        kind=Kind.EXPECTED,
        symptom="tokens come more slowly towards the end of a long answer",
        evidence=(f"a token takes {ms(first)} in the first third, {ms(middle)} in the second, "
                  f"{ms(last)} in the last",),
        cause="every token reads the keys and values of all before it: not a fault",
        fix=("nothing; `headrace fit` has the bytes a token",),
        gain=no_gain("this is as it should be"),
        confidence=Confidence.MEDIUM,
        unless="the slope is far steeper than the bytes of keys and values explain",
    )  # fmt: skip


RULES: dict[int, Rule] = {
    6: precision_too_wide,
    8: under_the_floor,
    13: decode_is_slow,
    26: graphs,
    27: speculation,
    40: long_answers_slow_down,
}
