"""What hosted models cost per million tokens: a dated table, and prices of one's own beside it.

The figures are in api_prices.toml beside this file. Compares nothing: search/cost.py does.
"""

from __future__ import annotations

import difflib
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from importlib import resources
from pathlib import Path
from typing import Any

from headrace.core.errors import ConfigError

OWN = "given by the user"
_KEYS = frozenset({"title", "input", "output", "cached", "from", "aliases", "note", "date"})


@dataclass(frozen=True, slots=True, kw_only=True)
class ApiPrice:
    """In US dollars per million tokens. `cached_input_usd` None: cached input costs as other."""

    name: str
    title: str
    input_usd: float
    cached_input_usd: float | None
    output_usd: float
    date: str
    source: str
    aliases: tuple[str, ...] = ()
    note: str = ""


@cache
def all_apis() -> tuple[ApiPrice, ...]:
    text = resources.files("headrace.hardware").joinpath("api_prices.toml").read_text("utf-8")
    return tuple(_prices(tomllib.loads(text)).values())


def find_api(name: str, own: Mapping[str, ApiPrice] | None = None) -> ApiPrice:
    """By name or alias, whatever the case; `own` prices come before the table's."""
    known = {
        alias.lower(): price
        for price in (*all_apis(), *(own or {}).values())
        for alias in (*price.aliases, price.name)
    }
    found = known.get(name.strip().lower())
    if found is not None:
        return found
    near = difflib.get_close_matches(name.strip().lower(), list(known), n=4, cutoff=0.5)
    near += [each for each in known if name.strip().lower() in each and each not in near]
    shown = f"; names like it: {', '.join(near[:5])}." if near else "."
    raise ConfigError(
        f"No price of an API called {name!r} is known{shown}",
        "`headrace cost --apis` lists all names; --api NAME=IN/OUT gives a price of your own.",
        param="api",
    )


def parse_api(text: str, own: Mapping[str, ApiPrice] | None = None) -> ApiPrice:
    """A name ("gpt-4o"), or a name and prices: "mine=2.5/10" or "mine=2.5/10/1.25" are input,
    output and, third, cached input in US dollars per million."""
    name, equals, prices = text.partition("=")
    if not equals:
        return find_api(text, own)
    parts = prices.split("/")
    try:
        values = [float(part) for part in parts]
    except ValueError:
        values = []
    if not name.strip() or len(values) not in (2, 3) or not all(0 <= v < 1e6 for v in values):
        raise ConfigError(
            f"--api is {text!r}; expected NAME, NAME=IN/OUT or NAME=IN/OUT/CACHED.",
            "Write prices in US dollars per million tokens: --api mine=2.5/10.",
            param="api",
        )
    return ApiPrice(
        name=name.strip(),
        title=name.strip(),
        input_usd=values[0],
        cached_input_usd=values[2] if len(values) == 3 else None,
        output_usd=values[1],
        date="",
        source=OWN,
    )


def read_api_prices(path: Path) -> dict[str, ApiPrice]:
    """A file of the same form as our own table ([api] with a line for each); sources and titles may
    be left out."""
    try:
        table = tomllib.loads(path.read_text("utf-8"))
    except OSError as error:
        raise ConfigError(
            f"{path} can't be read: {error.strerror}.", "Give a file of prices.", param="api_prices"
        ) from None
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise ConfigError(
            f"{path} is not TOML: {error}.",
            'Write lines such as "mine" = { input = 2.5, output = 10 } below [api].',
            param="api_prices",
        ) from None
    try:
        return _prices(table, default_source=f"{OWN}: {path.name}")
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise ConfigError(
            f"{path} is not a table of prices: {error}.",
            'Write lines such as "mine" = { input = 2.5, output = 10 } below [api].',
            param="api_prices",
        ) from None


def _prices(table: Mapping[str, Any], *, default_source: str = "") -> dict[str, ApiPrice]:
    sources = {key: (date, title) for key, (date, title) in table.get("sources", {}).items()}
    return {name: _price(name, row, sources, default_source) for name, row in table["api"].items()}


def _price(
    name: str, row: Mapping[str, Any], sources: Mapping[str, tuple[str, str]], default_source: str
) -> ApiPrice:
    if unknown := set(row) - _KEYS:
        raise ValueError(f"{name} has {', '.join(sorted(unknown))}")
    read = [sources[key] for key in row.get("from", ())]
    cached = row.get("cached")
    amounts = [float(row["input"]), float(row["output"]), float(cached or 0)]
    if not all(0 <= amount < 1e6 for amount in amounts):
        raise ValueError(f"{name} has a price of {amounts}")
    return ApiPrice(
        name=name,
        title=row.get("title", name),
        input_usd=amounts[0],
        cached_input_usd=None if cached is None else amounts[2],
        output_usd=amounts[1],
        # Sources agree where there are two: the older date is the one that both vouch for.
        date=min((date for date, _ in read), default=str(row.get("date", ""))),
        source="; ".join(title for _, title in read) or default_source,
        aliases=tuple(row.get("aliases", ())),
        note=row.get("note", ""),
    )
