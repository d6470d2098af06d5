"""core/checks.py: a field with bounds takes what is just inside and refuses what is just outside.

The cases are made from the fields' own metadata, so that a new field is among them.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, field, fields
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from headrace.core.checks import (
    MAX_COUNT,
    RULE,
    Range,
    Texts,
    TokenIds,
    TokenValues,
    check_fields,
    check_value,
    metadata_of,
    rule_of,
    within,
)
from headrace.core.config import EngineConfig
from headrace.core.errors import BoundError, ConfigError, HeadraceError, InvalidRequestError
from headrace.core.request import BeamParams, GenerateRequest, SamplingParams
from headrace.core.sampling import DrawFields, DrawNumbers
from headrace.core.server_config import ServerConfig

OWNERS: dict[type, type[HeadraceError]] = {
    SamplingParams: InvalidRequestError,
    BeamParams: InvalidRequestError,
    GenerateRequest: InvalidRequestError,
    EngineConfig: ConfigError,
    ServerConfig: ConfigError,
}
# What else must be said for a value to be possible.
BESIDE: dict[tuple[type, str], dict[str, Any]] = {
    (SamplingParams, "min_tokens"): {"max_tokens": None},
}
NEEDED: dict[type, dict[str, Any]] = {
    BeamParams: {"beam_width": 2},
    GenerateRequest: {"request_id": "a", "prompt_token_ids": [1], "params": SamplingParams()},
}


def edges(rule: Range) -> Iterator[tuple[float, float, float]]:
    """(just inside, just outside, the bound) for each of its bounds."""

    def beyond(bound: float, towards: float) -> float:
        if rule.is_whole:
            return bound + (1 if towards > bound else -1)
        return math.nextafter(bound, towards)

    if rule.at_least is not None:
        yield rule.at_least, beyond(rule.at_least, -math.inf), rule.at_least
    if rule.above is not None:
        yield beyond(rule.above, math.inf), rule.above, rule.above
    if rule.at_most is not None:
        yield rule.at_most, beyond(rule.at_most, math.inf), rule.at_most


def bounded(owner: type) -> list[tuple[str, Range]]:
    declared = [each.name for each in fields(owner) if RULE in metadata_of(owner, each.name)]
    rules = [(name, rule_of(owner, name)[1]) for name in declared]
    return [(name, rule) for name, rule in rules if isinstance(rule, Range)]


CASES = [
    pytest.param(owner, name, *edge, id=f"{owner.__name__}.{name}-{edge[1]}")
    for owner in OWNERS
    for name, rule in bounded(owner)
    for edge in edges(rule)
]


def make(owner: type, name: str, value: object) -> Any:
    return owner(**NEEDED.get(owner, {}) | BESIDE.get((owner, name), {}) | {name: value})


@pytest.mark.parametrize(("owner", "name", "inside", "outside", "bound"), CASES)
def test_a_bound_is_where_the_metadata_says(
    owner: type, name: str, inside: float, outside: float, bound: float
) -> None:
    kept = getattr(make(owner, name, inside), name)
    assert kept == inside or (name, inside, kept) == ("top_k", -1, 0)
    with pytest.raises(OWNERS[owner]) as caught:
        make(owner, name, outside)
    error = caught.value
    assert error.param == name
    assert error.cause.startswith(f"{name} is {outside!r}; expected ")
    shown = str(bound) if isinstance(bound, int) else f"{bound:g}"
    assert shown in error.cause.split("expected")[1]
    assert error.remedy.startswith(f"Set {name} to ")


def test_there_are_cases_of_every_class() -> None:
    assert {case.values[0] for case in CASES} == set(OWNERS)
    assert {each.name for each in fields(DrawFields)} <= {
        name for name, _ in bounded(SamplingParams)
    }


RANGES = [(owner, name, rule) for owner in OWNERS for name, rule in bounded(owner)]


@given(st.sampled_from(RANGES), st.integers(-(2**70), 2**70) | st.floats())
def test_numbers_are_taken_exactly_within_the_bounds(
    where: tuple[type, str, Range], value: float
) -> None:
    owner, name, rule = where
    good = (
        math.isfinite(value)
        and not (rule.is_whole and isinstance(value, float))
        and (rule.at_least is None or value >= rule.at_least)
        and (rule.above is None or value > rule.above)
        and (rule.at_most is None or value <= rule.at_most)
    )
    if good:
        check_value(owner, name, value, param="sent_as")
        return
    with pytest.raises(InvalidRequestError) as caught:
        check_value(owner, name, value, param="sent_as")
    assert caught.value.param == "sent_as"


@pytest.mark.parametrize("name", ["logit_bias", "allowed_token_ids", "bad_words", "stop"])
def test_a_list_is_counted_by_the_bound_of_its_field(name: str) -> None:
    _, rule = rule_of(SamplingParams, name)
    assert isinstance(rule, (Texts, TokenIds, TokenValues))
    most = rule.most.most

    def listed(count: int) -> Any:
        if isinstance(rule, TokenValues):
            return dict.fromkeys(range(count), 1.0)
        return ["a"] * count if isinstance(rule, Texts) else list(range(count))

    assert len(getattr(SamplingParams(**{name: listed(most)}), name)) == most
    with pytest.raises(BoundError, match=rf"{name} has {most + 1} .* at most {most}"):
        SamplingParams(**{name: listed(most + 1)})


@pytest.mark.parametrize(
    ("value", "expected"),
    [
        (True, "a whole number, 1 or more"),
        (1.0, "a whole number, 1 or more"),
        ("1", "a whole number, 1 or more"),
        (0, "1 or more"),
        (MAX_COUNT + 1, f"at most {MAX_COUNT}"),
    ],
)
def test_what_is_no_count_is_told_so(value: Any, expected: str) -> None:
    with pytest.raises(InvalidRequestError) as caught:
        SamplingParams(max_tokens=value)
    assert caught.value.cause == f"max_tokens is {value!r}; expected {expected}."
    assert caught.value.remedy == f"Set max_tokens to {expected}."


@pytest.mark.parametrize(
    ("rule", "expected", "remedy"),
    [
        (Range(), "a finite number", "a finite number"),
        (Range(at_least=0), "0 or more", "0 or more"),
        (Range(at_least=0, meaning="greedy"), "0 (greedy) or more", "0 (greedy) or more"),
        (Range(at_least=-2, at_most=2), "-2 to 2", "a value from -2 to 2"),
        (Range(above=0), "a number above 0", "a number above 0"),
        (Range(above=0, at_most=0.5), "above 0 and at most 0.5", "a value above 0 and at most 0.5"),
        (Range(at_most=3), "at most 3", "at most 3"),
    ],
)
def test_bounds_in_words(rule: Range, expected: str, remedy: str) -> None:
    @dataclass
    class Owner:
        x: float | None = field(default=None, metadata={RULE: rule})

    assert rule.expected == expected
    with pytest.raises(ConfigError) as caught:
        check_value(Owner, "x", "?", error=ConfigError)
    assert "a finite number" in caught.value.cause
    wrong = -1e9 if rule.at_least is not None or rule.above is not None else 1e9
    if rule != Range():
        with pytest.raises(ConfigError) as caught:
            check_value(Owner, "x", wrong, error=ConfigError)
        assert str(caught.value) == f"x is {wrong!r}; expected {expected}. Set x to {remedy}."


def test_a_narrowed_field_keeps_its_bounds() -> None:
    """DrawNumbers says of some fields that they are never None, and nothing else."""
    with pytest.raises(InvalidRequestError, match="top_p is 0; expected above 0"):
        check_fields(DrawNumbers(top_p=0))
    with pytest.raises(InvalidRequestError, match="temperature is None; expected a finite number"):
        check_fields(DrawNumbers(temperature=None))  # type: ignore[arg-type]
    check_fields(DrawNumbers())


def test_a_field_without_metadata_is_checked_by_its_type() -> None:
    @dataclass(frozen=True)
    class Owner:
        count: int = 0
        share: float = 0.0
        is_on: bool = False
        name: str = "x"
        salt: str = ""
        maybe: int | None = field(default=None, metadata=within(at_least=1))

    check_fields(Owner())
    wrong: list[tuple[str, Any, str]] = [
        ("count", 1.5, "a whole number"),
        ("share", math.inf, "a finite number"),
        ("is_on", 1, "true or false"),
        ("name", "", "some text"),
        ("salt", None, "some text"),
        ("maybe", 0, "1 or more"),
    ]
    for name, value, expected in wrong:
        with pytest.raises(InvalidRequestError) as caught:
            check_fields(Owner(**{name: value}))
        assert caught.value.cause == f"{name} is {value!r}; expected {expected}."
