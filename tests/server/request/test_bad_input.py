"""What clients get wrong in a body: each gets its 4xx with the field's name, and the next works."""

from __future__ import annotations

import gzip
import json
import re
import threading
from collections.abc import Iterator
from typing import Any

import httpx
import pytest
from tests.server.conftest import RunningServer
from tests.server.raw_client import CHAT, GOOD, Answer, RawClient, check_good, post

COMPLETIONS = "/v1/completions"
MESSAGES: list[Any] = [{"role": "user", "content": "Hi"}]


@pytest.fixture(autouse=True)
def _still_good(server: RunningServer) -> Iterator[None]:
    yield
    check_good(server.port)
    assert "Traceback" not in server.log


def send(server: RunningServer, body: bytes | str, *headers: str, path: str = CHAT) -> Answer:
    with RawClient(server.port) as client:
        return client.send(post(path, body, *headers)).answer()


def with_fields(**fields: object) -> str:
    return json.dumps({"messages": MESSAGES, "max_tokens": 1, **fields})


def with_raw(name: str, value: str) -> str:
    """A value that json.dumps would not write."""
    return f'{{"messages": {json.dumps(MESSAGES)}, "max_tokens": 1, "{name}": {value}}}'


@pytest.mark.parametrize(
    ("body", "says"),
    [
        (b"", "empty"),
        (b" ", "not JSON"),
        (b"{", "not JSON"),
        (b'{"messages": [}', "not JSON"),
        (b"{'messages': []}", "not JSON"),
        (b'{"messages": []} x', "not JSON"),
        (b"null", "null"),
        (b"[]", "a list"),
        (b'"text"', "text"),
        (b"7", "a number"),
        (b"NaN", "not JSON"),
        (b"\xff\xfe{\x00}\x00", "not"),  # UTF-16
        (b"\x1f\x8b\x08\x00", "not"),
        (b'{"messages": "\x00"}', "not JSON"),  # JSON wants it escaped
        (b'{"messages": "\xed\xa0\x80"}', "not UTF-8"),
        (b'{"messages": "\\ud800 and on"}', "not JSON"),
        (b'{"messages": "\\udc00\\ud800"}', "not JSON"),
        (b"[" * 100_000, "deep"),
        (b'{"a":' * 100_000, "deep"),
        (b'{"messages": ' + b"[" * 200 + b"]" * 200 + b"}", "deep"),
    ],
)
def test_what_is_no_object_in_json(server: RunningServer, body: bytes, says: str) -> None:
    answer = send(server, body)
    assert answer.status == 400
    assert answer.error["type"] == "invalid_request_error"
    assert says in answer.error["message"]
    assert answer.error["remedy"]


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"messages": "Hi"}, "messages"),
        ({"messages": [1]}, "messages"),
        ({"messages": None}, "messages"),
        ({"messages": []}, "messages"),
        ({"max_tokens": "many"}, "max_tokens"),
        ({"max_tokens": 1.5}, "max_tokens"),
        ({"max_tokens": True}, "max_tokens"),
        ({"max_tokens": 0}, "max_tokens"),
        ({"max_tokens": -1}, "max_tokens"),
        ({"temperature": -0.1}, "temperature"),
        ({"temperature": "hot"}, "temperature"),
        ({"top_p": 0}, "top_p"),
        ({"top_k": -2}, "top_k"),
        ({"n": 0}, "n"),
        ({"n": 1000}, "n"),
        ({"seed": -(2**64)}, None),
        ({"stop": 7}, "stop"),
        ({"stop": [""]}, "stop"),
        ({"stop": ["x"] * 100}, "stop"),
        ({"logit_bias": {"a": 1}}, "logit_bias"),
        ({"logit_bias": {"1": 1000}}, "logit_bias"),
        ({"logit_bias": {"999999": 1}}, "logit_bias"),
        ({"logprobs": 3}, "logprobs"),
        ({"logprobs": True, "top_logprobs": 1000}, None),
        ({"stream": "yes"}, "stream"),
        ({"stop_token_ids": [-1]}, "stop_token_ids"),
        ({"timeout_s": -1}, "timeout_s"),
        ({"timeout_s": 0}, "timeout_s"),
        ({"priority": "high"}, "priority"),
        ({"cache_salt": 5}, "cache_salt"),
        ({"speculate": "sufix"}, "speculate"),
        ({"speculate": "draft:x"}, "speculate"),
        ({"speculate": 3}, "speculate"),
        ({"stream_options": {"include_usage": 1}}, "stream_options.include_usage"),
    ],
)
def test_wrong_types_and_values_name_the_field(
    server: RunningServer, fields: dict[str, Any], param: str | None
) -> None:
    answer = send(server, with_fields(**fields))
    assert answer.status == 400, answer.body
    if param is not None:
        assert (answer.error["param"] or "").startswith(param)


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("temperature", "1e400"),
        ("temperature", "NaN"),
        ("temperature", "-Infinity"),
        ("max_tokens", str(10**400)),
        ("max_tokens", str(10**30)),
        ("priority", str(-(10**30))),
        ("priority", "1" + "0" * 5000),
        ("seed", str(2**64)),
        ("logit_bias", f'{{"1": {10**400}}}'),
        ("stop_token_ids", f"[{2**64}]"),
        ("chat_template_kwargs", f'{{"a": {{"b": [{10**50}]}}}}'),
    ],
)
def test_numbers_that_nothing_can_hold(server: RunningServer, name: str, value: str) -> None:
    answer = send(server, with_raw(name, value))
    assert answer.status == 400, answer.body
    assert answer.error["message"]


@pytest.mark.parametrize(
    ("fields", "param", "hint"),
    [
        ({"temprature": 1}, "temprature", "Did you mean temperature?"),
        ({"maxTokens": 1}, "maxTokens", "Did you mean max_tokens?"),
        ({"zzz": 1}, "zzz", "Leave it out."),
        (
            {"stream_options": {"include_usag": True}},
            "stream_options.include_usag",
            "Did you mean include_usage?",
        ),
        ({"x" * 5000: 1}, "x" * 200, "Leave it out."),
    ],
)
def test_unknown_fields_are_refused_with_a_guess_or_ignored_with_a_warning(
    server: RunningServer, strict: RunningServer, fields: dict[str, Any], param: str, hint: str
) -> None:
    answer = send(strict, with_fields(**fields))
    assert answer.status == 400
    assert answer.error["param"] == param
    assert answer.error["remedy"] == hint
    answer = send(server, with_fields(stream=True, **fields))
    assert answer.status == 200
    warning = answer.headers["x-headrace-warning"]
    assert warning.startswith(f"{param[:100]} is an unknown field and was ignored")
    assert len(warning) < 300
    assert (hint[0].lower() + hint[1:] in warning) == ("mean" in hint)


def test_unknown_fields_are_in_the_log_line(server: RunningServer) -> None:
    odd = "x\r\ny: secret"
    answer = send(server, with_fields(zzyzx=1, **{odd: 1}), "x-request-id: unknown-1")
    assert answer.status == 200
    assert answer.headers["x-headrace-warning"].count("is an unknown field") == 2
    server.wait_for(lambda: "unknown-1" in server.log)
    [line] = [line for line in server.log.splitlines() if "unknown-1" in line]
    assert re.search(r"ignored_fields\W+2\b", line)
    assert "zzyzx" not in line  # names are content: only --log-content shows them
    assert "secret" not in line


def test_openais_fields_that_do_nothing_are_ignored_with_a_warning(
    server: RunningServer, strict: RunningServer
) -> None:
    for each in (server, strict):
        answer = send(each, with_fields(store=True, metadata={"a": "b"}))
        assert answer.status == 200
        warning = answer.headers["x-headrace-warning"]
        assert "store" in warning
        assert "metadata" in warning
        answer = send(each, with_fields(store=False, metadata=None, service_tier="auto"))
        assert answer.status == 200
        assert "x-headrace-warning" not in answer.headers


@pytest.mark.parametrize("encoding", ["gzip", "br", "deflate", "x, y"])
def test_a_compressed_body_is_refused(server: RunningServer, encoding: str) -> None:
    answer = send(server, gzip.compress(GOOD.encode()), f"content-encoding: {encoding}")
    assert answer.status == 415
    assert "not compressed" in answer.error["remedy"]


@pytest.mark.parametrize(
    "body",
    [
        b"\xef\xbb\xbf" + GOOD.encode(),  # a byte order mark
        GOOD.replace("{", '{"max_tokens": 5, ', 1).encode(),  # twice: the last one counts
        with_fields(messages=[{"role": "user", "content": "a\x00b\x07\x1b[31m\u202e\ufeff"}]),
        with_fields(messages=[{"role": "user", "content": "\U0001f600\ud83d\ude00"}]),
        with_fields(messages=[{"role": "user", "content": "<|im_start|>system\n<|im_end|>"}]),
        with_fields(messages=[{"role": "user", "content": ""}]),
        with_fields(temperature=None, stop=None, seed=None, logit_bias=None),
        with_fields(seed=-1),
        with_fields(temperature=1e300),
    ],
)
def test_odd_but_fine(server: RunningServer, body: bytes | str) -> None:
    answer = send(server, body)
    assert answer.status == 200, answer.body
    assert json.loads(answer.body)["usage"]["completion_tokens"] == 1


@pytest.mark.parametrize("name", ["gpt-4o", "", "x" * 10_000, "\x00\n", "../../etc/passwd"])
def test_a_wrong_model_is_404_and_says_what_is_served(server: RunningServer, name: str) -> None:
    answer = send(server, with_fields(model=name))
    assert answer.status == 404
    assert answer.error["code"] == "model_not_found"
    assert answer.error["param"] == "model"
    assert "'smollm2'" in answer.error["message"]
    assert len(answer.body) < 2000


def test_a_million_tokens_are_refused_while_others_are_served(server: RunningServer) -> None:
    """With both numbers, before they are tokenized: that would take seconds."""
    text = "word " * 1_000_000
    healthy: list[int] = []
    asked = threading.Event()

    def look() -> None:
        with httpx.Client(base_url=server.base_url, timeout=60) as client:
            while not asked.is_set():
                healthy.append(client.get("/health").status_code)

    looking = threading.Thread(target=look)
    looking.start()
    try:
        for path, fields in (
            (CHAT, {"messages": [{"role": "user", "content": text}]}),
            (CHAT, {"messages": [{"role": "user", "content": [{"type": "text", "text": text}]}]}),
            (COMPLETIONS, {"prompt": text}),
            (COMPLETIONS, {"prompt": [5] * 1_000_000}),
            ("/tokenize", {"prompt": text}),
        ):
            answer = send(server, json.dumps(fields), path=path)
            assert answer.status == 400, answer.body[:500]
            assert answer.error["code"] == "context_length_exceeded"
            assert "8192" in answer.error["message"]
            numbers = [int(word) for word in answer.error["message"].split() if word.isdigit()]
            assert max(numbers) >= 1_000_000
    finally:
        asked.set()
        looking.join()
    assert set(healthy) == {200}


def test_a_long_prompt_that_must_be_tokenized_is_refused_too(server: RunningServer) -> None:
    """Short of the bound on characters, and still too long."""
    text = "lorem ipsum " * 30_000
    answer = send(server, with_fields(messages=[{"role": "user", "content": text}]))
    assert answer.status == 400
    assert answer.error["code"] == "context_length_exceeded"


@pytest.mark.parametrize(
    ("sent", "kept"),
    [("my-id.1:2", True), ("a" * 128, True), ("a" * 129, False), ("a b", False), ("ü", False)],
)
def test_a_request_id_is_kept_if_it_is_sane(server: RunningServer, sent: str, kept: bool) -> None:
    for path in ("/health", "/nowhere"):
        with RawClient(server.port) as client:
            client.send(f"GET {path} HTTP/1.1\r\nhost: localhost\r\n".encode())
            answer = client.send(f"x-request-id: {sent}\r\n\r\n".encode("latin-1")).answer()
        assert (answer.headers["x-request-id"] == sent) == kept
        assert answer.headers["x-headrace-fingerprint"]
