"""What `headrace cost` prints: the bill, the APIs beside it, the plot and the verdict.

Words and columns only; the figures are search/cost.py's.
"""

from __future__ import annotations

import json
import textwrap
from dataclasses import asdict
from pathlib import Path

import typer

from headrace.cli.tables import show_table
from headrace.core.errors import ConfigError
from headrace.hardware.api_prices import ApiPrice, all_apis
from headrace.search import cost_picture
from headrace.search.cost import show_tokens
from headrace.search.cost_report import Report, explain, facts, steps

_WIDTH = 100


def show(
    report: Report, volume: float | None, *, svg: Path | None, explained: bool, as_json: bool
) -> None:
    chart = cost_picture.chart_of(report.hosting, report.breaks, volume)
    if svg is not None:
        if chart is None:
            raise ConfigError(
                "There is no plot without a price.",
                "Give --price, or leave out --svg.",
                param="svg",
            )
        svg.write_text(cost_picture.svg(chart), "utf-8")
    if as_json:
        lines = list(explain(report)) if explained else None
        typer.echo(json.dumps(facts(report) | ({"explain": lines} if lines else {}), indent=2))
        return
    for line in _heads(report):
        _say(line)
    typer.echo()
    _show_bill(report)
    typer.echo()
    _show_compared(report)
    if chart is not None:
        typer.echo("\n" + cost_picture.terminal(chart))
    for line in steps(report.hosting):
        _say(line)
    for note in report.notes:
        _say(f"note: {note}")
    if explained:
        typer.echo("\nhow")
        for line in explain(report):
            _say(f"  {line}", hang=4)
    typer.echo()
    _say(f"verdict: {report.verdict.text}")


def _say(text: str, hang: int = 2) -> None:
    start = " " * (len(text) - len(text.lstrip()))
    wrapped = textwrap.wrap(
        text.strip(), _WIDTH, initial_indent=start, subsequent_indent=" " * hang
    )
    typer.echo("\n".join(wrapped))


def _heads(report: Report) -> list[str]:
    hosting, mix = report.hosting, report.hosting.mix
    what = report.gpu or "GPU"
    money = "no price"
    if hosting.usd_per_gpu_hour is not None:
        money = f"${hosting.usd_per_gpu_hour:g} per GPU and hour ({report.price_source})"
    cached = f", {mix.cached_share:.0%} of it cached" if mix.cached_share else ""
    return [
        f"a replica: {hosting.gpus} x {what}, {money}",
        f"a request: {mix.input_tokens:,.4g} tokens in{cached}, {mix.output_tokens:,.4g} out",
        f"its rate, all requests together: {hosting.output_tokens_s:,.6g} output tokens/s, "
        f"{hosting.tokens_s:,.6g} with input",
        f"its capacity: {show_tokens(hosting.capacity_tokens)} tokens in {hosting.hours:g} hours "
        f"at {hosting.utilization:.0%} utilization",
    ]


def _show_bill(report: Report) -> None:
    bill = report.bill
    at = "one replica, used fully" if report.is_full_replica else "your volume"
    rows = [
        (f"a month, {at}", f"{show_tokens(bill.tokens)} tokens on {_replicas(bill.replicas)}"),
        ("GPU-hours", f"{bill.gpu_hours:,.4g}, {bill.idle_gpu_hours:,.4g} of them idle"),
        ("utilization", f"{bill.busy_share:.1%}"),
    ]
    if bill.usd is None or bill.usd_per_million is None:
        rows.append(("GPU-hours a million", f"{bill.gpu_hours_per_million:.4g}"))
    else:
        rows.append(("GPUs", f"${bill.gpu_usd:,.2f}"))
        if bill.engineering_usd:
            rows.append(("work", f"${bill.engineering_usd:,.2f}"))
        rows.append(("a million tokens", f"{_usd(bill.usd_per_million)} blended"))
    if bill.parts is not None:
        parts = bill.parts
        rows.append(
            (
                "of each kind",
                f"input {_usd(parts.input_usd)}, cached input {_usd(parts.cached_input_usd)}, "
                f"output {_usd(parts.output_usd)}",
            )
        )
        rows.append(("", f"(divided {parts.basis})"))
    for label, value in rows:
        typer.echo(f"{label:<34}{value}")


def _show_compared(report: Report) -> None:
    heading = ("API", "IN", "CACHED", "OUT", "BLENDED", "BREAK-EVEN", "FOR GOOD", "AS OF")
    show_table(
        heading,
        [
            (
                each.api.name[:26],
                f"${each.api.input_usd:g}",
                "-" if each.api.cached_input_usd is None else f"${each.api.cached_input_usd:g}",
                f"${each.api.output_usd:g}",
                _usd(each.api_usd_per_million),
                _crossing(report, each.tokens, each.replicas),
                _crossing(report, each.lasting_tokens, each.lasting_replicas),
                each.api.date or "yours",
            )
            for each in report.breaks
        ],
    )
    typer.echo(
        "US dollars per million tokens. Break-even: tokens a month, and replicas needed there.\n"
        "Another model is not the same answers: only the money is compared."
    )


def _replicas(count: int) -> str:
    return f"{count} replica{'' if count == 1 else 's'}"


def _usd(value: float) -> str:
    return f"${value:,.2f}" if value >= 1 else f"${value:.4g}"


def _crossing(report: Report, tokens: float | None, replicas: int | None) -> str:
    if report.hosting.replica_usd is None:
        return "-"
    return "never" if tokens is None else f"{show_tokens(tokens)} ({replicas})"


def show_apis(own: dict[str, ApiPrice], *, as_json: bool) -> None:
    prices = {price.name: price for price in all_apis()} | own
    if as_json:
        typer.echo(json.dumps([asdict(price) for price in prices.values()], indent=2))
        return
    show_table(
        ("NAME", "MODEL", "IN", "CACHED", "OUT", "AS OF"),
        [
            (
                price.name,
                price.title[:42],
                f"{price.input_usd:g}",
                "-" if price.cached_input_usd is None else f"{price.cached_input_usd:g}",
                f"{price.output_usd:g}",
                price.date or "yours",
            )
            for price in prices.values()
        ],
    )
    for price in prices.values():
        if price.note:
            _say(f"{price.name}: {price.note}")
    for source in dict.fromkeys(price.source for price in prices.values()):
        _say(f"from: {source}")
