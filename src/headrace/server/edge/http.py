"""HTTP/1.1 on a connection: its timeouts and bounds, and errors for input that is not HTTP.

httptools parses, uvicorn passes requests to the application; this file makes both safe against
clients that are slow, send too much or send invalid data. app.py answers the requests.
"""

from __future__ import annotations

import asyncio
import logging
from typing import Any

import httptools
import uvicorn
from uvicorn.protocols.http.httptools_impl import RequestResponseCycle

from headrace.core.errors import ClientTimeoutError, HeadraceError
from headrace.server.edge.connection import Connection
from headrace.server.edge.cycle import Cycle
from headrace.server.edge.half_closed import PROBE, HalfClosed
from headrace.server.edge.http_head import check_host, set_target, upgrade_body_bytes
from headrace.server.edge.room import Phase

SPARE_S = 2.0  # for the headers of a client in a spare place: it may be a probe
MAX_HEADER_LINES = 256  # a short one takes forty times its size in memory
# Chunks of a body, and more for larger bodies: a chunk costs as much time as 200 bytes.
FEW_CHUNKS, LEAST_CHUNK_BYTES = 4096, 64
KEEP_ALIVE_S = 65.0  # longer than that of clients and proxies, so that they close first
MAX_PIPELINED, PIPELINED_BYTES = 32, 64 << 10

log = logging.getLogger(__name__)


class MalformedHttpError(HeadraceError):
    status = 400


class HeadersTooLargeError(HeadraceError):
    status = 431


class EdgeProtocol(Connection):
    def __init__(self, config: uvicorn.Config, *args: Any, **kwargs: Any) -> None:
        super().__init__(config, *args, **kwargs)
        self._in_headers = True  # also before the first byte
        self._header_bytes = 0
        self._messages = 0  # complete requests
        self._bodies = 0  # pieces of bodies
        self._chunks = self._body_bytes = 0  # of this request's
        self._header_deadline: asyncio.TimerHandle | None = None
        self._upgrade_bytes = 0  # of a body that the parser skips because of an upgrade header
        self._pipelined_bytes = 0
        self._half_closed: HalfClosed | None = None

    def admitted(self) -> None:
        self._await_headers()

    @property
    def between_requests(self) -> bool:
        return self._in_headers and not self._header_bytes

    def connection_lost(self, exc: Exception | None) -> None:
        if self._header_deadline is not None:
            self._header_deadline.cancel()
        if self._half_closed is not None:
            self._half_closed.stop()
        super().connection_lost(exc)

    # -- what comes in ---------------------------------------------------------------------------

    def data_received(self, data: bytes) -> None:
        if self._deaf:
            self.discard(data)
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
        self._settle()

    def _settle(self) -> None:
        """Reports its phase to room.py."""
        running = self._running
        if self.is_closing:
            return
        if running is not None and not running.response_complete and not running.more_body:
            self._room.move(self, Phase.BUSY)
        elif not self._in_headers:
            self._room.move(self, Phase.BODY)
        elif self._header_bytes:
            self._room.move(self, Phase.HEADERS)

    def eof_received(self) -> bool:  # type: ignore[override]
        """The client has closed its sending side. If it sent a request it may still wait for the
        answer; True keeps the connection open for that. An incomplete request is dropped."""
        running = self._running
        if self._closing or running is None or running.response_complete or running.more_body:
            return False
        if self.pipeline and self.cycle.more_body:
            self.pipeline.popleft()
        self._deaf = True
        if self._half_closed is None:
            self._half_closed = HalfClosed(self._raw.get_extra_info("socket"), self.abort)
            if not running.response_started and running.scope["http_version"] == "1.1":
                self._raw.write(PROBE)
            running.keep_alive = running.keep_alive and bool(self.pipeline)
        return True

    def _feed_some(self, data: bytes) -> bytes:
        """Parse as much as one bound allows; returns the rest."""
        if self._upgrade_bytes:
            return self._feed_upgrade_body(data)
        if not self._in_headers:
            return self._feed_body(data)
        # The parser itself accepts headers of any length.
        room = self._bounds.max_headers_bytes - self._header_bytes
        messages = self._messages
        rest = self._feed(data[:room], data[room:])
        if not self._in_headers or self._messages != messages:
            return rest  # the start of a next request is shorter than one bound: not counted
        self._count_header_bytes(min(room, len(data)))
        return rest

    def _feed_body(self, data: bytes) -> bytes:
        """Bounds the bytes that are not body: chunk sizes and trailers."""
        bodies = self._bodies
        rest = self._feed(data, b"")
        if self._bodies != bodies:
            self._header_bytes = 0
        elif not self._in_headers:
            self._count_header_bytes(len(data))
        return rest

    def _count_header_bytes(self, count: int) -> None:
        self._header_bytes += count
        if self._header_bytes >= self._bounds.max_headers_bytes:
            self._refuse_headers(
                f"{self._bounds.max_headers_bytes} bytes",
                "Send smaller ones, or start the server with a higher --max-headers.",
            )

    def _refuse_headers(self, bound: str, remedy: str) -> None:
        self.refuse(
            HeadersTooLargeError(f"The request's headers have more than {bound}.", remedy),
            "large_headers",
        )

    def _feed(self, data: bytes, rest: bytes) -> bytes:
        try:
            self.parser.feed_data(data)
        except httptools.HttpParserUpgrade as upgrade:
            # Upgrade requests such as h2c: ignored, as the protocol allows.
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
            limit_s = self._bounds.client_timeout_s
            limit_s = min(limit_s, SPARE_S) if self.is_spare else limit_s
            self._header_deadline = self.loop.call_later(limit_s, self._headers_late)

    def _headers_late(self) -> None:
        self._header_deadline = None
        if self.is_spare:
            self.refuse_full()
            return
        if not self._header_bytes:
            self._room.dropped["silent"] += 1
            self.close()  # it never sent a byte
            return
        self.refuse(
            ClientTimeoutError(
                f"The request's headers did not arrive within {self._bounds.client_timeout_s:g} s.",
                "Send them faster.",
            ),
            "slow_headers",
        )

    # -- the parser's calls ----------------------------------------------------------------------

    def on_headers_complete(self) -> None:
        if self._deaf:
            return
        self._in_headers = False
        self._header_bytes = self._chunks = self._body_bytes = 0
        if self._header_deadline is not None:
            self._header_deadline.cancel()
            self._header_deadline = None
        self.tune()
        version = self.parser.get_http_version()
        self.scope["method"] = self.parser.get_method().decode("ascii")
        self.scope["http_version"] = version
        check_host(version, self.headers)
        set_target(self.scope, httptools.parse_url(self.url))
        if self.is_spare and self.scope["path"] not in self._bounds.probes:
            self.refuse_full()
            return
        if self.parser.should_upgrade():
            self._upgrade_bytes = upgrade_body_bytes(self.headers)
        cycle = Cycle(
            scope=self.scope,
            transport=self.transport,
            flow=self.flow,
            logger=self.logger,
            access_logger=self.access_logger,
            access_log=False,
            default_headers=self.server_state.default_headers,
            message_event=asyncio.Event(),
            expect_100_continue=self.expect_100_continue and version != "1.0",
            keep_alive=version == "1.1" and self.parser.should_keep_alive() and not self.is_spare,
            on_response=self.on_response_complete,
        )
        if self._is_idle:
            self.cycle = cycle
            self._start(cycle)
        else:
            self.cycle = cycle
            self._enqueue(cycle)

    def _enqueue(self, cycle: RequestResponseCycle) -> None:
        """A pipelined request waits for its turn. Reading goes on, within bounds: that is how a
        disconnect is noticed."""
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

    def on_header(self, name: bytes, value: bytes) -> None:
        if not self._in_headers or self._deaf:  # trailers are ignored
            return
        super().on_header(name, value)
        if len(self.headers) > MAX_HEADER_LINES:
            self._refuse_headers(f"{MAX_HEADER_LINES} lines", "Send fewer.")

    def on_body(self, body: bytes) -> None:
        if self._deaf:
            return
        self._bodies += 1
        self._chunks += 1
        self._body_bytes += len(body)
        if self._chunks > FEW_CHUNKS + self._body_bytes // LEAST_CHUNK_BYTES:
            raise httptools.HttpParserError(f"{self._chunks} chunks of a few bytes each")
        if self.cycle is not self._running:
            self._pipelined_bytes += len(body)
        super().on_body(body)

    def on_message_complete(self) -> None:
        if not self._upgrade_bytes and not self._deaf:
            self._end_message()

    def _end_message(self) -> None:
        self._in_headers = True
        self._header_bytes = 0
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
            self._settle()
        elif self._half_closed is not None:
            self.close()
        elif self._header_deadline is None:
            self._unset_keepalive_if_required()
            self.timeout_keep_alive_task = self.loop.call_later(KEEP_ALIVE_S, self.close)
            self._room.move(self, Phase.IDLE)

    # -- what is not a request -------------------------------------------------------------------

    def _malformed(self, error: httptools.HttpParserError, data: bytes) -> None:
        if self.is_closing:
            return
        if error.__context__ and not isinstance(error.__context__, httptools.HttpParserError):
            log.error("unexpected error in the HTTP parser", exc_info=error.__context__)
        if not self._is_idle:
            # Let the running answer finish, read nothing more, then close.
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
            cause, remedy = (
                "This port expects HTTP and received TLS.",
                "Use http:// rather than https.",
            )
        self.refuse(MalformedHttpError(cause, remedy), "malformed")

    def _drop_unfinished(self, error: httptools.HttpParserError) -> None:
        """A body that is invalid half-way will never be complete."""
        running = self._running
        if running is not None and running.more_body and not running.response_started:
            self.refuse(
                MalformedHttpError(
                    f"The request's body is malformed: {_reason(error)}.",
                    "Check Content-Length or the chunks.",
                ),
                "malformed",
            )


def _reason(error: httptools.HttpParserError) -> str:
    cause = error.__context__ or error
    return str(cause).rstrip(".") or type(cause).__name__
