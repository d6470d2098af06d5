"""A cost as JSON values, and its formulas with their numbers: what `headrace cost` prints.

Computes nothing that cost.py has not: words and dictionaries only.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from headrace.search.cost import Bill, BreakEven, Hosting, Verdict, show_tokens


@dataclass(frozen=True, slots=True, kw_only=True)
class Report:
    """Everything that one call found. `bill` is at the user's volume, or of one full replica."""

    hosting: Hosting
    gpu: str | None
    price_source: str | None
    bill: Bill
    is_full_replica: bool
    breaks: tuple[BreakEven, ...]
    verdict: Verdict
    notes: tuple[str, ...]


def facts(report: Report) -> dict[str, Any]:
    """The documented schema (docs/cost.md)."""
    hosting, mix = report.hosting, report.hosting.mix
    bill = asdict(report.bill) | {"idle_gpu_hours": report.bill.idle_gpu_hours}
    return {
        "gpu": report.gpu,
        "gpus_per_replica": hosting.gpus,
        "usd_per_gpu_hour": hosting.usd_per_gpu_hour,
        "price_source": report.price_source,
        "input_tokens": mix.input_tokens,
        "output_tokens": mix.output_tokens,
        "cached_share": mix.cached_share,
        "output_tokens_s": hosting.output_tokens_s,
        "tokens_s": hosting.tokens_s,
        "hours": hosting.hours,
        "utilization": hosting.utilization,
        "capacity_tokens": hosting.capacity_tokens,
        "replica_usd": hosting.replica_usd,
        "engineering_usd": hosting.engineering_usd,
        "is_full_replica": report.is_full_replica,
        "bill": bill,
        "apis": [_break_facts(each) for each in report.breaks],
        "verdict": asdict(report.verdict),
        "notes": list(report.notes),
    }


def _break_facts(each: BreakEven) -> dict[str, Any]:
    api = each.api
    return {
        "name": api.name,
        "input_usd": api.input_usd,
        "cached_input_usd": api.cached_input_usd,
        "output_usd": api.output_usd,
        "date": api.date,
        "source": api.source,
        "usd_per_million": each.api_usd_per_million,
        "break_even_tokens": each.tokens,
        "break_even_replicas": each.replicas,
        "lasting_tokens": each.lasting_tokens,
        "lasting_replicas": each.lasting_replicas,
        "one_replica_tokens": each.one_replica_tokens,
        "most_usd_per_gpu_hour": each.most_usd_per_gpu_hour,
    }


def explain(report: Report) -> Iterator[str]:
    """Each formula with its numbers."""
    hosting, mix, bill = report.hosting, report.hosting.mix, report.bill
    yield (
        f"tokens/s of a replica = output rate x (input + output) / output = "
        f"{hosting.output_tokens_s:,.6g} x {mix.total_tokens:,.6g} / {mix.output_tokens:,.6g} = "
        f"{hosting.tokens_s:,.6g}"
    )
    yield (
        f"capacity a month = tokens/s x hours x 3,600 x utilization = {hosting.tokens_s:,.6g} x "
        f"{hosting.hours:g} x 3,600 x {hosting.utilization:g} = "
        f"{show_tokens(hosting.capacity_tokens)} tokens"
    )
    yield (
        f"replicas = tokens / capacity, rounded up = {show_tokens(bill.tokens)} / "
        f"{show_tokens(hosting.capacity_tokens)} = {bill.replicas}"
    )
    yield (
        f"GPU-hours = replicas x GPUs x hours = {bill.replicas} x {hosting.gpus} x "
        f"{hosting.hours:g} = {bill.gpu_hours:,.6g}"
    )
    yield (
        f"busy = tokens / (replicas x tokens/s x hours x 3,600) = {bill.busy_share:.1%}; idle "
        f"GPU-hours = {bill.gpu_hours:,.6g} x {1 - bill.busy_share:.1%} = "
        f"{bill.idle_gpu_hours:,.6g}"
    )
    if bill.usd is not None and bill.usd_per_million is not None:
        yield (
            f"cost a month = GPU-hours x price + engineering = {bill.gpu_hours:,.6g} x "
            f"${hosting.usd_per_gpu_hour:g} + ${bill.engineering_usd:,.6g} = ${bill.usd:,.2f}"
        )
        yield (
            f"a million tokens = cost / tokens = ${bill.usd:,.2f} / {show_tokens(bill.tokens)} = "
            f"${bill.usd_per_million:,.4g}"
        )
        if bill.parts is not None:
            yield f"input, cached input and output: the same cost, divided {bill.parts.basis}"
    for each in report.breaks:
        yield from _explain_break(hosting, each)


def _explain_break(hosting: Hosting, each: BreakEven) -> Iterator[str]:
    api, (computed, cached, output) = each.api, hosting.mix.parts
    cached_usd = api.input_usd if api.cached_input_usd is None else api.cached_input_usd
    yield (
        f"{api.name}: ({computed:,.6g} x ${api.input_usd:g} + {cached:,.6g} x ${cached_usd:g} + "
        f"{output:,.6g} x ${api.output_usd:g}) / {hosting.mix.total_tokens:,.6g} = "
        f"${each.api_usd_per_million:,.4g} a million"
    )
    if each.tokens is not None and each.replicas is not None:
        yield (
            f"{api.name}: break-even = (replicas x cost of one + engineering) / price = "
            f"({each.replicas} x ${hosting.replica_usd or 0:,.6g} + "
            f"${hosting.engineering_usd:,.6g}) / ${each.api_usd_per_million:,.4g} a million = "
            f"{show_tokens(each.tokens)} tokens"
        )
    elif each.one_replica_tokens is not None:
        yield (
            f"{api.name}: one replica would break even at {show_tokens(each.one_replica_tokens)} "
            f"tokens and has a capacity of {show_tokens(hosting.capacity_tokens)}"
        )


def steps(hosting: Hosting, count: int = 3) -> list[str]:
    """Where capacity is the bound: "needs 2 replicas from 557.3M tokens a month on"."""
    each = hosting.capacity_tokens
    return [
        f"needs {replicas + 1} replicas from {show_tokens(replicas * each)} tokens a month on"
        for replicas in range(1, count)
    ]


def sorted_breaks(breaks: Sequence[BreakEven]) -> tuple[BreakEven, ...]:
    """The cheapest API first: it is the one that the verdict is about."""
    return tuple(sorted(breaks, key=lambda each: each.api_usd_per_million))
