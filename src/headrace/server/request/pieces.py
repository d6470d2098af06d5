"""Decodes a large JSON body in pieces, so that other requests get their turn in between.

The JSON decoder is one C call that holds Python's global lock: a million token ids take a tenth of
a second, in a thread too. Lists of numbers, and lists of such lists, are cut at their commas; all
else is bounded (core/bounds.py) and decoded at once. The result is the same, malformed or not.
Knows JSON; not what it is for.
"""

from __future__ import annotations

import asyncio
from typing import Any

import msgspec

PIECE_BYTES = 1 << 18  # a few milliseconds
MANY_NUMBERS = 1 << 16  # fewer are decoded in one call
MOST_LISTS = 4096  # more lists than this are short ones, which core/bounds.py limits

_decode = msgspec.json.decode


async def decode_in_pieces(body: bytes) -> Any:
    if body.count(b",") < MANY_NUMBERS or body.lstrip()[:1] != b"{":
        return _decode(body)
    # Parses all of it and refuses malformed JSON, so that commas are where they should be.
    fields = _decode(body, type=dict[str, msgspec.Raw])
    found = {}
    for name, raw in fields.items():
        if len(raw) > PIECE_BYTES:
            await asyncio.sleep(0)
        found[name] = await _value(bytes(raw))
    return found


async def _value(raw: bytes) -> Any:
    if len(raw) <= PIECE_BYTES or raw[:1] != b"[" or b'"' in raw or b"{" in raw:
        return _decode(raw)
    lists = raw.count(b"[")
    if lists == 1:
        return await _numbers(raw[1:-1])
    parts = raw[1:-1].split(b"]") if lists <= MOST_LISTS else []
    inner = [part.strip().removeprefix(b",").strip() for part in parts[:-1]]
    if not parts or parts[-1].strip() or not all(_is_numbers(part) for part in inner):
        return _decode(raw)  # nested three deep, or mixed with numbers
    return [await _numbers(part[1:]) for part in inner]


def _is_numbers(part: bytes) -> bool:
    return part[:1] == b"[" and part.count(b"[") == 1


async def _numbers(inside: bytes) -> list[Any]:
    """Cuts the text between the brackets of a list."""
    found: list[Any] = []
    start = 0
    while start < len(inside):
        end = inside.find(b",", start + PIECE_BYTES)
        end = len(inside) if end < 0 else end
        found += _decode(b"[%b]" % inside[start:end])
        start = end + 1
        if start < len(inside):
            await asyncio.sleep(0)
    return found
