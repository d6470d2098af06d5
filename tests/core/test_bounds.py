"""Bounds on a request's lists and texts: what is beyond is refused by name, and not walked."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from headrace.core import bounds
from headrace.core.bounds import check_json, shown
from headrace.core.errors import BoundError, InvalidRequestError
from headrace.core.request import SamplingParams
from headrace.core.sampling import DrawNumbers

DOCUMENT = Path(__file__).parents[2] / "docs" / "bounds.md"


class Unwalked(list[Any]):
    """A list that fails if anybody goes through it."""

    def __iter__(self) -> Iterator[Any]:
        raise AssertionError("walked before it was bounded")


class UnwalkedBias(dict[int, float]):
    def __iter__(self) -> Iterator[int]:
        raise AssertionError("walked before it was bounded")


@pytest.mark.parametrize(
    ("fields", "param", "bound"),
    [
        ({"stop": Unwalked(["a"] * 17)}, "stop", "stop"),
        ({"stop": "a" * 4097}, "stop", "stop_characters"),
        ({"bad_words": Unwalked(["a"] * 65)}, "bad_words", "bad_words"),
        ({"bad_words": ["a" * 1025]}, "bad_words", "bad_word_characters"),
        ({"stop_token_ids": Unwalked([5] * 1025)}, "stop_token_ids", "stop_token_ids"),
        ({"allowed_token_ids": Unwalked([5] * 4_100_000)}, "allowed_token_ids", None),
        ({"logit_bias": UnwalkedBias(dict.fromkeys(range(16_385), 1.0))}, "logit_bias", None),
    ],
)
def test_what_is_too_long_is_refused_unseen(
    fields: dict[str, Any], param: str, bound: str | None
) -> None:
    with pytest.raises(BoundError) as caught:
        SamplingParams(**fields)
    assert caught.value.param == param
    assert caught.value.bound == (bound or param)
    assert caught.value.status == 400
    assert len(str(caught.value)) < 300
    assert caught.value.remedy


@pytest.mark.parametrize(
    "fields",
    [
        {"stop": ["a"] * 16},
        {"stop": ["a" * 4096]},
        {"bad_words": ["a" * 1024] * 64},
        {"stop_token_ids": list(range(1024))},
        {"allowed_token_ids": list(range(262_144))},
        {"logit_bias": dict.fromkeys(range(16_384), -100)},
    ],
)
def test_what_is_at_its_bound_is_taken(fields: dict[str, Any]) -> None:
    SamplingParams(**fields)


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"stop": ["a", ""]}, "stop"),
        ({"bad_words": [""] * 64}, "bad_words"),
        ({"stop_token_ids": [1, -1]}, "stop_token_ids"),
        ({"stop_token_ids": [1, True]}, "stop_token_ids"),
        ({"stop_token_ids": [1, 2.0]}, "stop_token_ids"),
        ({"allowed_token_ids": [0, *range(-1, 200_000)]}, "allowed_token_ids"),
        ({"allowed_token_ids": []}, "allowed_token_ids"),
        ({"logit_bias": {"1": 1.0}}, "logit_bias"),
        ({"logit_bias": {1: 100.5}}, "logit_bias"),
        ({"logit_bias": {1: -101}}, "logit_bias"),
        ({"logit_bias": {1: float("nan")}}, "logit_bias"),
        ({"logit_bias": {1: 0.0, 2: float("inf")}}, "logit_bias"),
        ({"logit_bias": {1: True}}, "logit_bias"),
        ({"logit_bias": {1: "x" * 10_000}}, "logit_bias"),
        ({"n": [5] * 100_000}, "n"),
    ],
)
def test_what_is_wrong_in_a_list_is_still_found_and_told_briefly(
    fields: dict[str, Any], param: str
) -> None:
    with pytest.raises(InvalidRequestError) as caught:
        SamplingParams(**fields)
    assert caught.value.param == param
    assert len(str(caught.value)) < 400


def test_allowed_ids_come_once_each_in_their_order() -> None:
    assert SamplingParams(allowed_token_ids=[5, 3, 5, 5, 9, 3]).allowed_token_ids == (5, 3, 9)


def test_settling_checks_no_list_again(monkeypatch: pytest.MonkeyPatch) -> None:
    params = SamplingParams(stop_token_ids=[1], logit_bias={2: 1.0}, top_k=-1)

    def fail(params: SamplingParams) -> None:
        raise AssertionError("checked twice")

    monkeypatch.setattr(SamplingParams, "__post_init__", fail)
    settled = params.settled(DrawNumbers(temperature=0.5, top_p=0.9, top_k=40))
    assert (settled.temperature, settled.top_p, settled.top_k) == (0.5, 0.9, 0)
    assert settled.logit_bias == {2: 1.0}
    assert settled.stop_token_ids == (1,)
    assert params.temperature is None


# -- JSON ------------------------------------------------------------------------------------------

VALUES, NUMBERS = bounds.BODY_VALUES.most, bounds.BODY_NUMBERS.most


def dumped(value: object) -> bytes:
    return json.dumps(value).encode()


@pytest.mark.parametrize(
    ("body", "bound"),
    [
        (lambda: dumped(["a"] * (VALUES + 1)), "body_values"),
        (lambda: dumped([[]] * (VALUES + 1)), "body_values"),
        (lambda: dumped([{}] * VALUES), "body_values"),
        (lambda: dumped({str(i): 1 for i in range(VALUES + 1)}), "body_values"),
        (lambda: dumped(["a", []] * (VALUES // 2 + 1)), "body_values"),
        (lambda: dumped([1] * (NUMBERS + 3)), "body_numbers"),
        (lambda: dumped(['\\"', *[1] * (NUMBERS + 4)]), "body_numbers"),
    ],
)
def test_a_body_of_too_many_values_is_not_read(body: Callable[[], bytes], bound: str) -> None:
    with pytest.raises(BoundError) as caught:
        check_json(body(), "The body")
    assert caught.value.bound == bound


@pytest.mark.parametrize(
    "text",
    [
        ",[{" * 1_000_000,
        '"' * 1_000_000,
        "\\" * 1_000_000,
        '\\",[{' * 500_000,
        '["a", 1],' * 300_000,
    ],
)
def test_what_stands_in_a_text_does_not_count(text: str) -> None:
    check_json(dumped({"messages": [{"content": text}] * 2}), "The body")


@pytest.mark.parametrize(
    "value",
    [["a"] * (VALUES - 1), [[]] * (VALUES - 1), [1] * NUMBERS, [[1] * 4096] * 128],
)
def test_a_body_at_its_bound_is_read(value: object) -> None:
    check_json(dumped(value), "The body")


def test_a_value_is_shown_by_its_beginning() -> None:
    assert shown("abc") == "'abc'"
    assert shown([1, 2]) == "[1, 2]"
    for value in ("x" * 10**6, [5] * 10**6, {"a": ["b" * 10**6] * 10}, 10**200, [[[[["deep"]]]]]):
        assert len(shown(value)) <= bounds.SHOWN_CHARACTERS + 3


def test_every_bound_is_documented() -> None:
    text = DOCUMENT.read_text(encoding="utf-8")
    for bound in bounds.ALL:
        (line,) = [row for row in text.splitlines() if row.startswith(f"| `{bound.name}` |")]
        assert f"{bound.most:,}" in line, line
        assert bound.why in line
    assert len({bound.name for bound in bounds.ALL}) == len(bounds.ALL)
    named = [value for value in vars(bounds).values() if isinstance(value, bounds.Bound)]
    assert sorted(b.name for b in named) == sorted(b.name for b in bounds.ALL)
