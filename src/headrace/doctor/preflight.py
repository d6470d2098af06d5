"""Ten questions before an endpoint goes live: pass, fail or unknown, each with its evidence.

They are the checklist of a document that the project started from. Unknown is an answer: it means
that nothing here could tell, not that it is fine. Pure, over an `Observation` with probes.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable
from dataclasses import dataclass
from enum import StrEnum

from headrace.doctor.fixes import setting, waiting_limit
from headrace.doctor.observation import Observation, tpot_of, ttft_of
from headrace.doctor.rules.words import ms, percent
from headrace.doctor.step_curve import burst_rate

_SAFE_SHARE = 0.95
_WIDE = ("bf16", "fp16", "f16", "f32", "fp32", "bfloat16", "float16", "float32")


class Answered(StrEnum):
    PASS = "pass"
    FAIL = "fail"
    UNKNOWN = "unknown"


@dataclass(frozen=True, slots=True, kw_only=True)
class Check:
    number: int
    question: str
    answer: Answered
    evidence: str
    remedy: str = ""


_Outcome = tuple[Answered, str, str]


def _memory(seen: Observation) -> _Outcome:
    used = [g for g in (seen.probe.gpus if seen.probe else ()) if g.used_bytes and g.memory_bytes]
    if not used:
        return Answered.UNKNOWN, "no GPU of this machine was seen under load", (
            "run it on the server itself, where nvidia-smi is"
        )  # fmt: skip
    most = max(used, key=lambda g: (g.used_bytes or 0) / (g.memory_bytes or 1))
    share = (most.used_bytes or 0) / (most.memory_bytes or 1)
    shown = f"{(most.used_bytes or 0) / 1e9:,.3g} of {(most.memory_bytes or 0) / 1e9:,.3g} GB"
    return Answered.PASS, f"{shown} ({percent(share)}) in use during the bursts", ""


def _headroom(seen: Observation) -> _Outcome:
    share = seen.number("gpu_memory")
    if share is None:
        return Answered.UNKNOWN, "the engine does not tell its share of the GPU", ""
    if share < _SAFE_SHARE:
        return Answered.PASS, f"the engine may take {percent(share)}", ""
    return Answered.FAIL, f"the engine may take {percent(share)}", setting(seen, gpu_memory=0.9)


def _parts(seen: Observation) -> _Outcome:
    probe = seen.probe
    ttft, tpot = (ttft_of(probe.long), tpot_of(probe.short)) if probe else (None, None)
    if ttft is None or tpot is None:
        return Answered.UNKNOWN, "the probes did not measure both", "run it with probes"
    return Answered.PASS, f"a long prompt's first token takes {ms(ttft)}, then {ms(tpot)} each", ""


def _prefix(seen: Observation) -> _Outcome:
    probe = seen.probe
    cold, warm = (ttft_of(probe.cold), ttft_of(probe.warm)) if probe else (None, None)
    if cold is None or warm is None:
        return Answered.UNKNOWN, "the prefix probe did not run", ""
    words = f"TTFT {ms(cold)} for a new prefix, {ms(warm)} for the same again"
    if warm < 0.75 * cold:
        return Answered.PASS, words, ""
    short = ttft_of(probe.short) if probe else None
    if short is not None and cold < 2 * short:
        return Answered.UNKNOWN, f"{words}: too close to a short prompt's {ms(short)} to tell", ""
    return Answered.FAIL, words, setting(seen, prefix_cache=True)


def _quantized(seen: Observation) -> _Outcome:
    kind = seen.config.get("quantization")
    dtype = str(seen.config.get("dtype", "")).lower()
    if kind not in (None, "", "none", "as-stored"):
        return Answered.PASS, f"quantization is {kind}", ""
    if dtype in _WIDE:
        return Answered.FAIL, f"dtype is {dtype}, not quantized", (
            f"{setting(seen, quantization='fp8')}, after an evaluation on your own data"
        )  # fmt: skip
    return Answered.UNKNOWN, "the engine does not tell the type of its weights", ""


def _concurrency(seen: Observation) -> _Outcome:
    bursts = seen.probe.bursts if seen.probe else ()
    ttfts = [a.ttft_s for burst in bursts for a in burst if a.is_good and a.ttft_s is not None]
    tpots = [a.tpot_s for burst in bursts for a in burst if a.is_good and a.tpot_s is not None]
    if not ttfts or not tpots:
        return Answered.UNKNOWN, "no burst was answered", "run it with --concurrency of your peak"
    failed = sum(1 for burst in bursts for a in burst if not a.is_good)
    slow, pace = max(ttfts), statistics.fmean(tpots)
    words = f"{len(bursts[0])} at once: TTFT up to {ms(slow)}, {ms(pace)} a token, {failed} failed"
    limit, tpot = seen.objective.ttft_s, seen.objective.tpot_s
    good = failed == 0 and (limit is None or slow <= limit) and (tpot is None or pace <= tpot)
    asked = f"{words} (objective {seen.objective})"
    return (Answered.PASS if good else Answered.FAIL), asked, "" if good else "`headrace doctor`"


def _throughput(seen: Observation) -> _Outcome:
    probe = seen.probe
    moved = probe.deltas.get("generation_tokens") if probe else None
    if moved is None:
        why = seen.unknown.get("generation_tokens", "no counter of generated tokens was read")
        return Answered.FAIL if seen.levels else Answered.UNKNOWN, why, "scrape /metrics"
    rates = [rate for burst in (probe.bursts if probe else ()) if (rate := burst_rate(burst))]
    best = f"; bursts give {max(rates):,.4g} tokens/s" if rates else ""
    good = moved > 0
    words = f"the counter of generated tokens rose by {moved:,.0f}{best}"
    return (Answered.PASS if good else Answered.FAIL), words, ""


def _tracked(seen: Observation) -> _Outcome:
    has = {name: name in seen.histograms for name in ("ttft", "tpot", "itl")}
    if has["ttft"] and (has["tpot"] or has["itl"]):
        return Answered.PASS, "both are exported, apart", ""
    if not seen.levels:
        return Answered.UNKNOWN, "no metrics were read", ""
    missing = [
        seen.unknown.get(name, name) for name in ("ttft", "tpot") if name not in seen.histograms
    ]
    return Answered.FAIL, "; ".join(missing), "measure them at the clients or the gateway"


def _admission(seen: Observation) -> _Outcome:
    limit = seen.number("max_waiting")
    if limit is not None and limit > 0:
        return Answered.PASS, f"at most {limit:g} requests wait", ""
    if seen.deltas.get("rejected", 0) > 0:
        return Answered.PASS, "requests were turned away while it was read", ""
    if seen.engine.name == "vllm":
        return Answered.FAIL, "vLLM's queue has no bound", waiting_limit(seen, 100)
    return Answered.UNKNOWN, "the engine does not tell a limit of its queue", ""


def _versioned(seen: Observation) -> _Outcome:
    version, mark = seen.engine.version, seen.config.get("fingerprint")
    if version and (mark or seen.model):
        what = f"fingerprint {mark}" if mark else f"model {seen.model}"
        return Answered.PASS, f"{seen.engine.shown}, {what}; --save keeps the settings", ""
    return Answered.UNKNOWN, "the engine does not tell its version", ""


_CHECKS: tuple[tuple[str, Callable[[Observation], _Outcome]], ...] = (
    ("GPU memory is measured under load", _memory),
    ("the engine leaves head-room on the GPU", _headroom),
    ("prefill and decode are measured apart", _parts),
    ("a repeated prefix is found", _prefix),
    ("weights are quantized", _quantized),
    ("the objective holds at this concurrency", _concurrency),
    ("token throughput can be watched", _throughput),
    ("TTFT and TPOT can be watched apart", _tracked),
    ("the queue has a bound", _admission),
    ("version and settings are known", _versioned),
)


def preflight(seen: Observation) -> tuple[Check, ...]:
    checks = []
    for number, (question, ask) in enumerate(_CHECKS, 1):
        answer, evidence, remedy = ask(seen)
        checks.append(
            Check(number=number, question=question, answer=answer, evidence=evidence, remedy=remedy)
        )
    return tuple(checks)
