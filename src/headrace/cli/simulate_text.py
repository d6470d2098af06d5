"""What `headrace simulate` found, as JSON values and as lines within 100 columns.

Writes what others computed. docs/simulate.md has the schema.
"""

from __future__ import annotations

import textwrap
from collections import Counter
from collections.abc import Iterator
from dataclasses import asdict, dataclass, replace
from typing import TYPE_CHECKING, Any

from headrace.simulate.fleet import FleetReport

if TYPE_CHECKING:
    from headrace.cli.simulate_asked import Fleet
    from headrace.cli.simulate_machine import Machine
    from headrace.simulate.report import Percentiles, Report
    from headrace.simulate.verdict import Bracket
    from headrace.workload.slo import Slo

WIDTH, _NAME = 100, 13


@dataclass(frozen=True, slots=True, kw_only=True)
class Run:
    """A report with step times at one place of the band. `lateness` is what first tokens are off
    there besides."""

    report: Report
    slowness: float = 1.0
    lateness: float = 1.0

    def latencies(self) -> list[tuple[str, Percentiles | None]]:
        """None if saturated: they would say how long the run was."""
        report, first = self.report, self.report.ttft_s
        if report.saturated:
            return []
        if first is not None and self.lateness != 1.0:
            first = replace(
                first, **{name: value * self.lateness for name, value in asdict(first).items()}
            )
        return [("ttft_s", first), ("tpot_s", report.tpot_s), ("e2e_s", report.e2e_s)]

    def objective(self, slo: Slo) -> Slo:
        """What the report must meet, so that `slo` is met with late first tokens."""
        return slo if slo.ttft_s is None else replace(slo, ttft_s=slo.ttft_s / self.lateness)

    def is_good(self, slo: Slo | None) -> bool:
        """Without an objective: the queue does not grow."""
        report = self.report
        return not report.saturated if slo is None else report.meets(self.objective(slo))


@dataclass(frozen=True, slots=True, kw_only=True)
class Answer:
    machine: Machine
    fleet: Fleet
    slo: Slo | None
    middle: Run
    ends: tuple[Run, Run] | None  # fast and slow; None: step times were measured on this machine
    bracket: Bracket | None

    @property
    def is_good(self) -> bool:
        """At the slow end of the band too, as `headrace plan` demands it."""
        runs = [self.middle, *(self.ends or ())[1:]]
        return all(run.is_good(self.slo) for run in runs)

    @property
    def replica_s(self) -> float:
        report = self.middle.report
        if isinstance(report, FleetReport):
            return report.replica_s
        return max((each.end_s or 0.0 for each in report.served), default=0.0)

    @property
    def gpu_hours(self) -> float | None:
        """None: the machine is no GPU."""
        if self.machine.facts["gpu"] is None:
            return None
        return self.replica_s * self.fleet.tp / 3600

    @property
    def band_rates(self) -> tuple[float, float] | None:
        """Where saturation begins, with the band: rates are as steps are fast."""
        band, bracket = self.machine.band, self.bracket
        if band is None or bracket is None:
            return None
        return bracket.stable / band.slow, bracket.saturated / band.fast


# -- JSON --------------------------------------------------------------------------------------


def answer_facts(answer: Answer) -> dict[str, Any]:
    """Seconds, tokens and requests; None: not known."""
    band, bracket = answer.machine.band, answer.bracket
    facts = run_facts(answer.middle, answer.slo)
    facts["is_good"] = answer.is_good
    facts["impossible"] = answer.machine.impossible
    facts["deployment"] = answer.machine.facts
    facts["fleet"] = fleet_facts(answer)
    facts["band"] = None
    if band is not None and answer.ends is not None:
        fast, slow = answer.ends
        facts["band"] = {
            "source": band.source,
            "step_times": [band.fast, band.slow],
            "first_tokens": [band.fast * band.first_fast, band.slow * band.first_slow],
            "fast": run_facts(fast, answer.slo),
            "slow": run_facts(slow, answer.slo),
        }
    facts["saturation"] = None
    if bracket is not None:
        rates = answer.band_rates
        facts["saturation"] = {**asdict(bracket), "band": None if rates is None else list(rates)}
    return facts


def run_facts(run: Run, slo: Slo | None) -> dict[str, Any]:
    report = run.report
    goal = None if slo is None else run.objective(slo)
    return {
        "requests": len(report.served),
        "refused": report.refused,
        "verdict": report.verdict.value,
        "output_tokens_s": report.output_tokens_s,
        "input_tokens_s": report.input_tokens_s,
        "requests_s": report.requests_s,
        "cached_share": report.cached_share,
        "steps": report.steps,
        "preemptions": report.preemptions,
        "draft_tokens": report.draft_tokens,
        "accepted_tokens": report.accepted_tokens,
        "latency": None
        if report.saturated
        else {name: None if one is None else asdict(one) for name, one in run.latencies()},
        "slo": None
        if goal is None
        else {
            "objective": str(slo),
            "met_share": report.met_share(goal),
            "goodput_s": report.goodput_s(goal),
            "is_met": report.meets(goal),
        },
    }


def fleet_facts(answer: Answer) -> dict[str, Any]:
    fleet, report = answer.fleet, answer.middle.report
    by_replica = Counter(each.replica for each in report.served)
    sizes = report.sizes if isinstance(report, FleetReport) else ((0.0, 1),)
    return {
        "replicas": fleet.replicas,
        "decode_replicas": fleet.decode,
        "gpus": fleet.gpus if answer.machine.facts["gpu"] is not None else None,
        "router": fleet.routing.value,
        "autoscale": None if fleet.scaling is None else asdict(fleet.scaling),
        "cold_start_s": fleet.cold_start_s if fleet.scaling is not None else None,
        "sizes": [{"at_s": at_s, "replicas": count} for at_s, count in sizes],
        "requests_by_replica": [by_replica[number] for number in range(max(by_replica) + 1)]
        if by_replica
        else [],
        "replica_hours": answer.replica_s / 3600,
        "gpu_hours": answer.gpu_hours,
    }


# -- lines -------------------------------------------------------------------------------------


def lines(answer: Answer) -> Iterator[str]:
    run, slo = answer.middle, answer.slo
    report = run.report
    yield from _row("deployment", answer.machine.label)
    if not answer.fleet.is_one:
        yield from _fleet_lines(answer)
    yield from _row(
        "requests",
        f"{len(report.served):,}, {report.refused:,} refused, {report.steps:,} steps",
    )
    yield from _row(
        "throughput",
        f"{report.output_tokens_s:,.1f} tokens/s out, {report.input_tokens_s:,.1f} in, "
        f"{report.requests_s:.3g} requests/s",
    )
    if report.draft_tokens:
        share = report.accepted_tokens / report.draft_tokens
        yield from _row("guesses", f"{report.draft_tokens:,} tokens, {share:.0%} of them right")
    yield from _row("from cache", f"{report.cached_share:.1%} of prompt tokens")
    if report.saturated:
        yield from _row(
            "verdict", "saturated: the queue kept growing, so latencies have no meaning"
        )
    else:
        yield from _row("verdict", _verdict(report.verdict.value))
        yield from _latency_lines(run)
    yield from _band_lines(answer)
    if slo is not None:
        goal = run.objective(slo)
        yield from _row("objective", f"{slo}: {_judged(answer, slo)}")
        if answer.machine.impossible is not None:
            yield from _row("impossible", answer.machine.impossible)
        yield from _row(
            "within it",
            f"{report.met_share(goal):.1%}, goodput {report.goodput_s(goal):.3g} requests/s",
        )
    if answer.bracket is not None:
        rates = answer.band_rates
        wider = "" if rates is None else f"; with the band {rates[0]:.3g} to {rates[1]:.3g}"
        yield from _row("saturated", f"{answer.bracket}{wider}")


def _latency_lines(run: Run) -> Iterator[str]:
    known = [(name, times) for name, times in run.latencies() if times is not None]
    if not known:
        yield from _row("latencies", "none: no request is in the steady part")
        return
    yield f"{'':<{_NAME}}{'p50':>10}{'p90':>10}{'p99':>10}{'mean':>10}"
    for name, times in known:
        shown = "".join(f"{_ms(each):>10}" for each in _columns(times))
        yield f"{name.removesuffix('_s').upper():<{_NAME}}{shown}"


def _verdict(word: str) -> str:
    return f"{word}: too few requests to tell" if word == "unclear" else word


def _fleet_lines(answer: Answer) -> Iterator[str]:
    fleet, facts = answer.fleet, fleet_facts(answer)
    what = f"{fleet.replicas} replica{'' if fleet.replicas == 1 else 's'}"
    if fleet.decode:
        what = f"{fleet.replicas} for prompts, {fleet.decode} for decoding"
    spent = f"{facts['replica_hours']:.3g} replica-hours"
    if answer.gpu_hours is not None:
        what += f" of {fleet.tp} GPU{'' if fleet.tp == 1 else 's'}"
        spent = f"{answer.gpu_hours:.3g} GPU-hours"
    counts = facts["requests_by_replica"]
    yield from _row(
        "fleet",
        f"{what}, {fleet.routing.value}; requests by replica {min(counts, default=0):,} to "
        f"{max(counts, default=0):,}; {spent}",
    )
    if fleet.scaling is not None:
        rules, sizes = fleet.scaling, facts["sizes"]
        shown = [f"{each['replicas']} at {each['at_s']:.0f} s" for each in sizes[:12]]
        more = [f"{len(sizes) - 12} more changes"] if len(sizes) > 12 else []
        yield from _row(
            "scaling",
            f"{rules.least} to {rules.most}, cold start {fleet.cold_start_s:g} s: "
            + ", ".join([*shown, *more]),
        )


def _band_lines(answer: Answer) -> Iterator[str]:
    band = answer.machine.band
    if band is None or answer.ends is None:
        return
    fast, slow = answer.ends
    found = [
        f"{name.removesuffix('_s').upper()} {_range(at.p50, later.p50)} (p50), "
        f"{_range(at.p99, later.p99)} (p99)"
        for (name, at), (_, later) in zip(fast.latencies(), slow.latencies(), strict=False)
        if at is not None and later is not None and name != "e2e_s"
    ]
    if slow.report.saturated:
        found = ["saturated at its slow end"]
    source = f"step times x {band.fast:.2f} to {band.slow:.2f}, {band.source}"
    yield from _row("band", f"{'; '.join(found)}: {source}" if found else source)


def _judged(answer: Answer, slo: Slo) -> str:
    if not answer.middle.is_good(slo):
        return "not met"
    if answer.ends is None:
        return "met"
    met = answer.is_good
    return "met, also at the slow end of the band" if met else "not met at the slow end of the band"


def explained(answer: Answer) -> Iterator[str]:
    limits = answer.machine.setup(1.0).limits
    yield ""
    for line in answer.machine.explained:
        yield from _row(line[:_NAME].strip(), line[_NAME:])
    yield from _row(
        "limits",
        f"{limits.max_sequences} sequences, {limits.max_batch_tokens} tokens a step, "
        f"{limits.total_blocks:,} blocks of {limits.block_tokens} tokens",
    )
    yield from _row("TTFT", "first token - arrival = way in + queue + steps + way out")
    yield from _row("TPOT", "(last token - first token) / (tokens - 1)")
    yield from _row("goodput", "requests/s x share of requests within the objective")
    hours = answer.gpu_hours
    if hours is not None:
        yield from _row(
            "GPU-hours",
            f"{answer.replica_s:,.0f} s of all replicas, from start to end, x {answer.fleet.tp} "
            f"GPUs / 3600 = {hours:.3g}",
        )
    if answer.band_rates is not None and answer.machine.band is not None:
        band = answer.machine.band
        yield from _row(
            "saturated",
            f"with the band: its two rates / {band.slow:.2f} and / {band.fast:.2f}",
        )


def _row(name: str, words: str) -> list[str]:
    return textwrap.wrap(
        words,
        WIDTH,
        initial_indent=f"{name:<{_NAME}}",
        subsequent_indent=" " * _NAME,
        break_on_hyphens=False,
    )


def _columns(times: Percentiles) -> tuple[float, ...]:
    return (times.p50, times.p90, times.p99, times.mean)


def _range(low: float, high: float) -> str:
    return f"{_ms(low)} to {_ms(high)}"


def _ms(seconds: float) -> str:
    return f"{seconds:.2f} s" if seconds >= 10 else f"{seconds * 1e3:.1f} ms"
