"""Colours on terminals that support them: never in a pipe, never with NO_COLOR.

Knows escape sequences and one stream at a time.
"""

from __future__ import annotations

import os
from typing import TextIO

_STYLES = {"bold": "1", "dim": "2", "red": "31", "green": "32", "yellow": "33", "cyan": "36"}


def wants_colour(stream: TextIO) -> bool:
    if os.environ.get("NO_COLOR") or os.environ.get("TERM") == "dumb":
        return False
    try:
        return stream.isatty()
    except ValueError:  # closed
        return False


def paint(text: str, style: str, stream: TextIO) -> str:
    """`style` is one or more of the names above: "bold red"."""
    if not wants_colour(stream):
        return text
    codes = ";".join(_STYLES[name] for name in style.split())
    return f"\x1b[{codes}m{text}\x1b[0m"
