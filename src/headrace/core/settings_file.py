"""headrace.toml: where it is, and its values with the lines that they are on.

Knows TOML and folders; not which settings exist (see settings.py).
"""

from __future__ import annotations

import os
import re
import tomllib
from collections.abc import Mapping
from pathlib import Path

from headrace.core.errors import ConfigError
from headrace.core.settings import SettingsFile

FILE_NAME = "headrace.toml"
MAX_FILE_BYTES = 1 << 20

_TABLE = re.compile(r"\s*\[\s*([\w-]+)\s*\]\s*(?:#.*)?")
_KEY = re.compile(r"\s*([\w-]+)\s*=")


def find_file(chosen: Path | None, folder: Path, variables: Mapping[str, str]) -> Path | None:
    """The chosen file, else ./headrace.toml, else the user's own; None where there is none."""
    if chosen is not None:
        return chosen
    places = [folder / FILE_NAME]
    home = variables.get("XDG_CONFIG_HOME", "")
    if os.path.isabs(home):  # the XDG specification says to ignore relative paths
        places.append(Path(home) / "headrace" / FILE_NAME)
    elif variables.get("HOME"):
        places.append(Path(variables["HOME"]) / ".config" / "headrace" / FILE_NAME)
    return next((place for place in places if place.is_file()), None)


def read_settings_file(path: Path) -> SettingsFile:
    try:
        with path.open("rb") as file:
            data = file.read(MAX_FILE_BYTES + 1)
    except OSError as error:
        raise ConfigError(
            f"The settings file {path} can't be read: {error.strerror or error}.",
            "Check --config.",
            param="config",
        ) from error
    if len(data) > MAX_FILE_BYTES:
        raise ConfigError(
            f"The settings file {path} has more than {MAX_FILE_BYTES} bytes; expected fewer.",
            "Give a TOML file with the tables [server] and [engine].",
            param="config",
        )
    try:
        text = data.decode("utf-8")
        values = tomllib.loads(text)
    except (UnicodeDecodeError, tomllib.TOMLDecodeError, RecursionError) as error:
        raise ConfigError(
            f"{path} is not TOML: {error}.",
            "Correct it; docs/configuration.md has an example.",
            param="config",
        ) from error
    return SettingsFile(name=_short(path), values=values, lines=_lines(text))


def _short(path: Path) -> str:
    """Relative to the current folder or the home folder where possible."""
    try:
        return str(path.absolute().relative_to(Path.cwd()))
    except ValueError:
        return str(path)


def _lines(text: str) -> dict[tuple[str, str], int]:
    """(table, key) -> line, for error messages. Keys in an unusual notation get no line."""
    found: dict[tuple[str, str], int] = {}
    table = ""
    for number, line in enumerate(text.splitlines(), 1):
        if header := _TABLE.fullmatch(line):
            table = header[1]
            found.setdefault(("", table), number)
        elif key := _KEY.match(line):
            found.setdefault((table, key[1]), number)
    return found
