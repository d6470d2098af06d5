"""A connection to a replica: a request goes out, its answer's head is read, its body flows on.

What follows the head goes to the client as the bytes that came, chunk sizes included: llhttp
watches them only to know where the answer ends, and makes no objects of them. The head is given out
with the first byte of the body: until then the request can go to another replica. Knows HTTP
answers; no requests and no policies.
"""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Callable
from dataclasses import dataclass
from typing import cast

import httptools

MAX_HEAD_BYTES = 64 << 10
MAX_EARLY_BYTES = 1 << 20  # of a body that nobody takes yet
_END = b"\r\n\r\n"
# Of one connection, not of the answer. Transfer-Encoding stays, because the body's bytes do.
_HOP_BY_HOP = frozenset(
    {b"connection", b"keep-alive", b"proxy-connection", b"upgrade", b"proxy-authenticate"}
)


class Lost(Exception):
    """The connection can't be used any more, and the answer is not whole."""


class Broken(Lost):
    """What came is not an HTTP answer."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Head:
    status: int
    line: bytes  # the status line
    headers: tuple[tuple[bytes, bytes], ...]  # names in lower case; without those of the connection
    ends_with_connection: bool  # nothing else says where the body ends

    def get(self, name: bytes) -> bytes:
        return next((value for key, value in self.headers if key == name), b"")

    def written(self, more: tuple[tuple[bytes, bytes], ...] = ()) -> bytes:
        """For the client; `more` replaces headers of the same name."""
        replaced = {name for name, _ in more}
        kept = [(n, v) for n, v in self.headers if n not in replaced] if replaced else self.headers
        lines = [self.line, *(b"%b: %b" % each for each in (*kept, *more))]
        return b"\r\n".join(lines) + _END


def read_head(raw: bytes, has_body: bool) -> Head:
    """Of bytes that llhttp has accepted."""
    line, *rest = raw[: -len(_END)].split(b"\r\n")
    headers = []
    is_framed = not has_body
    for each in rest:
        name, colon, value = each.partition(b":")
        name, value = name.lower(), value.strip()
        if not colon or not name or name[:1] in b" \t":
            raise Broken("a header that spans lines")
        if name in (b"content-length", b"transfer-encoding"):
            is_framed = True
        if name not in _HOP_BY_HOP:
            headers.append((name, value))
    parts = line.split(b" ", 2)
    status = int(parts[1])
    reason = parts[2] if len(parts) > 2 else b""
    return Head(
        status=status,
        line=b"HTTP/1.1 %d %b" % (status, reason),
        headers=tuple(headers),
        ends_with_connection=not is_framed and status not in (204, 304),
    )


def no_delay(transport: asyncio.BaseTransport) -> None:
    """A token must not wait for the one before it to be acknowledged: 40 ms. asyncio does not see
    to it where a socket was made without naming its protocol."""
    sock = transport.get_extra_info("socket")
    if sock is not None and sock.family in (socket.AF_INET, socket.AF_INET6):
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)


class Upstream(asyncio.Protocol):
    """One request at a time."""

    def __init__(self, on_lost: Callable[[Upstream], None] = lambda _: None) -> None:
        self._on_lost = on_lost  # while it is not in use
        self._transport: asyncio.Transport | None = None
        self._parser: httptools.HttpResponseParser | None = None
        self._sink: Callable[[bytes], None] | None = None
        self._waiter: asyncio.Future[None] | None = None
        self._loop = asyncio.get_running_loop()
        self.is_open = False
        self.is_used = False  # it has answered before
        self.free_since_s = 0.0
        self._reset()

    def _reset(self) -> None:
        self._buffer = b""  # of the head
        self._early: list[bytes] = []  # of the body, before there is a sink
        self._early_bytes = 0
        self._messages = 0
        self._has_body = True
        self.head: Head | None = None
        self.has_bytes = False  # anything came
        self.is_whole = False
        self._keeps_alive = False
        self.failure: Lost | None = None
        self.last = b""  # what came last

    # -- what an exchange calls ------------------------------------------------------------------

    async def ask(self, request: bytes, *, has_body: bool = True) -> Head:
        """Sends a request; returns with the first byte of the answer's body, or its end. `has_body`
        is false for HEAD. Raises Lost."""
        assert self._transport is not None
        self._reset()
        self._has_body = has_body
        self._parser = httptools.HttpResponseParser(self)
        if not self.is_open:
            raise Lost("the connection was closed")
        self._transport.write(request)
        while not self._is_answered:
            await self._wait()
        assert self.head is not None
        return self.head

    @property
    def _is_answered(self) -> bool:
        is_there = self.is_whole or self._early_bytes > 0
        return self.head is not None and is_there and self.failure is None

    def flow(self, sink: Callable[[bytes], None]) -> None:
        """From now on the body goes there; what came before was taken."""
        assert not self._early
        self._sink = sink

    async def whole(self) -> None:
        """Until the answer's last byte. Raises Lost."""
        while not self.is_whole:
            if self._sink is None and self._early_bytes > MAX_EARLY_BYTES:
                raise Broken(f"an answer of more than {MAX_EARLY_BYTES} bytes that nobody takes")
            await self._wait()

    def take_early(self) -> bytes:
        """What has come of the raw body, before it flows anywhere."""
        early, self._early = self._early, []
        if self._early_bytes > MAX_EARLY_BYTES:
            self.resume_reading()
        return early[0] if len(early) == 1 else b"".join(early)

    def fail(self, error: Lost) -> None:
        """Whoever waits for an answer gets this instead."""
        if self.failure is None and not self.is_whole:
            self.failure = error
        self._wake()

    @property
    def can_be_used_again(self) -> bool:
        return self.is_open and self.is_whole and self._has_body and self._keeps_alive

    def rest(self, now_s: float) -> None:
        """It waits for its next request."""
        self._sink = None
        self._parser = None
        self.is_used = True
        self.free_since_s = now_s
        self.resume_reading()

    def abort(self) -> None:
        self._sink = None
        self.is_open = False
        if self._transport is not None:
            self._transport.abort()

    def pause_reading(self) -> None:
        if self._transport is not None and not self._transport.is_closing():
            self._transport.pause_reading()

    def resume_reading(self) -> None:
        if self._transport is not None and not self._transport.is_closing():
            self._transport.resume_reading()

    async def _wait(self) -> None:
        if self.failure is not None:
            raise self.failure
        self._waiter = self._loop.create_future()
        try:
            await self._waiter
        finally:
            self._waiter = None
        if self.failure is not None:
            raise self.failure

    def _wake(self) -> None:
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)

    # -- what asyncio calls ----------------------------------------------------------------------

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)
        self.is_open = True
        no_delay(transport)

    def data_received(self, data: bytes) -> None:
        sink, parser = self._sink, self._parser
        if parser is None:
            self.abort()  # nobody asked
            return
        try:
            if sink is None:
                self._receive_early(parser, data)
                return
            parser.feed_data(data)
        except (httptools.HttpParserError, Broken) as error:
            self._break(f"{error or type(error).__name__}")
            return
        if self._messages > 1 or self.failure is not None:
            self._break("bytes after the end of the answer")
            return
        sink(data)
        self.last = data
        if self.is_whole:
            self._wake()

    def _receive_early(self, parser: httptools.HttpResponseParser, data: bytes) -> None:
        self.has_bytes = True
        if self.head is None:
            data = self._receive_head(parser, data)
            if self.head is None:
                return
        elif data:
            parser.feed_data(data)
        if self._messages > 1 or (data and not self._has_body):
            raise Broken("bytes after the end of the answer")
        if data:
            self._early.append(data)
            self._early_bytes += len(data)
            self.last = data
            if self._early_bytes > MAX_EARLY_BYTES:
                self.pause_reading()
                self._wake()
        if self._is_answered:
            self._wake()

    def _receive_head(self, parser: httptools.HttpResponseParser, data: bytes) -> bytes:
        """Returns what came of the body."""
        self._buffer += data
        at = self._buffer.find(_END)
        if at < 0:
            if len(self._buffer) > MAX_HEAD_BYTES:
                raise Broken(f"headers of more than {MAX_HEAD_BYTES} bytes")
            if not b"HTTP/1.".startswith(self._buffer[:7]):
                raise Broken(f"it begins with {self._buffer[:20]!r}")
            return b""
        raw, rest = self._buffer[: at + len(_END)], self._buffer[at + len(_END) :]
        self._buffer = b""
        parser.feed_data(raw)
        status = parser.get_status_code()
        if 100 <= status < 200:
            self._messages = 0
            self.is_whole = False
            self._parser = httptools.HttpResponseParser(self)
            return self._receive_head(self._parser, rest) if rest else b""
        self.head = read_head(raw, self._has_body)
        if not self._has_body:
            self.is_whole = True
        elif rest:
            parser.feed_data(rest)
        return rest

    def _break(self, what: str) -> None:
        self.is_whole = False
        self.failure = Broken(what)
        self._wake()
        self.abort()

    def connection_lost(self, error: Exception | None) -> None:
        self.is_open = False
        if self._parser is None:
            self._on_lost(self)
            return
        if self.head is not None and self.head.ends_with_connection and error is None:
            self.is_whole = True
            self._wake()
            return
        self.fail(Lost(str(error) if error else "it closed the connection"))

    # -- what llhttp calls -----------------------------------------------------------------------

    def on_message_begin(self) -> None:
        self._messages += 1

    def on_message_complete(self) -> None:
        self.is_whole = True
        # Afterwards llhttp has forgotten it.
        self._keeps_alive = self._parser is not None and self._parser.should_keep_alive()
