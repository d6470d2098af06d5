"""A diagnosis as text and as JSON; a saved report is that JSON, and can be read again.

`schema` is headrace-doctor/1; docs/doctor.md describes it. Knows no terminal.
"""

from __future__ import annotations

import json
import math
import textwrap
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from headrace.core.errors import ConfigError
from headrace.doctor.finding import Finding
from headrace.doctor.mishaps import advice
from headrace.doctor.observation import (
    Answer,
    Earlier,
    Observation,
    Probe,
    prompt_of,
    tpot_of,
    ttft_of,
)
from headrace.doctor.rules import diagnose
from headrace.doctor.rules.prefill import stream_gaps
from headrace.doctor.rules.words import ms, percent
from headrace.doctor.step_curve import burst_rate, overlap

SCHEMA = "headrace-doctor/1"
_WIDTH = 100
_GROUPS = ("short", "medium", "long", "cold", "warm", "plain", "grammar", "grammar_small",
           "grammar_new", "penalty", "sizes", "beside", "question",
           "references")  # fmt: skip
_SHOWN = {"grammar_new": "new text", "grammar_small": "small"}  # of the grammar


@dataclass(frozen=True, slots=True, kw_only=True)
class Diagnosis:
    seen: Observation
    findings: tuple[Finding, ...]
    explained: tuple[Finding, ...]


def examine(seen: Observation) -> Diagnosis:
    findings, explained = diagnose(seen)
    return Diagnosis(seen=seen, findings=findings, explained=explained)


# As text.


def lines(found: Diagnosis, *, explain: bool = False) -> Iterator[str]:
    seen = found.seen
    yield f"{seen.url}  {seen.engine.shown}" + (f", {seen.model}" if seen.model else "")
    yield from _reading_lines(seen)
    if seen.probe is not None:
        yield from _probe_lines(seen.probe)
    for note in seen.notes:
        yield from _wrapped("  note: ", note)
    yield ""
    if not found.findings:
        yield from _wrapped("", _healthy(seen))
    for number, finding in enumerate(found.findings, 1):
        yield from finding_lines(number, finding)
        yield ""
    for finding in found.explained:
        yield from _wrapped("explained by the above: ", f"{finding.symptom} (rule {finding.rule})")
    if explain:
        yield from _explained(seen)


def finding_lines(number: int, finding: Finding) -> Iterator[str]:
    head = f"{number}. [{finding.kind}] "
    yield from _wrapped(head, f"{finding.symptom}  (rule {finding.rule})")
    for evidence in finding.evidence:
        yield from _wrapped("   evidence    ", evidence)
    yield from _wrapped("   cause       ", finding.cause)
    for fix in finding.fix:
        yield from _wrapped("   fix         ", fix)
    yield from _wrapped("   gain        ", finding.gain.shown)
    yield f"   confidence  {finding.confidence}"
    yield from _wrapped("   unless      ", finding.unless)


def _reading_lines(seen: Observation) -> Iterator[str]:
    parts = []
    for name, word in (("running", "running"), ("waiting", "waiting")):
        value = seen.level(name)
        if value is not None:
            parts.append(f"{value:.3g} {word}")
    kv = seen.highest("kv_usage")
    if kv is not None:
        parts.append(f"KV {percent(kv)}")
    rate = seen.rate("generation_tokens")
    if rate is not None:
        parts.append(f"{rate:,.4g} tokens/s generated")
    if parts:
        yield f"  traffic  {', '.join(parts)} (over {seen.period_s:.2g} s)"
    for name, shown in (("ttft", "TTFT"), ("itl", "between tokens"), ("queue_time", "queue")):
        found = seen.histograms.get(name)
        if found is not None and found.count > 0:
            ends = [found.quantile(share) for share in (0.5, 0.99)]
            if all(ends) and not math.isinf(found.bounds[0]):
                p50, p99 = (each.shown(1e3, " ms") for each in ends if each is not None)
                yield f"  {shown:<15} p50 {p50}, p99 {p99} ({found.count:,.0f} values)"


def _probe_lines(probe: Probe) -> Iterator[str]:
    yield f"  probes   {probe.spent_tokens:,} tokens in {probe.spent_s:.1f} s"
    for name in _GROUPS[:-3]:  # the last three are there for steps and bursts
        answers: tuple[Answer, ...] = getattr(probe, name)
        ttft, tpot, prompt = ttft_of(answers), tpot_of(answers), prompt_of(answers)
        if ttft is None:
            continue
        words = [f"TTFT {ms(ttft)}"]
        if tpot is not None:
            words.append(f"{ms(tpot)} a token")
        if prompt is not None:
            words.append(f"prompt of {prompt:,.0f} tokens")
        shown = _SHOWN.get(name, name)
        yield f"    {shown:<8} {', '.join(words)}"
    rates = [rate for burst in probe.bursts if (rate := burst_rate(burst))]
    if rates:
        together = max(overlap(burst) for burst in probe.bursts)
        yield (
            f"    burst    {max(rates):,.4g} tokens/s of {len(probe.bursts[0])} at once, "
            f"{together:.1f} together"
        )
    client = probe.client
    if client.lag_p99_s is not None:
        late = (
            "" if client.dispatch_p99_s is None else f", sends late by {ms(client.dispatch_p99_s)}"
        )
        yield (
            f"    client   wakes up late by {ms(client.lag_p99_s)} (p99){late}, CPU "
            f"{percent(client.cpu_share or 0)}"
        )
    errors = probe.errors
    if errors:
        yield from _wrapped("    failed   ", f"{len(errors)} of {len(probe.answers)}: {errors[0]}")
    reasons: dict[str, list[str]] = {}
    for name, why in probe.skipped.items():
        reasons.setdefault(why, []).append(name)
    for why, names in reasons.items():
        yield from _wrapped("    left out ", f"{', '.join(names)}: {why}")


def all_failed(seen: Observation) -> bool:
    """Nothing was measured: that is not health."""
    return seen.probe is not None and not any(answer.is_good for answer in seen.probe.answers)


def no_verdict(seen: Observation) -> str | None:
    """Why nothing can be said: nothing was measured, or the endpoint went away in the middle."""
    if seen.probe is None:
        return None
    if all_failed(seen):
        why = seen.probe.errors[0] if seen.probe.errors else "none was answered"
        return f"No verdict: every probe failed ({why}). {advice(why, seen.model)}".rstrip()
    if seen.probe.stopped is not None:
        return "No verdict: the endpoint went away. Nothing is wrong with what it did before."
    return None


def _healthy(seen: Observation) -> str:
    if (why := no_verdict(seen)) is not None:
        return why
    if seen.probe is None and not seen.deltas:
        return "No finding. Without metrics and probes little can be seen."
    if seen.probe is None:
        return "No finding in what the engine exports. Probes look further."
    return "No finding: nothing here is slow for a reason that is known."


def _explained(seen: Observation) -> Iterator[str]:
    yield ""
    yield "What was read"
    for name in sorted(seen.levels):
        yield f"  {name} = {', '.join(f'{value:g}' for value in seen.levels[name])}"
    for name in sorted(seen.deltas):
        yield f"  {name} + {seen.deltas[name]:,.6g}"
    for name, value in sorted(seen.config.items()):
        yield from _wrapped("  ", f"setting {name} = {value}")
    if seen.floor is not None:
        yield f"  floor of TPOT = {ms(seen.floor.tpot_s)} ({seen.floor.source})"
    yield "Unknown, and why"
    for name, why in sorted(seen.unknown.items()):
        yield from _wrapped(f"  {name}: ", why)


def _wrapped(head: str, text: str) -> list[str]:
    return textwrap.wrap(
        text, _WIDTH, initial_indent=head, subsequent_indent=" " * len(head),
        break_long_words=False, break_on_hyphens=False,
    ) or [head.rstrip()]  # fmt: skip


# As JSON.


def facts(found: Diagnosis) -> dict[str, Any]:
    seen = found.seen
    return {
        "schema": SCHEMA,
        "when": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
        "url": seen.url,
        "engine": asdict(seen.engine),
        "model": seen.model,
        "objective": str(seen.objective),
        "findings": [_finding_facts(each) for each in found.findings],
        "explained": [_finding_facts(each) for each in found.explained],
        "levels": {name: list(values) for name, values in seen.levels.items()},
        "rates": {name: seen.rate(name) for name in seen.deltas},
        "quantiles": _quantile_facts(seen),
        "period_s": seen.period_s,
        "config": dict(seen.config),
        "unknown": dict(seen.unknown),
        "notes": list(seen.notes),
        "probe": None if seen.probe is None else probe_facts(seen.probe),
    }


def _finding_facts(finding: Finding) -> dict[str, Any]:
    return asdict(finding) | {"gain": asdict(finding.gain) | {"shown": finding.gain.shown}}


def _quantile_facts(seen: Observation) -> dict[str, Any]:
    shown: dict[str, Any] = {}
    for name, buckets in seen.histograms.items():
        if buckets.count <= 0:
            continue
        shown[name] = {"count": buckets.count, "mean": buckets.mean}
        for share in (0.5, 0.9, 0.95, 0.99):
            found = buckets.quantile(share)
            if found is not None:
                high = None if math.isinf(found.high) else found.high
                shown[name][f"p{share * 100:g}"] = [found.low, high]
    return shown


def probe_facts(probe: Probe) -> dict[str, Any]:
    """All single values, so that two reports can be compared."""
    groups = {name: [_answer_facts(a) for a in getattr(probe, name)] for name in _GROUPS}
    return {
        **groups,
        "bursts": [[_answer_facts(a) for a in burst] for burst in probe.bursts],
        "burst_rates": [burst_rate(burst) for burst in probe.bursts],
        "overlaps": [overlap(burst) for burst in probe.bursts],
        "burst_levels": {name: list(values) for name, values in probe.burst_levels.items()},
        "stream": None if probe.stream is None else _answer_facts(probe.stream),
        "longest_gap_s": max(stream_gaps(probe)[1], default=None),
        "client": asdict(probe.client),
        "deltas": dict(probe.deltas),
        "spent_tokens": probe.spent_tokens,
        "spent_s": probe.spent_s,
        "skipped": dict(probe.skipped),
        "stopped": probe.stopped,
        "errors": list(probe.errors),
    }


def _answer_facts(answer: Answer) -> dict[str, Any]:
    fields = ("ttft_s", "end_s", "tokens", "prompt_tokens", "cached_tokens", "error")
    return {name: getattr(answer, name) for name in fields} | {"tpot_s": answer.tpot_s}


def load(path: Path) -> dict[str, Any]:
    """A saved report; an error of one line where it is none."""
    try:
        found = json.loads(path.read_text())
    except (OSError, ValueError) as error:
        raise ConfigError(
            f"{path} is not a report of the doctor: {error}.", "Give a file made by --save."
        ) from None
    if not isinstance(found, dict) or found.get("schema") != SCHEMA:
        raise ConfigError(
            f"{path} is not a report with schema {SCHEMA}.", "Give a file made by --save."
        )
    return found


def earlier_of(report: dict[str, Any]) -> Earlier | None:
    """What rule 25 needs of an earlier report."""
    tpots = sorted(
        a["tpot_s"] for a in (report.get("probe") or {}).get("short", []) if a.get("tpot_s")
    )
    if not tpots:
        return None
    config = {
        name: value for name, value in (report.get("config") or {}).items() if name != "uptime_s"
    }
    return Earlier(
        uptime_s=(report.get("config") or {}).get("uptime_s"),
        rate=1 / tpots[len(tpots) // 2],
        config=config,
        when=str(report.get("when")),
    )
