"""How other engines write a value, and the same value in Headrace's words.

A `Kind` reads a value (text from a command line, or what a program passed) and writes it again. A
value that an engine has no word for is written as None. Knows no flag and no engine.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Protocol

YES, NO = ("1", "true", "yes", "on"), ("0", "false", "no", "off")
_DECIMAL = {"k": 10**3, "m": 10**6, "g": 10**9, "t": 10**12}
_BINARY = {"K": 1 << 10, "M": 1 << 20, "G": 1 << 30, "T": 1 << 40}


class Kind(Protocol):
    """What a word's value is. `read` raises ValueError with what was expected."""

    def read(self, value: object) -> object: ...

    def write(self, value: object) -> str | None: ...


@dataclass(frozen=True, slots=True)
class Count:
    """A whole number. vLLM and SGLang also take 8k (8,000) and 8K (8,192). A word or number in
    `unset` leaves the choice to the engine."""

    unset: tuple[str, ...] = ("auto", "-1")

    def read(self, value: object) -> int | None:
        text = str(value).strip()
        if value is None or text in self.unset:
            return None
        unit = (_DECIMAL | _BINARY).get(text[-1:], 1)
        number = text[:-1] if unit > 1 else text
        try:
            found = float(number) * unit if unit > 1 else int(number)
            whole = int(found)
        except (ValueError, OverflowError):
            raise ValueError("a whole number") from None
        if whole != found or isinstance(value, bool):
            raise ValueError("a whole number")
        return whole

    def write(self, value: object) -> str | None:
        return str(value)


@dataclass(frozen=True, slots=True)
class Scaled:
    """A number of some unit, such as GiB, kept as bytes."""

    unit: int

    def read(self, value: object) -> int:
        try:
            return int(float(str(value)) * self.unit)
        except (ValueError, OverflowError):
            raise ValueError("a number") from None

    def write(self, value: object) -> str | None:
        assert isinstance(value, int)
        return f"{value / self.unit:g}" if value % self.unit == 0 else None


class Share:
    """A fraction above 0 and at most 1."""

    def read(self, value: object) -> float:
        try:
            share = float(str(value))
        except ValueError:
            share = 0.0
        if not 0 < share <= 1:
            raise ValueError("a fraction above 0 and at most 1")
        return share

    def write(self, value: object) -> str | None:
        return repr(value)


class Text:
    def read(self, value: object) -> str:
        return str(value)

    def write(self, value: object) -> str | None:
        return str(value)


class TextList:
    """Texts as a JSON list, a Python list, or separated by commas; kept with commas."""

    def read(self, value: object) -> str:
        found = value
        if isinstance(value, str) and value.lstrip().startswith("["):
            try:
                found = json.loads(value)
            except ValueError:
                raise ValueError("a JSON list of texts") from None
        parts = found if isinstance(found, (list, tuple)) else [found]
        return ",".join(str(part) for part in parts)

    def write(self, value: object) -> str | None:
        return str(value)


@dataclass(frozen=True, slots=True)
class Names:
    """A word of a list: theirs to ours. The first of several with one meaning is the one written.
    A word that is not in the list is kept as it is, and can't be written for another engine."""

    ours: Mapping[str, object]

    def read(self, value: object) -> object:
        word = str(value).lower()
        known = (ours for theirs, ours in self.ours.items() if theirs.lower() == word)
        return next(known, word)

    def write(self, value: object) -> str | None:
        return next((word for word, meaning in self.ours.items() if meaning == value), None)


class YesNo:
    """A flag that takes true or false as its value."""

    def read(self, value: object) -> bool:
        text = str(value).lower()
        if text not in (*YES, *NO):
            raise ValueError("true or false")
        return text in YES

    def write(self, value: object) -> str | None:
        return "true" if value else "false"


@dataclass(frozen=True, slots=True)
class Fixed:
    """What a flag without a value sets."""

    value: object

    def read(self, value: object) -> object:
        """`value` is None on a command line; a program or a file may give true or false."""
        if value is None or YesNo().read(value):
            return self.value
        return not self.value if isinstance(self.value, bool) else None

    def write(self, value: object) -> str | None:
        return "" if value == self.value else None


COUNT, SHARE, TEXT, TEXTS, YES_NO = Count(), Share(), Text(), TextList(), YesNo()
ON, OFF = Fixed(True), Fixed(False)
