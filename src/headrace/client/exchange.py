"""One connection over asyncio: a request goes out, and the bytes that come fill an `Answer`.

The time is taken when bytes arrive, before anything is parsed. What is parsed first is what lets a
client go on: the end of an answer. Knows no addresses and opens nothing.
"""

from __future__ import annotations

import asyncio
import time
from collections import deque
from collections.abc import Callable, Mapping
from typing import cast

import httptools

from headrace.client.answer import Answer, Failure, message_of

Clock = Callable[[], float]
_TURN_S = 0.0001  # of reading what arrived, before requests may go out
_LONGEST_S = 0.02  # that something waits to be read while more keeps coming

# Who reads it, when it arrived, and what it is; None: the connection has ended.
_Item = tuple[Callable[[bytes | None], None], float, bytes | None]


class Backlog:
    """What arrived and is not read yet, of all connections. Many streams get their token at the
    same moment: who parses one before looking at the next stamps the last one late. So everything
    that is there gets its time first. Then a connection whose answer may have ended is read: its
    client waits to send the next request. Everything else is read when no more bytes come, in short
    turns. What arrived on one connection is always read in its order."""

    def __init__(self) -> None:
        self._ended: deque[deque[_Item]] = deque()
        self._others: deque[deque[_Item]] = deque()  # one entry for each item
        self._is_due = False
        self._is_new = False  # something arrived since the last turn
        self._waits_since_s = 0.0  # the first of those that wait
        self.now_s = 0.0  # when what is being read arrived

    @property
    def is_empty(self) -> bool:
        return not self._is_due

    def add(self, arrived: deque[_Item], item: _Item) -> None:
        """`arrived` is what one connection has that is not read."""
        arrived.append(item)
        (self._ended if _may_end(item[2]) else self._others).append(arrived)
        self._is_new = True
        if not self._is_due:
            self._is_due = True
            self._waits_since_s = time.perf_counter()
            asyncio.get_running_loop().call_soon(self._turn)

    def _turn(self) -> None:
        began_s = time.perf_counter()
        if self._ended:  # and then their clients' next requests go out
            self._read(self._ended, began_s + _TURN_S)
        elif not self._is_new or began_s - self._waits_since_s > _LONGEST_S:
            self._read(self._others, began_s + _TURN_S)
            self._waits_since_s = began_s
        self._is_new = False
        self._is_due = bool(self._ended or self._others)
        if self._is_due:
            asyncio.get_running_loop().call_soon(self._turn)

    def _read(self, waiting: deque[deque[_Item]], until_s: float) -> None:
        while waiting:
            arrived = waiting.popleft()
            while arrived:  # else it was read with others of its connection
                read, self.now_s, data = arrived.popleft()
                read(data)
            if time.perf_counter() > until_s:
                return


def _may_end(data: bytes | None) -> bool:
    """Whether these bytes may be an answer's last: where that is wrong, only the order changes."""
    if data is None or b"[DONE]" in data or data.endswith(b"\r\n0\r\n\r\n"):
        return True
    return data.startswith(b"HTTP/") and data[9:10] != b"2"


class Exchange(asyncio.Protocol):
    """One connection: bytes to an answer. One request at a time."""

    def __init__(self, clock: Clock = time.perf_counter, backlog: Backlog | None = None) -> None:
        self._clock = clock
        self._backlog = backlog or Backlog()
        self._arrived: deque[_Item] = deque()
        self._transport: asyncio.Transport | None = None
        self._parser = httptools.HttpResponseParser(self)
        self._answer: Answer | None = None
        self._waiter: asyncio.Future[None] | None = None
        self._is_stream = False
        self._body: list[bytes] = []
        self._error: Exception | None = None
        self.status = 0
        self.headers: dict[str, str] = {}
        self.is_free = True  # may be asked (again)
        self.is_open = False

    # What asyncio calls.

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)
        self.is_open = True

    def data_received(self, data: bytes) -> None:
        self._backlog.add(self._arrived, (self._read, self._clock(), data))

    def connection_lost(self, error: Exception | None) -> None:
        self.is_open = self.is_free = False
        self._error = error
        self._backlog.add(self._arrived, (self._read, self._clock(), None))

    def _read(self, data: bytes | None) -> None:
        if data is None:
            self._lost()
            return
        try:
            self._parser.feed_data(data)
        except httptools.HttpParserError as error:
            self._fail(Failure.NOT_HTTP, f"{error}: {data[:80]!r}")

    def _lost(self) -> None:
        answer = self._answer
        if answer is None:
            return
        if self._is_stream and answer.is_done:
            self._finish()
        else:
            said = str(self._error) if self._error else "the endpoint closed it"
            self._fail(Failure.RESET, said)

    # What the parser calls.

    def on_message_begin(self) -> None:
        self.headers, self._body, self._is_stream = {}, [], False

    def on_header(self, name: bytes, value: bytes) -> None:
        self.headers[name.lower().decode("latin-1")] = value.decode("latin-1")

    def on_headers_complete(self) -> None:
        status = self._parser.get_status_code()
        kind = self.headers.get("content-type", "")
        self._is_stream = 200 <= status < 300 and kind.startswith("text/event-stream")

    def on_body(self, body: bytes) -> None:
        if not self._is_stream or self._answer is None:
            self._body.append(body)
            return
        self._answer.feed(body, self._backlog.now_s)
        if self._answer.failure is not None or self._answer.is_done:
            self._wake()

    def on_message_complete(self) -> None:
        answer = self._answer
        if answer is not None:
            if not self._is_stream:
                fail_by_status(answer, self._parser.get_status_code(), self.headers, self.body)
            self._finish()
        self.is_free = self.is_open and self._parser.should_keep_alive()
        self._parser = httptools.HttpResponseParser(self)

    # What a caller calls.

    async def ask(self, request: bytes, answer: Answer, timeout_s: float) -> None:
        """Until the answer is whole, or has failed. Never raises for what the endpoint does."""
        assert self._transport is not None
        loop = asyncio.get_running_loop()
        self._answer, self.is_free = answer, False
        self._waiter = loop.create_future()
        timer = loop.call_later(timeout_s, self._expire, timeout_s)
        try:
            self._transport.write(request)
            await self._waiter
        finally:
            timer.cancel()
            self._answer = self._waiter = None
            if not self.is_free:
                self.close()

    @property
    def body(self) -> bytes:
        """Of the last answer, if it was no stream."""
        return b"".join(self._body)

    def close(self) -> None:
        self.is_free = self.is_open = False
        if self._transport is not None:
            self._transport.close()

    def _expire(self, timeout_s: float) -> None:
        """What is there already is read first."""
        detail = f"no whole answer within {timeout_s:g} s"
        self._backlog.add(
            self._arrived,
            (lambda _: self._fail(Failure.TIMEOUT, detail), self._clock(), None),
        )

    def _fail(self, failure: Failure, detail: str) -> None:
        self.is_free = False
        if self._answer is not None:
            self._answer.fail(failure, detail)
        self._wake()

    def _finish(self) -> None:
        if self._answer is not None:
            self.status = self._parser.get_status_code()
            if self._is_stream:
                self._answer.end(self._backlog.now_s)
        self._wake()

    def _wake(self) -> None:
        if self._waiter is not None and not self._waiter.done():
            assert self._answer is not None
            self._answer.ended_s = self._backlog.now_s
            self._waiter.set_result(None)


def fail_by_status(answer: Answer, status: int, headers: Mapping[str, str], body: bytes) -> None:
    """What an answer that is no stream means."""
    if status == 429:
        answer.fail(Failure.RATE_LIMITED, message_of(body))
    elif 300 <= status < 400:
        answer.fail(Failure.REDIRECT, f"{status} to {headers.get('location', 'somewhere')}")
    elif 200 <= status < 300:
        kind = headers.get("content-type", "no content type")
        answer.fail(Failure.NO_STREAM, f"{status} with {kind}: {message_of(body)}")
    else:
        answer.fail(Failure.HTTP, f"{status}: {message_of(body)}")
