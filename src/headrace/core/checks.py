"""The one checker of values: a field's type and metadata say which values it takes.

    watermark: float = field(default=0.02, metadata=within(at_least=0, at_most=0.5))

`check_fields` goes over a dataclass from its `__post_init__`; `check_value` takes a single value,
which may have been sent under another name. A field's rule is the one in its metadata, or follows
from its type: a bool, a finite number, one word of a StrEnum, some text. Rules that involve two
fields are checked by their class. Standard library only; knows no field by name.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import MISSING, dataclass, fields, replace
from enum import StrEnum
from functools import cache
from types import MappingProxyType, NoneType, UnionType
from typing import Any, Protocol, Union, cast, get_args, get_origin, get_type_hints

from headrace.core.bounds import Bound, shown
from headrace.core.errors import HeadraceError, InvalidRequestError, remedy_for

MAX_COUNT = 2**31 - 1  # of anything that is counted: above every context length, and fits int32
RULE = "rule"  # in a field's metadata

ErrorType = type[HeadraceError]


def refusal(error: ErrorType, param: str, found: object, expected: str) -> HeadraceError:
    return error(
        f"{param} is {shown(found)}; expected {expected}.", remedy_for(param, expected), param=param
    )


class Rule(Protocol):
    """What a field takes."""

    def settled(self, param: str, value: Any, error: ErrorType) -> Any:
        """The value in its normal form; raises `error` if it is refused."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class Range:
    """Finite numbers between two bounds. `meaning` explains the lower bound in error messages."""

    at_least: float | None = None
    above: float | None = None
    at_most: float | None = None
    meaning: str = ""
    is_whole: bool = False  # set from the field's type

    @property
    def expected(self) -> str:
        """In words: "1 or more", "0 to 1", "above 0 and at most 1", "a number above 0"."""
        words = self._words
        if not words:
            return "a finite number"
        return (
            f"a number {words}" if words.startswith("above") and "at most" not in words else words
        )

    @property
    def _words(self) -> str:
        low = "" if self.at_least is None else _number(self.at_least)
        low += f" ({self.meaning})" if self.meaning else ""
        # The upper bound of a count is so large that it is only mentioned when it is exceeded.
        is_count = self.at_most == MAX_COUNT and self.at_least != -MAX_COUNT
        is_open = self.at_most is None or is_count
        most = "" if is_open else _number(self.at_most or 0)
        if self.above is not None:
            above = f"above {_number(self.above)}"
            return above if is_open else f"{above} and at most {most}"
        if not low:
            return most and f"at most {most}"
        return f"{low} or more" if is_open else f"{low} to {most}"

    @property
    def _kind(self) -> str:
        kind, words = "a whole number" if self.is_whole else "a finite number", self._words
        return f"{kind}{' ' if words.startswith('a') else ', '}{words}" if words else kind

    def settled(self, param: str, value: Any, error: ErrorType) -> Any:
        if isinstance(value, bool) or not isinstance(value, (int, float)):
            raise refusal(error, param, value, self._kind)
        if self.is_whole:
            if not isinstance(value, int):
                raise refusal(error, param, value, self._kind)
        elif not math.isfinite(value):
            raise refusal(error, param, value, self._kind)
        if self.at_least is not None and value < self.at_least:
            raise refusal(error, param, value, self.expected)
        if self.above is not None and value <= self.above:
            raise refusal(error, param, value, self.expected)
        if self.at_most is not None and value > self.at_most:
            is_count = self.at_most == MAX_COUNT
            raise refusal(
                error, param, value, f"at most {MAX_COUNT}" if is_count else self.expected
            )
        return value


def within(
    *,
    at_least: float | None = None,
    above: float | None = None,
    at_most: float | None = None,
    meaning: str = "",
) -> dict[str, Any]:
    """Metadata of a field that takes numbers."""
    return {RULE: Range(at_least=at_least, above=above, at_most=at_most, meaning=meaning)}


@dataclass(frozen=True, slots=True, kw_only=True)
class YesNo:
    def settled(self, param: str, value: Any, error: ErrorType) -> bool:
        if not isinstance(value, bool):
            raise refusal(error, param, value, "true or false")
        return value


@dataclass(frozen=True, slots=True)
class Choice:
    """One of a few words; converted to the member of the enumeration."""

    words: type[StrEnum]

    def settled(self, param: str, value: Any, error: ErrorType) -> StrEnum:
        if value not in tuple(self.words):
            raise refusal(error, param, value, f"one of {', '.join(self.words)}")
        return self.words(value)


@dataclass(frozen=True, slots=True, kw_only=True)
class Text:
    longest: Bound | None = None
    may_be_empty: bool = False

    def settled(self, param: str, value: Any, error: ErrorType) -> str:
        if not isinstance(value, str) or not (value or self.may_be_empty):
            raise refusal(error, param, value, "some text")
        if self.longest is not None:
            self.longest.check(param, len(value))
        return value


@dataclass(frozen=True, slots=True, kw_only=True)
class Texts:
    """A list of a few texts; a single text may come without a list."""

    most: Bound
    longest: Bound

    def settled(self, param: str, value: Sequence[str] | str, error: ErrorType) -> tuple[str, ...]:
        texts = (value,) if isinstance(value, str) else value
        self.most.check(param, len(texts))  # before iterating over them
        if not all(isinstance(text, str) and text for text in texts):
            raise refusal(error, param, texts, "non-empty strings")
        self.longest.check(param, max(map(len, texts), default=0))
        return tuple(texts)


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenIds:
    """A list of token ids. It may be as long as the vocabulary, so there is no Python loop over it
    unless an id is wrong."""

    most: Bound
    may_be_empty: bool = True
    each_once: bool = False

    def settled(self, param: str, value: Collection[int], error: ErrorType) -> tuple[int, ...]:
        self.check(param, value, error)
        return tuple(dict.fromkeys(value)) if self.each_once else tuple(value)

    def check(self, param: str, ids: Collection[int], error: ErrorType) -> None:
        if not (ids or self.may_be_empty):
            raise refusal(error, param, ids, "at least one id")
        self.most.check(param, len(ids))
        if not ids or (set(map(type, ids)) == {int} and min(ids) >= 0):
            return
        for token in ids:
            _TOKEN_ID.settled(param, token, error)


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenValues:
    """A number for each of some token ids."""

    most: Bound
    values: Range

    def settled(
        self, param: str, value: Mapping[int, float], error: ErrorType
    ) -> Mapping[int, float]:
        TokenIds(most=self.most).check(param, value, error)
        numbers: Collection[float] = value.values()
        if numbers and set(map(type, numbers)) <= {int, float} and all(map(math.isfinite, numbers)):
            numbers = (min(numbers), max(numbers))  # between these, all are within a range
        for number in numbers:
            try:
                self.values.settled(param, number, error)
            except HeadraceError:
                expected = f"values from {self.values.expected}"
                raise refusal(error, param, number, expected) from None
        return value


def check_fields(values: Any, error: ErrorType = InvalidRequestError) -> None:
    """Raises `error` if a field of a dataclass has a value that it does not take, and converts the
    others to their normal form. None passes where the type allows it."""
    owner: type = type(values)
    for name, is_optional, rule, good in _rules(owner):
        value = getattr(values, name)
        if value is good or (value is None and is_optional):
            continue
        settled = rule.settled(name, value, error)
        if settled is not value:
            object.__setattr__(values, name, settled)  # the dataclass may be frozen


def check_value(
    owner: type, name: str, value: Any, *, param: str = "", error: ErrorType = InvalidRequestError
) -> None:
    """Checks a single value by the rule of a field of `owner`; `param` is the name it was sent
    under."""
    is_optional, rule = rule_of(owner, name)
    if value is not None or not is_optional:
        rule.settled(param or name, value, error)


def rule_of(owner: type, name: str) -> tuple[bool, Rule]:
    """Whether None is allowed, and what else is."""
    return next(found[1:3] for found in _rules(owner) if found[0] == name)


def metadata_of(owner: type, name: str) -> Mapping[str, Any]:
    """A field's own metadata; the base class's where a subclass redeclares it without any."""
    for base in owner.__mro__:
        declared = getattr(base, "__dataclass_fields__", {}).get(name)
        if declared is not None and declared.metadata:
            return cast("Mapping[str, Any]", declared.metadata)
    return MappingProxyType({})


def plain_types(hint: Any) -> tuple[list[Any], bool]:
    """The alternatives of a type except None, and whether None is one of them."""
    found = list(get_args(hint)) if get_origin(hint) in (Union, UnionType) else [hint]
    return [each for each in found if each is not NoneType], NoneType in found


@cache
def _rules(owner: type) -> tuple[tuple[str, bool, Rule, object], ...]:
    """A field's name, whether it may be None, its rule, and its default where that needs no check:
    most fields of most requests have it."""
    hints = get_type_hints(owner)
    found: list[tuple[str, bool, Rule, object]] = []
    for each in fields(owner):
        kinds, is_optional = plain_types(hints[each.name])
        given = metadata_of(owner, each.name).get(RULE)
        if not each.init or (rule := _rule(kinds, given, each.default)) is None:
            continue
        good: object = _NOTHING
        if each.default not in (MISSING, None):
            settled = rule.settled(each.name, each.default, HeadraceError)
            good = settled if settled is each.default else _NOTHING
        found.append((each.name, is_optional, rule, good))
    return tuple(found)


def _rule(kinds: list[Any], given: Rule | None, default: object) -> Rule | None:
    """A field of several types has the rule in its metadata, or none."""
    kind = kinds[0] if len(kinds) == 1 else None
    if kind in (int, float):
        number = given if isinstance(given, Range) else Range()
        return replace(number, is_whole=kind is int)
    if given is not None:
        return given
    if kind is bool:
        return YesNo()
    if kind is str:
        return Text(may_be_empty=default == "")
    return Choice(kind) if isinstance(kind, type) and issubclass(kind, StrEnum) else None


def _number(value: float) -> str:
    return str(value) if isinstance(value, int) else f"{value:g}"


_NOTHING = object()  # a marker that is equal to no value
_TOKEN_ID = Range(at_least=0, is_whole=True)
