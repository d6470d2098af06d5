"""The edge: connections, their deadlines and bounds, and answers to what is not HTTP at all.

uvicorn's protocol over httptools, made safe against clients that are slow, silent, greedy or
wrong: each is dropped alone. What a request asks for is app.py's affair.
"""

from __future__ import annotations

import asyncio
import contextlib
import http
import logging
import socket
from dataclasses import dataclass
from typing import Any, cast
from urllib.parse import unquote_to_bytes

import httptools
import uvicorn
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol, RequestResponseCycle

from headrace.core.errors import ClientTimeoutError, HeadraceError, UnavailableError
from headrace.server.call import error_reply, new_id

KEEP_ALIVE_S = 65.0  # above clients' and proxies' own, so that theirs end first
LINGER_S, LINGER_BYTES = 2.0, 64 << 20  # what a refused client may still send before the cut
WRITE_HIGH_BYTES, WRITE_LOW_BYTES = 32 << 10, 8 << 10
UNSENT_BYTES = 64 << 10  # in the kernel, beyond what the client's window takes
SLOWEST_BYTES = 16 << 10  # a client that reads less in client_timeout_s has stopped reading
MAX_PIPELINED, PIPELINED_BYTES = 32, 64 << 10
MAX_REFUSED = 256  # connections being told that they are one too many

log = logging.getLogger(__name__)


class MalformedHttpError(HeadraceError):
    status = 400


class HeadersTooLargeError(HeadraceError):
    status = 431


@dataclass(frozen=True, slots=True)
class Bounds:
    max_connections: int
    max_headers_bytes: int
    client_timeout_s: float


class EdgeConfig(uvicorn.Config):
    """uvicorn's settings, and what all connections share beside them."""

    def __init__(self, app: Any, bounds: Bounds, backlog: int) -> None:
        super().__init__(
            app,
            http=EdgeProtocol,
            ws="none",
            lifespan="off",
            log_config=None,
            access_log=False,
            server_header=False,
            backlog=backlog,
        )
        self.bounds = bounds
        self.refused: set[EdgeProtocol] = set()  # those that were one too many, until they go


class EdgeProtocol(HttpToolsProtocol):
    """One connection."""

    def __init__(self, config: uvicorn.Config, *args: Any, **kwargs: Any) -> None:
        super().__init__(config, *args, **kwargs)
        self._bounds = cast("EdgeConfig", config).bounds
        self._refused = cast("EdgeConfig", config).refused
        self._raw: asyncio.Transport
        self._in_headers = True  # or before them
        self._header_bytes = 0
        self._messages = 0  # requests that came whole
        self._header_deadline: asyncio.TimerHandle | None = None
        self._upgrade_bytes = 0  # of a body that the parser leaves to another protocol
        self._pipelined_bytes = 0
        self._running: RequestResponseCycle | None = None  # `cycle` is the newest, maybe queued
        self._deaf = False  # what comes is thrown away
        self._deaf_bytes = 0
        self._closing = False
        self._stall: asyncio.TimerHandle | None = None
        self._unwritten_bytes = 0

    # -- the connection --------------------------------------------------------------------------

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        self._raw = transport
        transport.set_write_buffer_limits(WRITE_HIGH_BYTES, WRITE_LOW_BYTES)
        _tune(transport.get_extra_info("socket"), self._bounds.client_timeout_s)
        full = len(self.connections) - len(self._refused) >= self._bounds.max_connections
        full = full and not self._evict_idle()
        super().connection_made(transport)
        self.transport = cast("asyncio.Transport", _Outgoing(self, transport))
        if not full:
            self._await_headers()
        elif len(self._refused) >= MAX_REFUSED:
            transport.abort()  # not even time for a word
        else:
            self._refused.add(self)
            self.refuse(
                UnavailableError(
                    f"The server has {self._bounds.max_connections} connections, which is its "
                    "bound.",
                    "Use fewer connections, or start the server with a higher --max-connections.",
                    retry_after_s=1.0,
                )
            )

    def connection_lost(self, exc: Exception | None) -> None:
        self._closing = self._deaf = True
        self._refused.discard(self)
        for timer in (self._header_deadline, self._stall):
            if timer is not None:
                timer.cancel()
        running = self._running
        if running is not None and not running.response_complete:
            running.disconnected = True
            running.message_event.set()
        self.pipeline.clear()
        super().connection_lost(exc)
        self._unset_keepalive_if_required()

    def _evict_idle(self) -> bool:
        """Room for a newcomer: a connection that waits for its next request can go."""
        for other in self.connections:
            if isinstance(other, EdgeProtocol) and other.timeout_keep_alive_task is not None:
                other._raw.abort()
                self.connections.discard(other)
                return True
        return False

    def abort(self) -> None:
        """Drop the client at once, with whatever is unsent: close() would wait until it reads."""
        self._raw.abort()

    def close(self) -> None:
        """Send what is left, then close. A client that is still sending is heard out for a while:
        closing on unread data would reset the connection, and the answer with it."""
        if self._closing:
            return
        self._closing = self._deaf = True
        self._unset_keepalive_if_required()
        if self._in_headers and not self._header_bytes:
            self._raw.close()
            if self._raw.get_write_buffer_size():
                self._watch_stall()
            return
        self.flow.resume_reading()
        if self._raw.can_write_eof():
            self._raw.write_eof()
        self.loop.call_later(LINGER_S, self._end_linger)

    def _end_linger(self) -> None:
        if self._raw.get_write_buffer_size():
            self._watch_stall()
        else:
            self._raw.abort()

    @property
    def is_closing(self) -> bool:
        return self._closing or self._raw.is_closing()

    # -- clients that do not read ----------------------------------------------------------------

    def pause_writing(self) -> None:
        super().pause_writing()
        self._watch_stall()

    def resume_writing(self) -> None:
        super().resume_writing()
        if self._stall is not None and not self._closing:
            self._stall.cancel()
            self._stall = None

    def _watch_stall(self) -> None:
        if self._stall is None:
            self._unwritten_bytes = self._raw.get_write_buffer_size()
            self._stall = self.loop.call_later(self._bounds.client_timeout_s, self._check_stall)

    def _check_stall(self) -> None:
        self._stall = None
        left = self._raw.get_write_buffer_size()
        if left and self._unwritten_bytes - left < SLOWEST_BYTES:
            log.info(
                "a client stopped reading and was dropped with %d bytes unsent",
                left,
                extra={"event": "client_stalled"},
            )
            self.abort()
        else:
            self._watch_stall()

    # -- what comes in ---------------------------------------------------------------------------

    def data_received(self, data: bytes) -> None:
        if self._deaf:
            self._deaf_bytes += len(data)
            if self._deaf_bytes > LINGER_BYTES:
                self.abort()
            return
        self._unset_keepalive_if_required()
        try:
            while data and not self._deaf:
                data = self._feed_some(data)
        except httptools.HttpParserError as error:
            self._malformed(error, data)
            return
        if self._in_headers and self._is_idle:
            self._await_headers()

    def _feed_some(self, data: bytes) -> bytes:
        """Parse what can be parsed under one bound; what is left."""
        if self._upgrade_bytes:
            return self._feed_upgrade_body(data)
        if not self._in_headers:
            return self._feed(data, b"")
        # The parser itself would keep headers of any length.
        room = self._bounds.max_headers_bytes - self._header_bytes
        messages = self._messages
        rest = self._feed(data[:room], data[room:])
        if not self._in_headers or self._messages != messages:
            return rest  # what of it began the next request is less than one bound: not counted
        self._header_bytes += min(room, len(data))
        if self._header_bytes >= self._bounds.max_headers_bytes:
            self.refuse(
                HeadersTooLargeError(
                    f"The request's headers have more than {self._bounds.max_headers_bytes} bytes.",
                    "Send smaller ones, or start the server with a higher --max-headers.",
                )
            )
        return rest

    def _feed(self, data: bytes, rest: bytes) -> bytes:
        try:
            self.parser.feed_data(data)
        except httptools.HttpParserUpgrade as upgrade:
            # h2c and the like: we stay with HTTP/1.1, which the protocol allows, and go on.
            return data[upgrade.args[0] :] + rest
        return rest

    def _feed_upgrade_body(self, data: bytes) -> bytes:
        body, rest = data[: self._upgrade_bytes], data[self._upgrade_bytes :]
        self._upgrade_bytes -= len(body)
        self.on_body(body)
        if not self._upgrade_bytes:
            self._end_message()
        return rest

    @property
    def _is_idle(self) -> bool:
        return self.cycle is None or self.cycle.response_complete

    def _await_headers(self) -> None:
        if self._header_deadline is None:
            self._header_deadline = self.loop.call_later(
                self._bounds.client_timeout_s, self._headers_late
            )

    def _headers_late(self) -> None:
        self._header_deadline = None
        if not self._header_bytes:
            self.close()  # it never said a word
            return
        self.refuse(
            ClientTimeoutError(
                f"The request's headers did not come within {self._bounds.client_timeout_s:g} s.",
                "Send them faster.",
            )
        )

    # -- the parser's calls ----------------------------------------------------------------------

    def on_message_begin(self) -> None:
        super().on_message_begin()
        self.scope["state"]["abort"] = self.abort

    def on_headers_complete(self) -> None:
        self._in_headers = False
        self._header_bytes = 0
        if self._header_deadline is not None:
            self._header_deadline.cancel()
            self._header_deadline = None
        version = self.parser.get_http_version()
        self.scope["method"] = self.parser.get_method().decode("ascii")
        self.scope["http_version"] = version
        _set_target(self.scope, httptools.parse_url(self.url))
        if self.parser.should_upgrade():
            self._upgrade_bytes = _upgrade_body_bytes(self.headers)
        cycle = _Cycle(
            scope=self.scope,
            transport=self.transport,
            flow=self.flow,
            logger=self.logger,
            access_logger=self.access_logger,
            access_log=False,
            default_headers=self.server_state.default_headers,
            message_event=asyncio.Event(),
            expect_100_continue=self.expect_100_continue and version != "1.0",
            keep_alive=version == "1.1" and self.parser.should_keep_alive(),
            on_response=self.on_response_complete,
        )
        if self._is_idle:
            self.cycle = cycle
            self._start(cycle)
        else:
            self.cycle = cycle
            self._enqueue(cycle)

    def _enqueue(self, cycle: RequestResponseCycle) -> None:
        """A pipelined request waits for its turn. Reading goes on, within bounds: it is how a
        client's going away is noticed."""
        self.pipeline.appendleft((cycle, self.app))
        self._pipelined_bytes += sum(len(k) + len(v) for k, v in self.headers) + len(self.url)
        if len(self.pipeline) > MAX_PIPELINED:
            raise httptools.HttpParserError(f"more than {MAX_PIPELINED} pipelined requests")
        if self._pipelined_bytes > PIPELINED_BYTES:
            self.flow.pause_reading()

    def _start(self, cycle: RequestResponseCycle) -> None:
        self._running = cycle
        task = self.loop.create_task(cycle.run_asgi(self.app))
        task.add_done_callback(self.tasks.discard)
        self.tasks.add(task)

    def on_body(self, body: bytes) -> None:
        if self.cycle is not self._running:
            self._pipelined_bytes += len(body)
        super().on_body(body)

    def on_message_complete(self) -> None:
        if not self._upgrade_bytes:
            self._end_message()

    def _end_message(self) -> None:
        self._in_headers = True
        self._messages += 1
        if not self.cycle.response_complete:
            self.cycle.more_body = False
            self.cycle.message_event.set()

    def on_response_complete(self) -> None:
        self.server_state.total_requests += 1
        if self.is_closing:
            return
        self.flow.resume_reading()
        if self.pipeline:
            cycle, _ = self.pipeline.pop()
            if not self.pipeline:
                self._pipelined_bytes = 0
            self._start(cycle)
        elif self._header_deadline is None:
            self._unset_keepalive_if_required()
            self.timeout_keep_alive_task = self.loop.call_later(KEEP_ALIVE_S, self.close)

    # -- what is not a request -------------------------------------------------------------------

    def _malformed(self, error: httptools.HttpParserError, data: bytes) -> None:
        if self.is_closing:
            return
        if error.__context__ and not isinstance(error.__context__, httptools.HttpParserError):
            log.error("the edge failed", exc_info=error.__context__)
        if not self._is_idle:
            # The answer under way is good: let it end, hear no more, and close.
            self._deaf = True
            self.pipeline.clear()
            for cycle in (self._running, self.cycle):
                if cycle is not None:
                    cycle.keep_alive = False
            if self.cycle is not self._running or self.cycle.more_body:
                self._drop_unfinished(error)
            return
        cause, remedy = f"This is not HTTP/1.1: {_reason(error)}.", "Send an HTTP/1.1 request."
        if data[:1] == b"\x16":
            cause, remedy = "This port speaks HTTP, and TLS came.", "Use http:// rather than https."
        self.refuse(MalformedHttpError(cause, remedy))

    def _drop_unfinished(self, error: httptools.HttpParserError) -> None:
        """A body that went wrong half-way will never be whole."""
        running = self._running
        if running is not None and running.more_body and not running.response_started:
            running.disconnected = True
            running.message_event.set()
            self.refuse(
                MalformedHttpError(
                    f"The request's body is broken: {_reason(error)}.",
                    "Check Content-Length or the chunks.",
                )
            )

    def refuse(self, error: HeadraceError) -> None:
        """Answer without a request, in OpenAI's shape as ever, and close."""
        reply, request_id = error_reply(error), new_id("req")
        headers = {
            "content-type": reply.content_type,
            "content-length": str(len(reply.body)),
            "connection": "close",
            "x-request-id": request_id,
            **reply.headers,
        }
        head = f"HTTP/1.1 {reply.status} {http.HTTPStatus(reply.status).phrase}\r\n"
        head += "".join(f"{name}: {value}\r\n" for name, value in headers.items())
        log.info(
            "refused: %s",
            error.cause,
            extra={"event": "refused", "request_id": request_id, "status": reply.status},
        )
        self._raw.write(head.encode("latin-1") + b"\r\n" + reply.body)
        self._in_headers = False  # there may be more to come: linger
        self.close()


class _Cycle(RequestResponseCycle):
    """A request and its answer, as uvicorn has it, and right for HTTP/1.0 and for early answers."""

    _until_close = False

    async def send(self, message: Any) -> None:
        if message["type"] == "http.response.start":
            if self.more_body:
                self.keep_alive = False  # answered before its body came, which may be endless
            sized = any(name == b"content-length" for name, _ in message["headers"])
            if self.scope["http_version"] != "1.1" and not sized:
                self._until_close, self.chunked_encoding = True, False  # 1.0 knows no chunks
        elif self._until_close:
            self.expected_content_length = len(message.get("body", b""))
        await super().send(message)


class _Outgoing:
    """The transport as uvicorn's classes see it, with a close that a client can't hold up."""

    def __init__(self, protocol: EdgeProtocol, transport: asyncio.Transport) -> None:
        self._protocol = protocol
        self.write = transport.write
        self.get_extra_info = transport.get_extra_info

    def close(self) -> None:
        self._protocol.close()

    def is_closing(self) -> bool:
        return self._protocol.is_closing


def _set_target(scope: Any, url: Any) -> None:
    if url.path is None:
        raise httptools.HttpParserError("no path")
    scope["raw_path"] = url.path
    scope["path"] = unquote_to_bytes(url.path).decode("utf-8", "replace")
    scope["query_string"] = url.query or b""


def _upgrade_body_bytes(headers: list[tuple[bytes, bytes]]) -> int:
    """Java's client, for one, asks for h2c with a body; the parser hands that body to nobody."""
    for name, value in headers:
        if name == b"transfer-encoding":
            raise httptools.HttpParserError("an upgrade with a chunked body")
        if name == b"content-length":
            return int(value)
    return 0


def _reason(error: httptools.HttpParserError) -> str:
    cause = error.__context__ or error
    return str(cause).rstrip(".") or type(cause).__name__


def _tune(sock: socket.socket | None, client_timeout_s: float) -> None:
    """A stopped reader shall hold little memory, and a vanished client be noticed."""
    if sock is None or sock.family not in (socket.AF_INET, socket.AF_INET6):
        return
    options = [(socket.SOL_SOCKET, "SO_KEEPALIVE", 1)]
    idle_s = max(1, round(client_timeout_s))
    for name, value in (
        ("TCP_NODELAY", 1),
        ("TCP_NOTSENT_LOWAT", UNSENT_BYTES),
        ("TCP_KEEPIDLE", idle_s),
        ("TCP_KEEPINTVL", max(1, idle_s // 3)),
        ("TCP_KEEPCNT", 3),
    ):
        options.append((socket.IPPROTO_TCP, name, value))
    for level, name, value in options:
        if hasattr(socket, name):
            with contextlib.suppress(OSError):
                sock.setsockopt(level, getattr(socket, name), value)
