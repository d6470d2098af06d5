"""Asking a person at a terminal: to agree to terms, to confirm a deletion.

Asks on standard error, so that standard output holds only the command's result. Without a terminal
the answer is no.
"""

from __future__ import annotations

import sys

from headrace.core.terminal import paint
from headrace.fetch.catalog import CatalogEntry, Terms


def is_somebody_there() -> bool:
    return sys.stdin is not None and sys.stdin.isatty() and sys.stderr.isatty()


def agree(entry: CatalogEntry, terms: Terms) -> bool:
    """Shows the terms and returns whether the person agrees."""
    show_terms(entry, terms)
    return is_somebody_there() and confirm("Do you accept them?")


def show_terms(entry: CatalogEntry, terms: Terms) -> None:
    say(f"{entry.title} is under the {paint(terms.title, 'bold', sys.stderr)}:")
    say(f"  {terms.address}")
    say(f"  {terms.gist}")


def confirm(question: str) -> bool:
    print(f"{question} [y/N] ", end="", file=sys.stderr, flush=True)
    return sys.stdin.readline().strip().lower() in ("y", "yes")


def say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


def note(text: str) -> None:
    say(f"{paint('note:', 'yellow', sys.stderr)} {text}")
