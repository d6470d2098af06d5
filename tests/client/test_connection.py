"""A connection's protocol without a socket: bytes and times are the test's."""

from __future__ import annotations

import asyncio
from typing import Any, cast

import pytest

from headrace.client.answer import Answer, Failure
from headrace.client.connection import parse_address, request_bytes
from headrace.client.exchange import Backlog, Exchange
from headrace.core.errors import ConfigError

HEAD = b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nTransfer-Encoding: chunked\r\n\r\n"
TOKEN = b'data: {"choices":[{"delta":{"content":"a"}}]}\n\n'
LAST = b'data: {"choices":[{"delta":{},"finish_reason":"stop"}]}\n\ndata: [DONE]\n\n'


def chunked(*parts: bytes) -> bytes:
    return b"".join(b"%x\r\n%s\r\n" % (len(part), part) for part in parts)


class Wire:
    """A transport that plays back what an endpoint sends: (when, bytes); None closes."""

    def __init__(self, script: list[tuple[float, bytes | None]]) -> None:
        self.now_s = 0.0
        self.script = script
        self.written = b""
        self.is_closed = False
        self.exchange = Exchange(lambda: self.now_s)
        self.exchange.connection_made(cast(Any, self))

    def write(self, data: bytes) -> None:
        self.written += data
        asyncio.get_running_loop().call_soon(self.play)

    def play(self) -> None:
        for self.now_s, data in self.script:  # noqa: B020
            if data is None:
                self.exchange.connection_lost(None)
            else:
                self.exchange.data_received(data)

    def close(self) -> None:
        self.is_closed = True


def asked(*script: tuple[float, bytes | None], timeout_s: float = 60.0) -> tuple[Answer, Wire]:
    wire, answer = Wire(list(script)), Answer()

    async def work() -> None:
        await wire.exchange.ask(b"request", answer, timeout_s)

    asyncio.run(work())
    return answer, wire


def test_times_are_those_of_the_bytes() -> None:
    answer, wire = asked(
        (1.0, HEAD), (2.0, chunked(TOKEN)), (2.5, chunked(TOKEN, TOKEN)),
        (3.0, chunked(LAST) + b"0\r\n\r\n"),
    )  # fmt: skip
    assert answer.times_s == [2.0, 2.5, 2.5]
    assert answer.failure is None
    assert wire.exchange.is_free
    assert not wire.is_closed


def test_an_endpoint_that_keeps_the_connection_after_done_stalls_nobody() -> None:
    answer, wire = asked((1.0, HEAD + chunked(TOKEN)), (2.0, chunked(LAST)))
    assert (answer.failure, answer.times_s) == (None, [1.0])
    assert wire.is_closed  # the body never ended: it is not used again


@pytest.mark.parametrize(
    ("script", "failure"),
    [
        ([(1.0, HEAD + chunked(TOKEN)), (2.0, None)], Failure.RESET),
        ([(1.0, None)], Failure.RESET),
        ([(1.0, b"SSH-2.0-OpenSSH\r\n")], Failure.NOT_HTTP),
        ([(1.0, HEAD + chunked(TOKEN) + b"0\r\n\r\n")], Failure.CUT),
        ([(1.0, HEAD + chunked(b'data: {"error": {"message": "no"}}\n\n'))], Failure.IN_STREAM),
    ],
)
def test_what_fails_is_closed(script: list[tuple[float, bytes | None]], failure: Failure) -> None:
    answer, wire = asked(*script)
    assert answer.failure is failure
    assert not wire.exchange.is_free or failure is Failure.CUT


@pytest.mark.parametrize(
    ("status", "head", "body", "failure", "detail"),
    [
        ("429 Too Many", "", b'{"error": {"message": "slow down"}}', Failure.RATE_LIMITED, "slow"),
        ("503 Busy", "", b"<html>busy</html>", Failure.HTTP, "503: <html>busy</html>"),
        ("401 No", "", b'{"detail": "no key"}', Failure.HTTP, "401: no key"),
        ("302 Found", "Location: http://other/\r\n", b"", Failure.REDIRECT, "302 to http://other/"),
        (
            "200 OK",
            "Content-Type: text/html\r\n",
            b"<p>hi",
            Failure.NO_STREAM,
            "200 with text/html",
        ),
    ],
)
def test_answers_that_are_no_stream(
    status: str, head: str, body: bytes, failure: Failure, detail: str
) -> None:
    reply = f"HTTP/1.1 {status}\r\n{head}Content-Length: {len(body)}\r\n\r\n".encode() + body
    answer, wire = asked((1.0, reply))
    assert answer.failure is failure
    assert answer.detail.startswith(detail)
    assert wire.exchange.is_free  # it was read to its end


def test_any_status_of_success_may_stream() -> None:
    answer, _ = asked((1.0, HEAD.replace(b"200 OK", b"201 Created") + chunked(TOKEN, LAST)))
    assert answer.failure is None


def test_an_answer_that_never_ends_is_a_timeout_and_what_came_is_kept() -> None:
    answer, wire = asked((1.0, HEAD + chunked(TOKEN)), timeout_s=0.0)
    assert (answer.failure, answer.times_s) == (Failure.TIMEOUT, [1.0])
    assert wire.is_closed


@pytest.mark.parametrize(
    ("url", "expected"),
    [
        (":8000", "http://127.0.0.1:8000"),
        ("host:1/v1/", "http://host:1"),
        ("https://api.example/base/v1", "https://api.example:443/base"),
        ("http://[::1]:8000", "http://[::1]:8000"),
    ],
)
def test_addresses(url: str, expected: str) -> None:
    assert parse_address(url).url == expected


@pytest.mark.parametrize("url", ["ftp://x", "http://", "http://x:port", "http://me:pw@host"])
def test_what_is_no_address(url: str) -> None:
    with pytest.raises(ConfigError):
        parse_address(url)


def test_a_request_has_its_key_and_length() -> None:
    made = request_bytes(parse_address("host:1/base"), "/v1/x", b"{}", "secret")
    assert made.startswith(b"POST /base/v1/x HTTP/1.1\r\nHost: host:1\r\n")
    assert b"\r\nAuthorization: Bearer secret\r\n" in made
    assert made.endswith(b"\r\nContent-Length: 2\r\n\r\n{}")


def test_all_that_is_there_gets_its_time_before_any_of_it_is_read() -> None:
    """Three streams get a token in the same moment, and reading one takes 5 ms: who reads each as
    it comes has the third 10 ms late."""

    class Slow(Answer):
        def feed(self, data: bytes, at_s: float) -> None:
            super().feed(data, at_s)
            now[0] += 0.005

    async def work() -> list[Answer]:
        exchanges = [Exchange(lambda: now[0], backlog) for _ in range(3)]
        answers = [Slow() for _ in exchanges]
        asking = []
        for exchange, answer in zip(exchanges, answers, strict=True):
            exchange.connection_made(cast(Any, Wire([])))
            asking.append(asyncio.create_task(exchange.ask(b"request", answer, 60.0)))
        await asyncio.sleep(0)
        for exchange in exchanges:
            exchange.data_received(HEAD + chunked(TOKEN, LAST) + b"0\r\n\r\n")
        await asyncio.gather(*asking)
        return list(answers)

    now, backlog = [1.0], Backlog()
    assert [answer.times_s for answer in asyncio.run(work())] == [[1.0]] * 3


def test_an_answer_that_ends_is_read_before_others() -> None:
    """Its client sends the next request meanwhile. Bytes of one stream keep their order, and times
    are those of the bytes, whenever they are read."""

    class Logged(Answer):
        def feed(self, data: bytes, at_s: float) -> None:
            super().feed(data, at_s)
            order.append((names[id(self)], at_s))

    async def work() -> list[Answer]:
        exchanges = [Exchange(lambda: now[0], backlog) for _ in range(2)]
        answers = [Logged() for _ in exchanges]
        names.update({id(answer): name for answer, name in zip(answers, "ab", strict=True)})
        asking = []
        for exchange, answer in zip(exchanges, answers, strict=True):
            exchange.connection_made(cast(Any, Wire([])))
            asking.append(asyncio.create_task(exchange.ask(b"request", answer, 60.0)))
        await asyncio.sleep(0)
        first, second = exchanges
        for at_s, exchange, data in (
            (1.0, first, HEAD + chunked(TOKEN)),
            (2.0, second, HEAD + chunked(TOKEN)),
            (3.0, second, chunked(LAST) + b"0\r\n\r\n"),
        ):
            now[0] = at_s
            exchange.data_received(data)
        await asking[1]
        assert answers[1].ended_s == 3.0
        now[0] = 4.0
        first.data_received(chunked(LAST) + b"0\r\n\r\n")
        await asking[0]
        return list(answers)

    now, backlog, names = [0.0], Backlog(), dict[int, str]()
    order: list[tuple[str, float]] = []
    answers = asyncio.run(work())
    assert order == [("b", 2.0), ("b", 3.0), ("a", 1.0), ("a", 4.0)]
    assert [answer.times_s for answer in answers] == [[1.0], [2.0]]
    assert backlog.is_empty
