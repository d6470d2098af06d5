"""A client's connection: requests are read, one after the other, and answers are written.

A request is passed on when reading.py has all of it: it may have to be sent twice. Knows the order
of requests and answers on a connection; router.py knows what to do with one.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Protocol, cast

import httptools
import msgspec

from headrace.core.errors import (
    AuthenticationError,
    ClientTimeoutError,
    HeadraceError,
    RetryLaterError,
    UnavailableError,
)
from headrace.router.reading import RequestReader
from headrace.router.request import Request
from headrace.router.settings import RouterSettings
from headrace.router.upstream import Head, Upstream, no_delay
from headrace.server.edge.half_closed import PROBE, HalfClosed
from headrace.server.request.error_payload import error_payload, retry_after

KEEP_ALIVE_S = 65.0
SWEEP_S = 0.5
MAX_PIPELINED = 16
_CLOSE = ((b"connection", b"close"),)
_REASONS = {
    **{200: b"OK", 400: b"Bad Request", 401: b"Unauthorized", 403: b"Forbidden"},
    **{404: b"Not Found", 405: b"Method Not Allowed", 408: b"Request Timeout", 409: b"Conflict"},
    **{413: b"Content Too Large", 429: b"Too Many Requests", 500: b"Internal Server Error"},
    **{431: b"Request Header Fields Too Large", 502: b"Bad Gateway", 503: b"Service Unavailable"},
    **{504: b"Gateway Timeout", 505: b"HTTP Version Not Supported"},
}

log = logging.getLogger(__name__)


class Handler(Protocol):
    def handle(self, client: ClientConnection, request: Request) -> asyncio.Task[None] | None:
        """Answers at once, or returns what will. Never raises."""
        ...


@dataclass(slots=True, kw_only=True)
class Edge:
    """What all connections share."""

    settings: RouterSettings
    handler: Handler
    connections: set[ClientConnection] = field(default_factory=set)
    bodies_bytes: int = 0  # of requests that have not begun to be answered
    is_closing: bool = False

    def sweep(self, now_s: float) -> None:
        """Closes those that are late. Called every SWEEP_S, instead of a timer for each."""
        for connection in [c for c in self.connections if c.deadline_s <= now_s]:
            connection.expire()


class ClientConnection(asyncio.Protocol):
    def __init__(self, edge: Edge) -> None:
        self._edge = edge
        self._transport: asyncio.Transport | None = None
        self._queue: deque[Request] = deque()  # pipelined
        self._running: Request | None = None
        self._task: asyncio.Task[None] | None = None
        self._upstream: Upstream | None = None  # whose answer flows to this client
        self._half_closed: HalfClosed | None = None
        self._is_paused = False  # the client does not read
        self.is_deaf = False  # nothing more is read
        self.has_begun = False  # an answer's first byte was written
        self._closes = False  # after the answer that is being written
        self.deadline_s = 0.0
        self.host = ""
        self.reply_headers: tuple[tuple[bytes, bytes], ...] = ()  # with the running one's answer
        self.on_end: Callable[[], None] | None = None  # when the running one is over
        self.write: Callable[[bytes], None] = lambda data: None
        self._reader = RequestReader(edge, self)

    # -- what asyncio calls ----------------------------------------------------------------------

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)
        self.write = self._transport.write
        no_delay(transport)
        address = transport.get_extra_info("peername")
        self.host = str(address[0]) if isinstance(address, tuple) else ""
        edge = self._edge
        self.deadline_s = time.monotonic() + edge.settings.client_timeout_s
        edge.connections.add(self)
        if len(edge.connections) > edge.settings.max_connections:
            self.reject(
                UnavailableError(
                    f"The router has {edge.settings.max_connections} connections, its limit.",
                    "Try again shortly, or start it with a higher --max-connections.",
                    retry_after_s=1.0,
                )
            )

    def data_received(self, data: bytes) -> None:
        if not self.is_deaf:
            self._reader.feed(data)

    def eof_received(self) -> bool:
        """The client has closed its sending side, and may still wait for its answer."""
        if self._running is None or self._transport is None:
            return False
        self.is_deaf = True
        if self._half_closed is None:
            self._half_closed = HalfClosed(
                self._transport.get_extra_info("socket"), self._transport.abort
            )
            if not self.has_begun:
                self.write(PROBE)
        return True

    def connection_lost(self, error: Exception | None) -> None:
        self._edge.connections.discard(self)
        self.is_deaf = True
        self.write = lambda data: None
        if self._half_closed is not None:
            self._half_closed.stop()
        if self._upstream is not None:
            self._upstream.abort()  # its replica stops computing
        if self._task is not None:
            self._task.cancel()
        self._reader.forget_body()
        for request in self._queue:
            self._edge.bodies_bytes -= len(request.body)
        self._queue.clear()
        if self._running is not None and self._task is None:
            self._over()

    def pause_writing(self) -> None:
        self._is_paused = True
        if self._upstream is not None:
            self._upstream.pause_reading()

    def resume_writing(self) -> None:
        self._is_paused = False
        if self._upstream is not None:
            self._upstream.resume_reading()

    # -- requests, one after the other (reading.Sender) ------------------------------------------

    @property
    def is_answering(self) -> bool:
        return self._running is not None

    @property
    def is_busy(self) -> bool:
        return self._running is not None or bool(self._queue)

    def accept(self, request: Request) -> None:
        if not self.is_busy:
            self._start(request)
            return
        self._queue.append(request)
        if len(self._queue) > MAX_PIPELINED:
            raise httptools.HttpParserError(f"more than {MAX_PIPELINED} pipelined requests")

    def _start(self, request: Request) -> None:
        self._running = request
        self.has_begun = False
        self._held_bytes = len(request.body)
        self._closes = not request.keep_alive or self._edge.is_closing
        self.reply_headers = ()
        self.deadline_s = float("inf")  # the exchange has its own
        self._task = self._edge.handler.handle(self, request)
        if self._task is not None:
            self._task.add_done_callback(self._task_done)
        elif self._running is not None:
            self._over()

    def _task_done(self, task: asyncio.Task[None]) -> None:
        self._task = None
        if not task.cancelled() and (error := task.exception()) is not None:
            log.error("an exchange failed", exc_info=error, extra={"event": "fault"})
            if self.has_begun:
                self.cut(b"")
            else:
                self.refuse(HeadraceError("An unexpected error in the router.", "See its log."))
        self._over()

    def _over(self) -> None:
        """The running request has its answer, or nobody waits for one."""
        self._release_body()
        self._running = self._upstream = None
        if (on_end := self.on_end) is not None:
            self.on_end = None
            on_end()
        transport = self._transport
        if transport is None or transport.is_closing():
            return
        if self._closes or (self._edge.is_closing and not self._queue):
            transport.close()
        elif self._queue:
            # Not from here: a long pipeline would be a deep stack.
            asyncio.get_running_loop().call_soon(self._start_next)
        elif self._half_closed is not None:
            transport.close()
        else:
            wait_s = (
                self._edge.settings.client_timeout_s if self._reader.in_message else KEEP_ALIVE_S
            )
            self.deadline_s = time.monotonic() + wait_s

    def _start_next(self) -> None:
        if self._queue and self._running is None:
            self._start(self._queue.popleft())

    def _release_body(self) -> None:
        self._edge.bodies_bytes -= self._held_bytes
        self._held_bytes = 0

    _held_bytes = 0

    # -- answers (exchange.Client) ---------------------------------------------------------------

    def begin(self, head: Head, early: bytes, upstream: Upstream) -> Callable[[bytes], None]:
        self.has_begun = True
        self._upstream = upstream
        self._release_body()
        if head.ends_with_connection:
            self._closes = True
        self.write(head.written(self._more_headers(head)) + early)
        if self._is_paused:
            upstream.pause_reading()
        return self.write

    def answer(self, head: Head, body: bytes) -> None:
        if head.ends_with_connection:
            self._closes = True
        self.write(head.written(self._more_headers(head)) + body)

    def refuse(self, error: HeadraceError) -> None:
        more = []
        if isinstance(error, RetryLaterError):
            more.append((b"retry-after", retry_after(error).encode()))
        if isinstance(error, AuthenticationError):
            more.append((b"www-authenticate", b"Bearer"))
        body = msgspec.json.encode(error_payload(error))
        self.reply(error.status, b"application/json", body, tuple(more))

    def reply(
        self,
        status: int,
        content_type: bytes,
        body: bytes,
        more: tuple[tuple[bytes, bytes], ...] = (),
    ) -> None:
        headers = (
            (b"content-type", content_type),
            (b"content-length", b"%d" % len(body)),
            *more,
        )
        head = Head(
            status=status,
            line=b"HTTP/1.1 %d %b" % (status, _REASONS.get(status, b"Error")),
            headers=headers,
            ends_with_connection=False,
        )
        is_head = self._running is not None and self._running.method == b"HEAD"
        self.write(head.written(self._more_headers(head)) + (b"" if is_head else body))

    def cut(self, end: bytes) -> None:
        """After a proper end the connection stays: the client may send its next request there."""
        if end:
            self.write(end)
            return
        self._closes = True
        if self._transport is not None:
            self._transport.close()

    def _more_headers(self, head: Head) -> tuple[tuple[bytes, bytes], ...]:
        more = self.reply_headers
        if self._running is not None and not head.get(b"x-request-id"):
            more = (*more, (b"x-request-id", self._running.request_id.encode("latin-1")))
        return (*more, *_CLOSE) if self._closes else more

    def close(self) -> None:
        if self._transport is not None:
            self._transport.abort()

    def close_if_idle(self) -> None:
        """Between requests; the others close after their answer."""
        self._closes = True
        if self._running is None and not self._reader.in_message and self._transport is not None:
            self._transport.close()

    # -- what is no request ----------------------------------------------------------------------

    def expire(self) -> None:
        """Its time is over."""
        if self._running is None and self._reader.in_message:
            limit_s = self._edge.settings.client_timeout_s
            self.reject(
                ClientTimeoutError(
                    f"The request did not arrive within {limit_s:g} s.", "Send it faster."
                )
            )
        elif self._transport is not None:
            self._transport.close()

    def reject(self, error: HeadraceError) -> None:
        """Reads nothing more. A request that is being answered is answered first."""
        if self.is_deaf:
            return
        self.is_deaf = self._closes = True
        self._reader.forget_body()
        if self._running is None and self._transport is not None:
            self.refuse(error)
            self._transport.close()
