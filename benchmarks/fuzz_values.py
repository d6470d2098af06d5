"""Values that nobody expects: numbers at and beyond every edge, texts of odd characters, lists and
texts of sizes at their bounds, and what is of another type than was asked for.

Every function takes the generator of the case, so that a case is the same every time. Knows JSON;
no endpoint.
"""

from __future__ import annotations

import json
import math
import random
from collections.abc import Callable
from typing import Any

Chooser = random.Random

INTEGERS = (
    *(0, 1, 2, 3, -1, -2, 15, 16, 17, 20, 21, 63, 64, 65, 127, 128, 129, 255, 256, 257),
    *(1023, 1024, 1025, 8191, 8192, 8193, 49151, 49152, 49153, 65535, 65536),
    *(2**31 - 1, 2**31, 2**32, 2**53, 2**53 + 1, 2**63 - 1, 2**63, 2**64 - 1, 2**64, -(2**31)),
    *(-(2**63), -(2**63) - 1, 10**30, -(10**30)),
)
FLOATS = (
    *(0.0, -0.0, 0.5, 1.0, 1.5, 2.0, 2.0000001, -2.0, -2.0000001, 0.9999999, 1.0000001, 100.0),
    *(100.1, -100.0, 1e-45, 5e-324, 1e-300, 1e38, 3.5e38, 1e308, -1e308, math.nan, math.inf),
    *(-math.inf, 0.1, 1e-9, 1e16, 12345678901234567890.0),
)
# One below, at and one above what is bounded here, or anywhere by a power of two.
SIZES = (0, 1, 2, 15, 16, 17, 63, 64, 65, 127, 128, 129, 255, 256, 257, 1023, 1024, 1025)
LARGE_SIZES = (
    *(2047, 2048, 2049, 4095, 4096, 4097, 8191, 8192, 8193, 16_383, 16_384, 16_385, 32_768, 32_769),
    *(49_152, 65_535, 65_536, 65_537, 100_000),
)
HUGE_SIZES = (262_144, 500_000, 1_048_577, 2_000_000)  # characters, or a quarter as many items

LETTERS = (
    *(
        "a",
        " ",
        "\n",
        "0",
        "é",
        "ß",
        "日",
        "本",
        "😀",
        "👩‍👩‍👧‍👦",
        "\u202e",
        "\u0000",
        "\ufeff",
        "\u200d",
        "\U0010ffff",
    ),
    *(
        "\ud800",
        "\udfff",
        "<|im_start|>",
        "<|im_end|>",
        "<|endoftext|>",
        "{{",
        "}}",
        "{%",
        "%}",
        '"',
    ),
    *("\\", "/", "'", "\t", "\r\n", "\x1b[31m", "%s", "${x}", "../", "\u0301", "ﷺ", "İ", "ſ"),
    *("the", " and", "A", "ab", "[TOOL_CALLS]", "<tool_call>", "</tool_call>", "<think>"),
)
WORDS = ("river", "mill", "wheel", "stone", "water", "grain", "sluice", "weir")


RAW_MARK = "@raw@"


def raw(written: str) -> str:
    """JSON text that goes into the body as it is (fuzz_bodies.encode): what no value can say."""
    return RAW_MARK + written


RAW_VALUES = (
    raw("1e400"),
    raw("-1e400"),
    raw("1" * 400),
    raw("1" * 5000),
    raw("0." + "1" * 2000),
    raw("1e-400"),
    raw("-0"),
    raw("01"),
    raw("1."),
    raw(".5"),
    raw("+1"),
    raw("0x10"),
    raw("tru"),
    raw("undefined"),
    raw("'a'"),
    raw('"\\ud800"'),
    raw('"\\ud83d\\ude00"'),
    raw('"\\u0000"'),
    raw('"\\x41"'),
    raw('"\\'),
    raw("[1,]"),
    raw('{"a":1,}'),
    raw('{"a":1,"a":2}'),
    raw("[" * 100 + "]" * 100),
    raw("[" * 127 + "]" * 127),
    raw("[" * 129 + "]" * 129),
    raw("[" * 20000),
    raw('{"a":' * 500 + "1" + "}" * 500),
    raw("/* */1"),
    raw("1 2"),
    raw(""),
)


def text(chooser: Chooser, length: int | None = None) -> str:
    """Odd characters beside ordinary ones; lone surrogates too."""
    if length is None:
        length = chooser.choice((0, 1, 2, 3, 5, 8, 20, 60))
    if length > 300:  # one thing repeated: made at once
        unit = chooser.choice(LETTERS)
        return (unit * (length // len(unit) + 1))[:length]
    if chooser.random() < 0.4:
        return " ".join(chooser.choices(WORDS, k=max(1, length // 5)))[:length]
    return "".join(chooser.choices(LETTERS, k=length))[: max(length, 0)]


def integer(chooser: Chooser) -> int:
    if chooser.random() < 0.7:
        return chooser.choice(INTEGERS)
    return chooser.randint(-20, 50_000)


def number(chooser: Chooser) -> float | int:
    kind = chooser.random()
    if kind < 0.5:
        return chooser.choice(FLOATS)
    if kind < 0.7:
        return integer(chooser)
    return chooser.uniform(-3, 3)


def size(chooser: Chooser, *, largest: int) -> int:
    """Of a list or a text: mostly small, sometimes at a bound, now and then too much."""
    kind = chooser.random()
    if kind < 0.93 or largest < 2048:
        found = chooser.choice(SIZES)
    elif kind < 0.995 or largest < 262_144:
        found = chooser.choice(LARGE_SIZES)
    else:
        found = chooser.choice(HUGE_SIZES)
    return min(found, largest)


def many(
    chooser: Chooser, make: Callable[[Chooser], Any], *, largest: int, distinct: int = 4
) -> list[Any]:
    """A list of some size; of a large one, few items that are repeated: values are cheap to make,
    and what is done with a list is what is looked for."""
    count = size(chooser, largest=largest // 4)
    if count <= 20:
        return [make(chooser) for _ in range(count)]
    units = [make(chooser) for _ in range(distinct)]
    count = min(count, 2 * largest // max(_written(unit) for unit in units))
    return (units * (count // distinct + 1))[:count]


def _written(value: Any) -> int:
    """How long it will be, about."""
    return len(json.dumps(value)) + 2


def anything(chooser: Chooser, depth: int = 0) -> Any:
    """A value of any type."""
    kind = chooser.randrange(9 if depth < 3 else 6)
    if kind == 0:
        return chooser.choice((None, True, False))
    if kind == 1:
        return integer(chooser)
    if kind == 2:
        return number(chooser)
    if kind in (3, 4):
        return text(chooser)
    if kind == 5:
        return chooser.choice(RAW_VALUES)
    if kind == 6:
        return [anything(chooser, depth + 1) for _ in range(chooser.randrange(4))]
    if kind == 7:
        return {text(chooser, 4): anything(chooser, depth + 1) for _ in range(chooser.randrange(4))}
    return nested(chooser)


def nested(chooser: Chooser) -> Any:
    """Things in things, near the depth that is read and beyond it."""
    value: Any = chooser.choice((1, "a", None, []))
    for _ in range(chooser.choice((3, 20, 60, 63, 64, 65, 100, 124, 126, 128, 130, 400))):
        value = [value] if chooser.random() < 0.5 else {"a": value}
    return value


def of_type(chooser: Chooser, schema: dict[str, Any], *, largest: int) -> Any:
    """What a description of a field calls good, as far as its type goes."""
    if "anyOf" in schema:
        return of_type(chooser, chooser.choice(schema["anyOf"]), largest=largest)
    if "enum" in schema:
        return chooser.choice(schema["enum"])
    kind = schema.get("type")
    if kind == "integer":
        return integer(chooser)
    if kind == "number":
        return number(chooser)
    if kind == "boolean":
        return chooser.random() < 0.5
    if kind == "string":
        return text(chooser, size(chooser, largest=largest) if chooser.random() < 0.3 else None)
    if kind == "array":
        items = schema.get("items", {})
        return many(chooser, lambda c: of_type(c, items, largest=200), largest=largest)
    if kind == "object":
        inner = schema.get("additionalProperties")
        if isinstance(inner, dict):
            value = of_type(chooser, inner, largest=8)
            count = size(chooser, largest=largest // (8 + _written(value)))
            return {_key(chooser, place): value for place in range(count)}
        return {text(chooser, 3): anything(chooser, 1) for _ in range(chooser.randrange(4))}
    return None if kind == "null" else anything(chooser, 1)


def _key(chooser: Chooser, place: int) -> str:
    return str(place) if chooser.random() < 0.99 else text(chooser, 5)
