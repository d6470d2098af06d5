"""Rows as a table for a person: aligned, its heading bold on a terminal."""

from __future__ import annotations

import sys
import time
from collections.abc import Sequence

import typer

from headrace.core.terminal import paint

_SPANS = ((86_400 * 365, "year"), (86_400, "day"), (3_600, "hour"), (60, "minute"), (1, "second"))


def show_table(heading: Sequence[str], rows: Sequence[Sequence[str]]) -> None:
    widths = [max(map(len, column)) for column in zip(heading, *rows, strict=True)]
    for number, row in enumerate([heading, *rows]):
        cells = (cell.ljust(width) for cell, width in zip(row, widths, strict=True))
        line = "  ".join(cells).rstrip()
        typer.echo(paint(line, "bold", sys.stdout) if number == 0 else line)


def show_size(count: int) -> str:
    return f"{count / 1e9:,.1f} GB" if count >= 1e9 else f"{count / 1e6:,.1f} MB"


def show_age(since_s: float) -> str:
    """How long ago a Unix time was, in its largest unit."""
    age_s = max(time.time() - since_s, 0)
    for span_s, name in _SPANS:
        if age_s >= span_s:
            count = int(age_s // span_s)
            return f"{count} {name}{'' if count == 1 else 's'} ago"
    return "just now"
