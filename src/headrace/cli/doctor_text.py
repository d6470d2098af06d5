"""What `headrace doctor` prints beside a report: what changed while it watches, what a fix brought.

Lines for a terminal; doctor/ has the numbers.
"""

from __future__ import annotations

import textwrap
from typing import Any

import typer

from headrace.cli.tables import show_table
from headrace.doctor.report import Diagnosis, finding_lines


def show_changes(now: str, found: Diagnosis, there: dict[int, str]) -> None:
    """`there`: the findings of the last look, by rule; those of this one afterwards."""
    current = {finding.rule: finding for finding in found.findings}
    for rule in [rule for rule in there if rule not in current]:
        typer.echo(f"{now}  gone: {there.pop(rule)}")
    for rule, finding in current.items():
        if rule not in there:
            typer.echo(f"{now}")
            typer.echo("\n".join(finding_lines(1, finding)))
            there[rule] = finding.symptom
    seen = found.seen
    numbers = {name: seen.level(name) for name in ("running", "waiting", "kv_usage")}
    words = [f"{name} {value:.3g}" for name, value in numbers.items() if value is not None]
    rate = seen.rate("generation_tokens")
    if rate is not None:
        words.append(f"{rate:,.4g} tokens/s")
    count = f"{len(current)} finding{'' if len(current) == 1 else 's'}"
    typer.echo(f"{now}  {', '.join(words) or 'no metrics'}; {count}")


def notes(before: dict[str, Any], after: dict[str, Any]) -> list[str]:
    return [
        line
        for when, report in (("before", before), ("after", after))
        for note in report.get("notes", ())
        for line in folded(f"note, {when}: {note}")
    ]


def show_verified(rows: Any, kept: Any, verdict: str, notes: list[str]) -> None:
    heading = ("WHAT", "BEFORE", "AFTER", "TIMES AS GOOD (95%)", "VERDICT")
    show_table(
        heading,
        [
            (
                row.name,
                f"{row.before:,.4g} {row.unit}",
                f"{row.after:,.4g} {row.unit}",
                f"{row.low:.3g} to {row.high:.3g}",
                row.verdict,
            )
            for row in rows
        ],
    )
    for each in kept:
        gone = "gone" if each.is_gone else "still there"
        came = "not shown by a probe"
        if each.measured is not None:
            came = f"measured × {each.measured.low:.2g} to {each.measured.high:.2g}"
            said = {True: "as predicted", False: "not as predicted", None: "too wide to tell"}
            came += f", {said[each.within]}"
        for line in folded(
            f"rule {each.rule} ({each.symptom}): {gone}; predicted × {each.low:.2g} to "
            f"{each.high:.2g}, {came}"
        ):
            typer.echo(line)
    worse = [row.name for row in rows if row.verdict == "worse" and not row.is_meant]
    aside = f"; worse beside it: {', '.join(worse)}" if worse else ""
    typer.echo("")
    for line in (*folded(f"the change: {verdict}{aside}"), *notes):
        typer.echo(line)


def folded(text: str) -> list[str]:
    return textwrap.wrap(text, 86, break_long_words=False, break_on_hyphens=False)
