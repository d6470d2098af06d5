"""A text file line by line, each with its number, within bounds. Knows no format."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from headrace.core.errors import ConfigError

# Bounds that no real trace comes near: a file that is not one is refused before it fills memory.
MAX_LINE_BYTES = 4 << 20
MAX_LINES = 5_000_000


def numbered_lines(path: Path) -> Iterator[tuple[int, str]]:
    """Lines that are not empty and don't begin with #, without the white space around them."""
    try:
        with path.open("rb") as file:
            number = 0
            while line := file.readline(MAX_LINE_BYTES + 1):
                number += 1
                if len(line) > MAX_LINE_BYTES:
                    raise ConfigError(
                        f"{path}, line {number}: longer than {MAX_LINE_BYTES:,} bytes.",
                        "Give a text file with one request a line.",
                    )
                if number > MAX_LINES:
                    raise ConfigError(
                        f"{path} has more than {MAX_LINES:,} lines.", "Give a part of it."
                    )
                text = _decoded(path, number, line).strip()
                if text and not text.startswith("#"):
                    yield number, text
    except OSError as error:
        raise ConfigError(
            f"{path} can't be read: {error.strerror or error}.", "Check the path."
        ) from None


def _decoded(path: Path, number: int, line: bytes) -> str:
    try:
        return line.decode("utf-8-sig" if number == 1 else "utf-8")
    except UnicodeDecodeError as error:
        raise ConfigError(
            f"{path}, line {number}: byte {error.start + 1} is {line[error.start]:#04x}, which is "
            "not UTF-8.",
            "Save the file as UTF-8 text.",
        ) from None
