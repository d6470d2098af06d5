"""Terms that must be accepted before a model is fetched, and the error if they were not.

Knows the catalog's entries and one environment variable; the CLI asks the person.
"""

from __future__ import annotations

import os
from collections.abc import Callable

from headrace.core.errors import TermsError
from headrace.fetch.catalog import CatalogEntry, Terms

VARIABLE = "HEADRACE_ACCEPT_TERMS"

Accept = Callable[[CatalogEntry, Terms], bool]  # returns whether the user agrees


def nobody(entry: CatalogEntry, terms: Terms) -> bool:
    """For programs without a terminal: only the variable can accept."""
    return False


def require_terms(entry: CatalogEntry, accept: Accept = nobody) -> None:
    """Raises unless the entry has no terms, the variable names them, or `accept` returns True."""
    terms = entry.terms
    if terms is None or _named(terms) or accept(entry, terms):
        return
    raise TermsError(
        f"{entry.name} is under the {terms.title} ({terms.address}), which have not been "
        "accepted here; nothing was fetched.",
        f"Read them; if you agree, run `headrace models pull {entry.name} --accept-terms`, or set "
        f"{VARIABLE}={terms.key}.",
    )


def _named(terms: Terms) -> bool:
    named = os.environ.get(VARIABLE, "").replace(",", " ").split()
    return terms.key in (name.lower() for name in named)
