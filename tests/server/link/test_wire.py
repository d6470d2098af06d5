"""The message that has a step's tokens: columns, extras by place, and what is refused."""

from __future__ import annotations

import math
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from headrace.core.request import FinishReason, SampledToken, Started
from headrace.server.link import wire
from headrace.server.link.frames import LENGTH_BYTES, Encoder

IDS = st.integers(0, 2**31 - 1)
LOGPROBS = st.floats(max_value=0.0, allow_nan=False) | st.just(-math.inf)
TOP = st.lists(st.tuples(IDS, LOGPROBS), max_size=3)
TOKENS = st.builds(
    SampledToken,
    request_id=st.sampled_from(["a", "b", "c", "chatcmpl-" + "0" * 32]),
    token_id=st.just(-1) | IDS,
    logprob=LOGPROBS,
    index=st.integers(0, 127),
    top=TOP,
    finish_reason=st.none() | st.sampled_from(FinishReason),
    error=st.none() | st.text(max_size=20),
    prompt_scores=st.none() | st.lists(st.tuples(LOGPROBS, TOP), max_size=3),
    embedding=st.none() | st.lists(st.floats(allow_nan=False), max_size=3),
)
STARTED = st.builds(
    Started,
    request_id=st.sampled_from("abc"),
    waited_s=st.floats(0, 1e6),
    cached_tokens=st.integers(0, 2**20),
)
NUMBERS = {"a": 0, "b": 70_000, "chatcmpl-" + "0" * 32: 2**40}  # and nobody waits for "c"


def sent(message: wire.FromEngine) -> wire.FromEngine:
    """The other process's."""
    (heard,) = wire.from_engine_decoder().feed(Encoder().frame(message))
    return heard


def refused(*fields: Any) -> str:
    """What is said of a message that no engine makes."""
    body = msgspec.msgpack.encode(["tokens", *fields])
    with pytest.raises(msgspec.ValidationError) as caught:
        list(wire.from_engine_decoder().feed(len(body).to_bytes(LENGTH_BYTES, "little") + body))
    return str(caught.value)


@given(st.lists(TOKENS, max_size=20), st.lists(STARTED, max_size=5))
def test_tokens_come_as_they_went(tokens: list[SampledToken], started: list[Started]) -> None:
    message = sent(wire.Tokens.of(tokens, started, NUMBERS))
    assert isinstance(message, wire.Tokens)
    known = [token for token in tokens if token.request_id in NUMBERS]
    rows = list(message.rows())
    assert [number for number, _ in rows] == [NUMBERS[token.request_id] for token in known]
    for (_, (index, token_id, logprob, reason, extra)), token in zip(rows, known, strict=True):
        assert (index, token_id, logprob) == (token.index, token.token_id, token.logprob)
        assert reason is token.finish_reason
        found = extra or wire.Extra()
        assert list(found.top) == token.top
        assert found.error == token.error
        assert found.prompt_scores == token.prompt_scores
        assert found.embedding == token.embedding
    assert message.started == [
        (NUMBERS[each.request_id], each.waited_s, each.cached_tokens)
        for each in started
        if each.request_id in NUMBERS
    ]


def test_only_what_few_tokens_have_is_beside_the_columns() -> None:
    plain = SampledToken(request_id="a", token_id=5, logprob=-1.0)
    scored = SampledToken(request_id="b", token_id=6, logprob=-2.0, top=[(6, -2.0), (7, -3.0)])
    message = wire.Tokens.of([plain, scored, plain], [], NUMBERS)
    assert message.extras == {1: wire.Extra(top=[(6, -2.0), (7, -3.0)])}
    assert message.extras[1].entries == 2
    assert [extra for _, (*_, extra) in message.rows()] == [None, message.extras[1], None]


def test_guesses_come_with_their_request() -> None:
    tokens = [
        SampledToken("a", 1, 0.0, drafted=(2, 1)),
        SampledToken("a", 2, 0.0),
        SampledToken("b", 3, 0.0, drafted=(0, 4)),
        SampledToken("c", 4, 0.0, drafted=(1, 1)),
    ]
    message = wire.Tokens.of(tokens, [], NUMBERS)
    assert message.drafted == [(NUMBERS["a"], 2, 1), (NUMBERS["b"], 0, 4)]
    assert not message.extras


def test_what_waits_unread_counts_every_score() -> None:
    extra = wire.Extra(top=[(1, -1.0)], prompt_scores=[(-1.0, [(1, -1.0), (2, -2.0)]), (-2.0, [])])
    assert extra.entries == 1 + 3 + 1


def test_a_token_takes_few_bytes() -> None:
    ids = [f"chatcmpl-{number:032x}" for number in range(256)]
    tokens = [SampledToken(request_id=name, token_id=100_000, logprob=-0.1) for name in ids]
    numbers = {name: 60_000 + place for place, name in enumerate(ids)}
    assert len(Encoder().frame(wire.Tokens.of(tokens, [], numbers))) < 20 * len(tokens)


@pytest.mark.parametrize("short", range(5))
def test_columns_of_different_lengths_are_refused(short: int) -> None:
    columns: list[list[Any]] = [[1, 2], [0, 0], [5, 6], [-1.0, -1.0], [None, None]]
    columns[short].pop()
    assert "a step's columns differ in length" in refused(*columns)
    with pytest.raises(ValueError, match="differ in length"):
        msgspec.convert(["tokens", *columns], wire.Tokens)


@pytest.mark.parametrize("place", [-1, 1, 2**40])
def test_an_extra_of_no_token_is_refused(place: int) -> None:
    columns: list[list[Any]] = [[1], [0], [5], [-1.0], [None]]
    assert "outside the step's 1 tokens" in refused(*columns, {place: [[[5, -1.0]]]})


@pytest.mark.parametrize(
    ("place", "wrong"),
    [(0, "chatcmpl-1"), (1, 0.5), (2, None), (3, "low"), (4, "because")],
)
def test_a_column_has_one_type(place: int, wrong: object) -> None:
    columns: list[list[Any]] = [[1], [0], [5], [-1.0], [None]]
    columns[place] = [wrong]
    refused(*columns)


def test_a_message_has_no_more_fields_than_are_known() -> None:
    assert "at most length 8" in refused([], [], [], [], [], {}, [], [], "more")
