"""Amounts of memory as people write them: "4GiB", "512 MiB", "1.5GB", "1073741824".

Knows no memory; only how a number of bytes is written and read.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from fractions import Fraction

from headrace.core.checks import ErrorType, refusal
from headrace.core.errors import ConfigError

KIB, MIB, GIB = 1 << 10, 1 << 20, 1 << 30

_UNITS = {
    "": 1,
    "b": 1,
    **{f"{letter}b": 1000**power for power, letter in enumerate("kmgt", 1)},
    **{f"{letter}ib": 1024**power for power, letter in enumerate("kmgt", 1)},
}
_WRITTEN = re.compile(r"\s*([0-9]+(?:\.[0-9]+)?)\s*([A-Za-z]*)\s*", re.ASCII)
_EXPECTED = "a number of bytes, or a number and a unit such as 4GiB, 512 MiB or 1.5GB"


def parse_bytes(value: int | str, param: str) -> int:
    """In bytes. A bare number is bytes, GB is 10**9 and GiB is 2**30. `param` is the name for error
    messages."""
    if isinstance(value, int) and not isinstance(value, bool):
        found = value
    else:
        match = _WRITTEN.fullmatch(value) if isinstance(value, str) else None
        unit = _UNITS.get(match[2].lower()) if match else None
        if match is None or unit is None:
            raise refusal(ConfigError, param, value, _EXPECTED)
        found = int(Fraction(match[1]) * unit)  # exact: 0.1GB is 100,000,000 bytes
    if not 1 <= found < 2**63:
        raise refusal(ConfigError, param, value, "at least 1 byte and less than 8 EiB")
    return found


def parse_share(value: float | str, param: str) -> float | int:
    """A fraction (a float above 0 and at most 1) or bytes (an int), as in "0.9" or "60GiB"."""
    try:
        share = float(value)
    except (TypeError, ValueError):
        share = 0.0
    if 0 < share <= 1 and not isinstance(value, bool):
        return share
    try:
        return parse_bytes(int(value) if isinstance(value, float) else value, param)
    except (ConfigError, ValueError, OverflowError):
        raise refusal(
            ConfigError, param, value, "a fraction above 0 and at most 1, or a size such as 60GiB"
        ) from None


def show_bytes(count: int) -> str:
    """For a person: 179.4 MiB, 23.1 GiB."""
    for unit, name in ((GIB, "GiB"), (MIB, "MiB"), (KIB, "KiB")):
        if abs(count) >= unit:
            return f"{count / unit:,.1f} {name}"
    return f"{count} B"


def write_bytes(count: int, *, up: bool) -> str:
    """As a flag's value, in whole MiB, KiB or bytes; rounded up if `up`, otherwise down."""
    unit, name = next(
        ((unit, name) for unit, name in ((MIB, "MiB"), (KIB, "KiB")) if count >= 16 * unit),
        (1, "B"),
    )
    whole = -(-count // unit) if up else count // unit
    return f"{whole}{name}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Size:
    """The rule of a field that may be written as 4GiB; converted to bytes."""

    at_most: int | None = None

    def settled(self, param: str, value: int | str, error: ErrorType) -> int:
        found = parse_bytes(value, param)
        if self.at_most is not None and found > self.at_most:
            raise refusal(error, param, found, f"at most {self.at_most}")
        return found


class Share:
    """The rule of a field that is a fraction or a size; kept as it was written."""

    def settled(self, param: str, value: float | str, error: ErrorType) -> float | str:
        parse_share(value, param)
        return value
