"""Streams as bytes, with the times at which they arrive."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from headrace.client.answer import Answer, Failure


def event(value: Any) -> bytes:
    return b"data: " + json.dumps(value).encode() + b"\n\n"


def delta(finish: str | None = None, **fields: Any) -> dict[str, Any]:
    return {"choices": [{"index": 0, "delta": fields, "finish_reason": finish}]}


USAGE = {"choices": [], "usage": {"prompt_tokens": 7, "completion_tokens": 5}}
DONE = b"data: [DONE]\n\n"


def test_the_first_token_is_the_first_that_is_not_empty() -> None:
    answer = Answer()
    answer.feed(event(delta(role="assistant", content="")), 1.0)
    answer.feed(b": keep-alive\n\n", 1.5)
    answer.feed(event(delta(content="Hi")), 2.0)
    answer.feed(event(delta(content=" there")), 2.5)
    answer.feed(event(delta("stop")) + event(USAGE) + DONE, 3.0)
    answer.end(3.0)
    assert answer.times_s == [2.0, 2.5]  # neither the role nor [DONE] is a token
    assert "".join(answer.text) == "Hi there"
    assert (answer.prompt_tokens, answer.output_tokens, answer.finish) == (7, 5, "stop")
    assert answer.failure is None


@pytest.mark.parametrize("name", ["reasoning_content", "reasoning"])
def test_reasoning_is_a_token_and_not_visible_and_not_counted_twice(name: str) -> None:
    answer = Answer()
    answer.feed(event(delta(**{name: "Let me think"})), 1.0)
    answer.feed(event(delta(content="42")), 4.0)
    details = {"completion_tokens_details": {"reasoning_tokens": 3}}
    usage = {"prompt_tokens": 7, "completion_tokens": 5, **details}
    answer.feed(event(delta("stop")) + event({"choices": [], "usage": usage}) + DONE, 5.0)
    answer.end(5.0)
    assert answer.times_s == [1.0, 4.0]
    assert answer.visible_s == 4.0
    assert (answer.output_tokens, answer.reasoning_tokens) == (5, 3)
    assert ("".join(answer.text), "".join(answer.hidden)) == ("42", "Let me think")


@pytest.mark.parametrize(
    "bad",
    [
        b'event: error\ndata: {"message": "out of memory"}\n\n',
        event({"error": {"message": "out of memory", "code": 500}}),
        event({"error": "out of memory"}),
    ],
)
def test_an_error_in_a_stream_is_an_error(bad: bytes) -> None:
    answer = Answer()
    answer.feed(event(delta(content="Hi")) + bad + DONE, 1.0)
    answer.end(1.0)
    assert (answer.failure, answer.detail) == (Failure.IN_STREAM, "out of memory")
    assert answer.times_s == [1.0]  # what came is kept


def test_a_chunk_that_is_not_json_is_an_error() -> None:
    answer = Answer()
    answer.feed(b"data: <html>\n\n", 1.0)
    assert answer.failure is Failure.IN_STREAM


@pytest.mark.parametrize(
    "choices", [[None], ["a"], [{"delta": "a"}], 5, [{"delta": {"content": 5}}]]
)
def test_a_chunk_of_another_form_is_an_error(choices: Any) -> None:
    answer = Answer()
    answer.feed(event({"choices": choices}), 1.0)
    assert answer.failure is Failure.IN_STREAM
    assert "another form" in answer.detail


@pytest.mark.parametrize("count", [-4, "5", None, 1.5, True])
def test_a_count_that_is_none_is_not_taken(count: Any) -> None:
    answer = Answer()
    answer.feed(event({"choices": [], "usage": {"completion_tokens": count}}), 1.0)
    assert answer.output_tokens is None


def test_a_stream_without_an_end_was_cut() -> None:
    answer = Answer()
    answer.feed(event(delta(content="Hi")), 1.0)
    answer.end(2.0)
    assert answer.failure is Failure.CUT


def test_an_answer_without_a_token_is_no_answer() -> None:
    answer = Answer()
    answer.feed(event(delta("stop", content="")) + DONE, 1.0)
    answer.end(1.0)
    assert answer.failure is Failure.EMPTY


def test_tokens_of_completions_and_their_ids() -> None:
    answer = Answer()
    answer.feed(event({"choices": [{"text": "ab", "token_ids": [4, 5]}]}), 1.0)
    answer.feed(event({"choices": [{"text": "c", "token_ids": [6], "finish_reason": "length"}]}), 2)
    answer.end(2.0)
    assert (answer.counts, answer.token_ids, answer.chars) == ([2, 1], [4, 5, 6], [2, 1])


def test_the_arguments_of_a_call_are_tokens() -> None:
    answer = Answer()
    call = {"index": 0, "function": {"name": "f", "arguments": '{"a":'}}
    answer.feed(event(delta(tool_calls=[call])), 1.0)
    answer.feed(event(delta("tool_calls")) + DONE, 2.0)
    answer.end(2.0)
    assert answer.failure is None
    assert (answer.times_s, answer.chars, answer.visible_s) == ([1.0], [6], None)


@given(cuts=st.lists(st.integers(1, 400), max_size=30), ending=st.sampled_from([b"\n", b"\r\n"]))
def test_it_does_not_matter_where_reads_are_cut(cuts: list[int], ending: bytes) -> None:
    whole = b"".join(
        [event(delta(content=word)) for word in ("Grüße", " an", " alle")]
        + [event(delta("stop")), event(USAGE), DONE]
    ).replace(b"\n", ending)
    answer, at = Answer(), 0
    for cut in sorted({min(cut, len(whole)) for cut in cuts} | {len(whole)}):
        answer.feed(whole[at:cut], float(cut))
        at = cut
    answer.end(1e9)
    assert "".join(answer.text) == "Grüße an alle"
    assert (answer.output_tokens, answer.is_done, answer.failure) == (5, True, None)
    assert answer.times_s == sorted(answer.times_s)
