"""Versions: named groups of replicas that share the traffic by weight, and shadows that get copies.

From `--version NAME=URL,…:WEIGHT`, `--shadow NAME=URL,…:SHARE`, or a TOML file. Without any, all
replicas are one version without a name. Knows words and numbers; no network.
"""

from __future__ import annotations

import math
import re
import tomllib
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from headrace.client.connection import Address, parse_address
from headrace.core.errors import ConfigError
from headrace.policies.routing import key_of

_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}")
_FIELDS = ("name", "urls", "weight", "shadow", "users")


@dataclass(frozen=True, slots=True, kw_only=True)
class Version:
    name: str  # empty: the only one
    addresses: tuple[Address, ...]
    weight: float = 1.0
    shadow: float | None = None  # the share of requests that it gets a copy of; None: none
    users: frozenset[str] = frozenset()  # these always get this version


def check_versions(versions: Sequence[Version]) -> tuple[Version, ...]:
    """Raises unless they can share the traffic."""
    names = [version.name for version in versions]
    if twice := [name for name in names if names.count(name) > 1]:
        raise ConfigError(f"Two versions are named {twice[0]!r}.", "Give each its own name.")
    urls = [address.url for version in versions for address in version.addresses]
    if again := [url for url in urls if urls.count(url) > 1]:
        raise ConfigError(f"{again[0]} is given twice.", "Give each replica once.")
    for version in versions:
        _check_number(f"The weight of version {version.name!r}", version.weight, math.inf)
        if version.shadow is not None:
            _check_number(f"The share of shadow {version.name!r}", version.shadow, 1.0)
    real = [version for version in versions if version.shadow is None]
    if not real:
        raise ConfigError("There are only shadows.", "Name a version that answers.")
    if not sum(version.weight for version in real):
        raise ConfigError("All weights are 0.", "Give at least one version a weight above 0.")
    users = [user for version in versions for user in version.users]
    if both := [user for user in users if users.count(user) > 1]:
        raise ConfigError(
            f"The user {both[0]!r} is in two versions.", "Name each user in one version."
        )
    return tuple(versions)


def pick(versions: Sequence[Version], user: str | None, chance: float) -> Version:
    """By weight; a user always gets the same one while the versions stay. `chance` in [0, 1)
    decides for requests without a user. At least one version must be given."""
    if user is not None:
        for version in versions:
            if user in version.users:
                return version
        chance = key_of("version", user) / 2**64
    whole = sum(version.weight for version in versions)
    if not whole:
        return versions[int(chance * len(versions))]
    left = chance * whole
    for version in versions:
        left -= version.weight
        if left < 0:
            return version
    return next(version for version in reversed(versions) if version.weight)


def parse_version(text: str, *, is_shadow: bool = False) -> Version:
    """`NAME=URL,URL:WEIGHT`. Ports are written out: the last number is the weight."""
    flag, what = ("--shadow", "SHARE") if is_shadow else ("--version", "WEIGHT")
    name, equals, rest = text.partition("=")
    urls, colon, number = rest.rpartition(":")
    form = f"Write {flag} NAME=http://HOST:PORT,http://HOST:PORT:{what}."
    if not equals or not colon or not _NAME.fullmatch(name):
        raise ConfigError(f"{flag} is {text!r}; expected NAME=URL,…:{what}.", form)
    last = urls.rpartition(",")[2].rpartition("://")[2]
    if not re.search(r":\d+$", last):
        raise ConfigError(
            f"{flag} is {text!r}, whose last URL has no port: {number!r} may be the port or the "
            f"{what.lower()}.",
            form,
        )
    try:
        value = float(number)
    except ValueError:
        raise ConfigError(f"{flag} {name} has the {what.lower()} {number!r}.", form) from None
    addresses = tuple(parse_address(url) for url in urls.split(","))
    if is_shadow:
        return Version(name=name, addresses=addresses, shadow=value)
    return Version(name=name, addresses=addresses, weight=value)


def read_routes(path: Path) -> list[Version]:
    """`[[versions]]` tables with name, urls, and weight or shadow; users is optional."""
    try:
        data = tomllib.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise _refuse(path, f"can't be read: {error.strerror or error}") from None
    except (UnicodeDecodeError, tomllib.TOMLDecodeError) as error:
        raise _refuse(path, f"is not TOML: {error}") from None
    tables = data.pop("versions", None)
    if data:
        raise _refuse(path, f"has {min(data)!r}; expected only [[versions]] tables")
    if not isinstance(tables, list) or not tables:
        raise _refuse(path, "has no [[versions]] table")
    return [_read_table(path, table) for table in tables]


def _read_table(path: Path, table: Any) -> Version:
    if not isinstance(table, dict):
        raise _refuse(path, f"has a {type(table).__name__} in versions; expected tables")
    if unknown := table.keys() - set(_FIELDS):
        raise _refuse(path, f"has {min(unknown)!r}; expected {', '.join(_FIELDS)}")
    name = table.get("name")
    if not isinstance(name, str) or not _NAME.fullmatch(name):
        raise _refuse(path, f"has the name {name!r}; expected letters, digits, '.', '_' and '-'")
    if "weight" in table and "shadow" in table:
        raise _refuse(path, f"has both weight and shadow for {name!r}")
    urls = _texts(path, name, "urls", table.get("urls"))
    if not urls:
        raise _refuse(path, f"has no urls for {name!r}")
    weight, shadow = table.get("weight", 1.0), table.get("shadow")
    for what, value in (("weight", weight), ("shadow", shadow)):
        if isinstance(value, bool) or not isinstance(value, int | float | None):
            raise _refuse(path, f"has {what} = {value!r} for {name!r}; expected a number")
    return Version(
        name=name,
        addresses=tuple(map(parse_address, urls)),
        weight=float(weight),
        shadow=None if shadow is None else float(shadow),
        users=frozenset(_texts(path, name, "users", table.get("users", []))),
    )


def _texts(path: Path, name: str, what: str, value: Any) -> list[str]:
    if not isinstance(value, list) or not all(isinstance(each, str) and each for each in value):
        raise _refuse(path, f"has {what} = {value!r} for {name!r}; expected a list of texts")
    return value


def _check_number(what: str, value: float, most: float) -> None:
    if not 0 <= value <= most or value == math.inf:
        wanted = "0 or more" if most == math.inf else f"0 to {most:g}"
        raise ConfigError(f"{what} is {value:g}; expected {wanted}.", "Give such a number.")


def _refuse(path: Path, what: str) -> ConfigError:
    return ConfigError(
        f"{path} {what}.",
        'Write [[versions]] tables with name = "…", urls = ["…"] and weight = 1.',
    )
