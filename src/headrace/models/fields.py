"""Typed, checked reading of a model's description: a field exists, has the right type and is
plausible, or an error names the field, what was found and what was expected.

Knows nothing of models: config.json and GGUF metadata are both just named values here.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

from headrace.core.errors import UnsupportedModelError, WeightsError

_REMEDY = "The file is damaged or was written by a faulty converter: fetch or convert it again."
_SMALLEST, _LARGEST = 1e-6, 1e6  # of a list of factors: their quotients stay finite
_MAX_SHOWN = 80  # characters of a value quoted in an error: a field may hold a whole vocabulary


class Fields:
    """Named values of one file; `null` and absent are the same unless `has_key` is asked."""

    def __init__(self, values: Mapping[str, object], where: str, prefix: str = "") -> None:
        self.where = where  # as an error names it: "config.json"
        self.prefix = prefix  # before names in errors: "llama." in GGUF, "rope_scaling." if nested
        self._values = values

    def names(self) -> list[str]:
        return list(self._values)

    def has_key(self, name: str) -> bool:
        return name in self._values

    def has(self, name: str) -> bool:
        return self._values.get(name) is not None

    def value(self, name: str) -> object:
        """As it is in the file; None if it is absent."""
        return self._values.get(name)

    def integer(
        self, name: str, *, low: int = 1, high: int = 2**31, default: int | None = None
    ) -> int:
        expected = f"an integer from {low} to {high}"
        value = self._value(name, expected, default)
        if isinstance(value, bool) or not isinstance(value, int) or not low <= value <= high:
            raise self.malformed(name, expected)
        return value

    def number(
        self,
        name: str,
        *,
        low: float = 0.0,
        high: float = 1e12,
        default: float | None = None,
    ) -> float:
        """A finite number, above `low` and at most `high`."""
        expected = f"a number above {low:g} and at most {high:g}"
        value = self._value(name, expected, default)
        if isinstance(value, bool) or not isinstance(value, (int, float)):
            raise self.malformed(name, expected)
        if not low < value <= high:
            raise self.malformed(name, expected)
        return float(value)

    def flag(self, name: str, *, default: bool) -> bool:
        value = self._value(name, "true or false", default)
        if not isinstance(value, bool):
            raise self.malformed(name, "true or false")
        return value

    def text(self, name: str, *, default: str | None = None) -> str:
        value = self._value(name, "a string", default)
        if not isinstance(value, str):
            raise self.malformed(name, "a string")
        return value

    def texts(self, name: str) -> list[str]:
        value = self._value(name, "a list of strings", None)
        if isinstance(value, str) or not isinstance(value, Sequence):
            raise self.malformed(name, "a list of strings")
        if not all(isinstance(item, str) for item in value):
            raise self.malformed(name, "a list of strings")
        return list(value)

    def integers(self, name: str) -> list[int]:
        value = self._value(name, "a list of integers", None)
        if isinstance(value, str) or not isinstance(value, Sequence):
            raise self.malformed(name, "a list of integers")
        if not all(type(item) is int for item in value):
            raise self.malformed(name, "a list of integers")
        return list(value)

    def numbers(self, name: str, count: int) -> tuple[float, ...]:
        """Exactly `count` positive numbers, safe to divide by."""
        expected = f"a list of {count} positive numbers"
        value = self._value(name, expected, None)
        if isinstance(value, str) or not isinstance(value, Sequence):
            raise self.malformed(name, expected)
        return positive_numbers(value, count, f"{self.where}: {self.prefix}{name}")

    def section(self, name: str) -> Fields | None:
        """The fields nested under `name`, or None if there are none."""
        value = self._values.get(name)
        if value is None:
            return None
        if not isinstance(value, Mapping):
            raise self.malformed(name, "an object")
        return Fields(value, self.where, f"{self.prefix}{name}.") if value else None

    def with_value(self, name: str, value: object) -> Fields:
        return Fields({**self._values, name: value}, self.where, self.prefix)

    def malformed(self, name: str, expected: str) -> WeightsError:
        """The error for a field whose value can't be right."""
        return WeightsError(
            f"{self.where}: {self.prefix}{name} is {self.shown(name)}; expected {expected}.",
            _REMEDY,
            param=name,
        )

    def unsupported(self, name: str, supported: str) -> UnsupportedModelError:
        """The error for a valid value that Headrace does not support."""
        return UnsupportedModelError(
            f"{self.where}: {self.prefix}{name} is {self.shown(name)}; supported: {supported}.",
            "Choose another model, or another version of this one.",
            param=name,
        )

    def shown(self, name: str) -> str:
        value = self._values.get(name)
        text = "missing" if value is None else repr(value)
        return text if len(text) <= _MAX_SHOWN else text[: _MAX_SHOWN - 1] + "…"

    def _value(self, name: str, expected: str, default: object) -> object:
        value = self._values.get(name)
        if value is None:
            value = default
        if value is None:
            raise self.malformed(name, expected)
        return value


def positive_numbers(values: Sequence[object], count: int, what: str) -> tuple[float, ...]:
    """The values as floats, if they are `count` positive numbers that are safe to divide by."""
    if len(values) != count:
        raise WeightsError(f"{what} has {len(values)} values; expected {count}.", _REMEDY)
    floats: list[float] = []
    for index, value in enumerate(values):
        number = float(value) if isinstance(value, (int, float)) else math.nan
        if not _SMALLEST <= number <= _LARGEST:
            raise WeightsError(
                f"{what}[{index}] is {value!r}; expected a number from {_SMALLEST:g} to "
                f"{_LARGEST:g}.",
                _REMEDY,
            )
        floats.append(number)
    return tuple(floats)
