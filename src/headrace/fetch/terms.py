"""Terms that must be agreed to before a model is fetched: who may agree, and what is said if not.

Knows the catalog's entries and one environment variable; asking a person is the CLI's affair.
"""

from __future__ import annotations

import os
from collections.abc import Callable

from headrace.core.errors import TermsError
from headrace.fetch.catalog import CatalogEntry, Terms

VARIABLE = "HEADRACE_ACCEPT_TERMS"

Accept = Callable[[CatalogEntry, Terms], bool]  # whether somebody agrees


def nobody(entry: CatalogEntry, terms: Terms) -> bool:
    """For a program that nobody watches: only the variable agrees."""
    return False


def require_terms(entry: CatalogEntry, accept: Accept = nobody) -> None:
    """Raises unless the entry has no terms, the variable names them, or `accept` says yes."""
    terms = entry.terms
    if terms is None or _named(terms) or accept(entry, terms):
        return
    raise TermsError(
        f"{entry.name} is under the {terms.title} ({terms.address}), which nobody has accepted "
        "here; nothing was fetched.",
        f"Read them; if you agree, run `headrace models pull {entry.name} --accept-terms`, or set "
        f"{VARIABLE}={terms.key}.",
    )


def _named(terms: Terms) -> bool:
    named = os.environ.get(VARIABLE, "").replace(",", " ").split()
    return terms.key in (name.lower() for name in named)
