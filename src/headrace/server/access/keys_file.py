"""Reads keys from the configuration: one from a setting, several from a TOML file, all checked at
start.

Knows files and their modes; not what a key's limits mean.
"""

from __future__ import annotations

import hashlib
import stat
import tomllib
from dataclasses import fields
from pathlib import Path
from typing import Any

from headrace.core.errors import ConfigError
from headrace.core.server_config import ServerConfig
from headrace.server.access.keys import Keys
from headrace.server.access.limits import Key

MAX_WEIGHT = 1000


def read_keys(config: ServerConfig) -> tuple[Keys, list[str]]:
    """The configured keys, and warnings for the operator."""
    found: list[Key] = []
    warnings: list[str] = []
    if config.api_key is not None:
        found.append(Key(name="default", digest=_digest(config.api_key)))
    if config.api_keys_file is not None:
        path = Path(config.api_keys_file)
        found += read_keys_file(path)
        warnings += _check_mode(path)
    for what in ("name", "digest"):
        values = [getattr(key, what) for key in found]
        if twice := [key.name for key in found if values.count(getattr(key, what)) > 1]:
            raise _refuse(f"has the {'name' if what == 'name' else 'key'} of {twice[0]!r} twice")
    return Keys(found), warnings


def _check_mode(path: Path) -> list[str]:
    """Refuses a file that every user may write to, since they could add keys. A file that its group
    may write to or others may read only gets a warning: that may be intended."""
    mode = path.stat().st_mode
    if mode & stat.S_IWOTH:
        raise _refuse(
            f"{path} can be written to by every user of this machine (mode {mode & 0o777:o}), "
            "so any of them could add a key",
            f"Restrict it to its owner: chmod 600 {path}",
        )
    warnings = []
    if mode & stat.S_IWGRP:
        warnings.append(
            f"{path} can be written to by its group, which could add keys: chmod g-w {path}"
        )
    if mode & stat.S_IROTH:
        warnings.append(f"{path} can be read by every user of this machine: chmod o-r {path}")
    return warnings


def read_keys_file(path: Path) -> list[Key]:
    """`[[keys]]` tables: name, and key or key_sha256; limits are optional."""
    try:
        data = tomllib.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise _refuse(f"can't be read: {error.strerror or error}") from error
    except (UnicodeDecodeError, tomllib.TOMLDecodeError) as error:
        raise _refuse(f"is not TOML: {error}") from error
    tables = data.pop("keys", None)
    if data:
        raise _refuse(f"has {min(data)!r} at its top level; expected only [[keys]] tables")
    if not isinstance(tables, list) or not tables:
        raise _refuse("has no [[keys]] table; expected at least one")
    return [_read_key(table, number) for number, table in enumerate(tables, start=1)]


def _read_key(table: Any, number: int) -> Key:
    if not isinstance(table, dict):
        raise _refuse(f"has a {type(table).__name__} in keys; expected only tables")
    table = dict(table)
    name, key, digest = (table.pop(each, None) for each in ("name", "key", "key_sha256"))
    if not isinstance(name, str) or not name:
        raise _refuse(f"has no name for its key number {number}")
    limits = [each.name for each in fields(Key)][2:]
    if unknown := table.keys() - set(limits):
        raise _refuse(
            f"has {min(unknown)!r} for {name!r}; expected name, key or key_sha256, "
            + ", ".join(limits)
        )
    for limit, value in table.items():
        if isinstance(value, bool) or not isinstance(value, int) or value < 1:
            raise _refuse(f"has {limit} = {value!r} for {name!r}; expected a count of at least 1")
        if limit == "weight" and value > MAX_WEIGHT:
            raise _refuse(f"has weight = {value!r} for {name!r}; expected 1 to {MAX_WEIGHT}")
    if (key is None) == (digest is None):
        raise _refuse(f"has {'no' if key is None else 'both'} key and key_sha256 for {name!r}")
    if key is not None and (not isinstance(key, str) or not key):
        raise _refuse(f"has a key of {name!r} that is not text")
    return Key(name=name, digest=_digest(key) if key else _read_digest(digest, name), **table)


def _read_digest(text: object, name: str) -> bytes:
    try:
        digest = bytes.fromhex(text) if isinstance(text, str) else b""
    except ValueError:
        digest = b""
    if len(digest) != hashlib.sha256().digest_size:
        raise _refuse(f"has a key_sha256 of {name!r} that is not 64 hexadecimal digits")
    return digest


def _digest(key: str) -> bytes:
    return hashlib.sha256(key.encode("utf-8")).digest()


def _refuse(
    what: str, remedy: str = 'Write [[keys]] tables with name = "..." and key = "...".'
) -> ConfigError:
    return ConfigError(f"The keys file {what}.", remedy, param="api_keys_file")
