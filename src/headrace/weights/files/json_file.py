"""Reads JSON objects from untrusted files: bounded in size and nesting, without duplicate keys.

Knows nothing of what the objects mean.
"""

from __future__ import annotations

import json
import re
from itertools import pairwise
from pathlib import Path

from headrace.core.errors import WeightsError
from headrace.weights.files.mapped import DAMAGED, MappedFile, shown

# Parsed JSON takes up to about twenty times the bytes of its text.
MAX_JSON_BYTES = 32 << 20
MAX_NESTING = 32

# A string, an unterminated string's quote, or a bracket. The possessive *+ keeps it linear.
_STRUCTURE = re.compile(rb'"(?:[^"\\]|\\.)*+"|["\[\]{}]', re.DOTALL)


def parse_object(text: bytes | memoryview, path: Path, field: str) -> dict[str, object]:
    """Parses a JSON object; `field` names the part of `path` for error messages."""
    if len(text) > MAX_JSON_BYTES:
        raise _malformed(path, field, f"{len(text)} bytes of JSON", f"at most {MAX_JSON_BYTES}")
    raw = bytes(text)
    if _nests_too_deep(raw):
        raise _malformed(path, field, "deeper nesting", f"at most {MAX_NESTING} levels")

    def unique(pairs: list[tuple[str, object]]) -> dict[str, object]:
        found = dict(pairs)
        if len(found) < len(pairs):
            keys = sorted(key for key, _ in pairs)
            twice = next(key for key, after in pairwise(keys) if key == after)
            raise _malformed(path, field, f"{shown(twice)} twice", "each name once")
        return found

    try:
        value = json.loads(raw.decode("utf-8"), object_pairs_hook=unique)
    except ValueError as error:  # errors of JSON and UTF-8, and numbers with too many digits
        reason = shown(str(error))
        raise _malformed(
            path, field, f"text that is not JSON ({reason})", "JSON in UTF-8"
        ) from None
    if not isinstance(value, dict):
        raise _malformed(path, field, f"a JSON {type(value).__name__}", "a JSON object")
    return value


def read_object(path: Path) -> dict[str, object]:
    """Reads a file that is one JSON object."""
    file = MappedFile.open(path)
    try:
        return parse_object(file.view, path, "content")
    finally:
        file.close()


def _nests_too_deep(text: bytes) -> bool:
    """Checked before parsing, because the parser is only limited by the interpreter's stack. Stops
    at an unterminated string, which the parser will refuse."""
    depth = 0
    for match in _STRUCTURE.finditer(text):
        token = match[0]
        if token in (b"[", b"{"):
            depth += 1
        elif token in (b"]", b"}"):
            depth -= 1
        elif token == b'"':
            break
        if depth > MAX_NESTING:
            return True
    return False


def _malformed(path: Path, field: str, found: str, expected: str) -> WeightsError:
    return WeightsError(f"{path}: {field}: found {found}; expected {expected}.", DAMAGED)
