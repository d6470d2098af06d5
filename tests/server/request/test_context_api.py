"""Nothing is cut in silence: a length that was asked for is given or refused in the words that
clients look for; where none was asked for, little room is said beforehand, and a cut in the log."""

from __future__ import annotations

import re
from typing import Any

import httpx
import pytest
from tests.server.conftest import RunningServer

CONTEXT = 256
WORDS: Any = [5] * 200

# Of litellm, langchain and others, to tell this error from every other 400.
LOOKED_FOR = (r"maximum context length is (\d+) tokens", "However, you requested")


def send(server: RunningServer, path: str, **fields: Any) -> httpx.Response:
    return httpx.post(f"{server.base_url}/v1/{path}", json=fields, timeout=120)


def chat_of(words: int) -> list[dict[str, str]]:
    return [{"role": "user", "content": "a " * words}]


@pytest.mark.parametrize(
    ("path", "fields", "where", "param"),
    [
        ("completions", {"prompt": WORDS, "max_tokens": 57}, "prompt", "max_tokens"),
        ("completions", {"prompt": WORDS, "n_predict": 57}, "prompt", "n_predict"),
        ("completions", {"prompt": [[5], WORDS], "max_tokens": 57}, "prompt", "max_tokens"),
        (
            "chat/completions",
            {"messages": chat_of(200), "max_tokens": 100},
            "messages",
            "max_tokens",
        ),
        (
            "chat/completions",
            {"messages": chat_of(200), "max_completion_tokens": 100, "stream": True},
            "messages",
            "max_completion_tokens",
        ),
        (
            "responses",
            {"input": "a " * 200, "max_output_tokens": 100},
            "messages",
            "max_output_tokens",
        ),
    ],
)
def test_a_length_that_does_not_fit_is_refused(
    short: RunningServer, path: str, fields: dict[str, Any], where: str, param: str
) -> None:
    reply = send(short, path, **fields)
    assert reply.status_code == 400
    error = reply.json()["error"]
    assert (error["code"], error["param"]) == ("context_length_exceeded", param)
    assert all(re.search(words, error["message"]) for words in LOOKED_FOR)
    found = re.fullmatch(
        r"This model's maximum context length is (\d+) tokens\. However, you requested (\d+) "
        rf"tokens \((\d+) in the {where}, (\d+) in the completion\)\. Lower {param} to (\d+) or .*",
        error["message"],
    )
    assert found is not None, error["message"]
    context, total, prompt, completion, room = map(int, found.groups())
    assert context == CONTEXT < total == prompt + completion
    assert room == context - prompt
    # And what the remedy says works.
    again = send(short, path, **{**fields, param: room})
    assert again.status_code == 200, again.text
    assert "x-headrace-warning" not in again.headers


@pytest.mark.parametrize(
    ("path", "fields"),
    [
        ("completions", {"prompt": [5] * CONTEXT}),
        ("completions", {"prompt": "a " * 5000}),
        ("completions", {"prompt": "a " * 50_000}),
        ("chat/completions", {"messages": chat_of(300)}),
        ("chat/completions", {"messages": chat_of(50_000)}),
        ("responses", {"input": "a " * 300}),
        ("embeddings", {"input": "a " * 300}),
    ],
)
def test_a_prompt_that_does_not_fit_is_refused(
    short: RunningServer, path: str, fields: dict[str, Any]
) -> None:
    reply = send(short, path, **fields)
    assert reply.status_code == 400
    error = reply.json()["error"]
    assert error["code"] == "context_length_exceeded"
    assert error["message"].startswith(
        "This model's maximum context length is 256 tokens. However,"
    )
    assert error["remedy"]


def test_where_no_length_was_asked_for_it_is_said(short: RunningServer) -> None:
    """Beforehand where there is little room, and in the log where it was not enough."""
    fields: Any = {"messages": chat_of(150), "ignore_eos": True, "request_id": "cut-1"}
    reply = send(short, "chat/completions", **fields)
    assert reply.status_code == 200
    usage, [choice] = reply.json()["usage"], reply.json()["choices"]
    assert choice["finish_reason"] == "length"
    assert usage["total_tokens"] == CONTEXT
    room = CONTEXT - usage["prompt_tokens"]
    assert reply.headers["x-headrace-warning"] == (
        f"the context of 256 tokens leaves room for {room} of an answer"
    )
    short.wait_for(lambda: "cut-1" in short.log)
    [line] = [line for line in short.log.splitlines() if "cut-1" in line]
    assert re.search(r"cut_by\W+context", line)


def test_an_ordinary_request_is_not_bothered(server: RunningServer) -> None:
    fields: Any = {"messages": chat_of(1), "stop": [" ", "a"], "request_id": "ordinary-1"}
    reply = send(server, "chat/completions", **fields)
    assert "x-headrace-warning" not in reply.headers
    fields = {"prompt": "a b c", "ignore_eos": True, "request_id": "ordinary-2"}
    assert "x-headrace-warning" not in send(server, "completions", **fields).headers
    server.wait_for(lambda: "ordinary-2" in server.log)
    lines = [line for line in server.log.splitlines() if "ordinary-" in line]
    assert len(lines) == 2
    assert not any("cut_by" in line for line in lines)


def test_the_usual_length_of_completions_is_no_demand(short: RunningServer) -> None:
    reply = send(short, "completions", prompt=[5] * 250, ignore_eos=True)
    assert reply.status_code == 200
    assert reply.json()["usage"]["completion_tokens"] == 6
    assert "room for 6" in reply.headers["x-headrace-warning"]
    assert "x-headrace-warning" not in send(short, "completions", prompt=[5] * 240).headers
