"""One connection: its place within the limit, how it ends, and clients that do not read.

uvicorn's protocol, changed so that a client beyond the limit, a silent or a slow one costs little
and is dropped without harm to others. room.py decides which connection has a place, http.py parses
HTTP, app.py answers requests.
"""

from __future__ import annotations

import asyncio
import contextlib
import http
import logging
import socket
from dataclasses import dataclass
from typing import Any, cast

import uvicorn
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol, RequestResponseCycle

from headrace.core.errors import HeadraceError, UnavailableError
from headrace.server.edge.room import Phase, Room
from headrace.server.observe.sparing_log import SparingLog
from headrace.server.request.call import error_reply, new_id

LINGER_S, LINGER_BYTES = (
    2.0,
    64 << 20,
)  # how long and how much a refused client may still send before it is cut off
WRITE_HIGH_BYTES, WRITE_LOW_BYTES = 32 << 10, 8 << 10
UNSENT_BYTES = 64 << 10  # kernel send buffer, beyond the client's receive window
SLOWEST_BYTES = 16 << 10  # a client that reads less than this in client_timeout_s counts as stopped

log = SparingLog(logging.getLogger(__name__))


@dataclass(frozen=True, slots=True)
class Bounds:
    max_headers_bytes: int
    client_timeout_s: float
    probes: frozenset[str] = frozenset()  # paths that are answered even when all places are taken


class EdgeConfig(uvicorn.Config):
    """uvicorn's settings, and what all connections share."""

    def __init__(
        self, app: Any, protocol: type[asyncio.Protocol], bounds: Bounds, room: Room, backlog: int
    ) -> None:
        super().__init__(
            app,
            http=protocol,
            ws="none",
            lifespan="off",
            log_config=None,
            access_log=False,
            server_header=False,
            backlog=backlog,
        )
        self.bounds = bounds
        self.room = room


class Connection(HttpToolsProtocol):
    """One connection. Subclasses report when it is `between_requests`."""

    def __init__(self, config: uvicorn.Config, *args: Any, **kwargs: Any) -> None:
        super().__init__(config, *args, **kwargs)
        self._bounds = cast("EdgeConfig", config).bounds
        self._room = cast("EdgeConfig", config).room
        self._raw: asyncio.Transport
        self._running: RequestResponseCycle | None = (
            None  # `cycle` is the newest one, possibly queued
        )
        self._deaf = False  # incoming data is discarded
        self._deaf_bytes = 0
        self._closing = False
        self._stall: asyncio.TimerHandle | None = None
        self._unwritten_bytes = 0
        self._is_tuned = False

    def admitted(self) -> None:
        """The connection exists, in a regular place or a spare one (`is_spare`)."""

    @property
    def between_requests(self) -> bool:
        """No request has been begun and not finished."""
        raise NotImplementedError

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        self._raw = transport
        transport.set_write_buffer_limits(WRITE_HIGH_BYTES, WRITE_LOW_BYTES)
        super().connection_made(transport)
        self.transport = cast("asyncio.Transport", _Outgoing(self, transport))
        self._room.enter(self)
        self.admitted()

    @property
    def has_unread(self) -> bool:
        return self._raw.get_write_buffer_size() > 0

    def tune(self) -> None:
        """Set up only once the client has sent a request: many connections may never do."""
        if not self._is_tuned:
            self._is_tuned = True
            _tune(self._raw.get_extra_info("socket"), self._bounds.client_timeout_s)

    @property
    def is_spare(self) -> bool:
        return self._room.is_spare(self)

    def refuse_full(self) -> None:
        self.refuse(
            UnavailableError(
                f"The server has reached its limit of {self._room.max_connections} connections.",
                "Use fewer connections, or start the server with a higher --max-connections.",
                retry_after_s=1.0,
            ),
            "full",
        )

    def connection_lost(self, exc: Exception | None) -> None:
        self._closing = self._deaf = True
        self._room.leave(self)
        if self._stall is not None:
            self._stall.cancel()
        self._drop_running()
        self.pipeline.clear()
        super().connection_lost(exc)
        self._unset_keepalive_if_required()

    def _drop_running(self) -> None:
        """Tell the application that the client has left."""
        running = self._running
        if running is not None and not running.response_complete:
            running.disconnected = True
            running.message_event.set()

    def abort(self) -> None:
        """Drop the client at once, with any unsent data: close() would wait until it reads."""
        self._raw.abort()

    def close(self, *, lingering: bool = False) -> None:
        """Send what is left, then close. Data that the client still sends is read for a while:
        closing with unread data would reset the connection and lose the answer."""
        if self._closing:
            return
        self._closing = self._deaf = True
        self._unset_keepalive_if_required()
        if self.between_requests and not lingering:
            self._raw.close()
            if self._raw.get_write_buffer_size():
                self._watch_stall()
            return
        self._room.move(self, Phase.LINGERING)
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
            self._room.dropped["stalled"] += 1
            log.info(
                "client_stalled",
                "a client stopped reading and was dropped with %d bytes unsent",
                left,
            )
            self.abort()
        else:
            self._watch_stall()

    def discard(self, data: bytes) -> None:
        self._deaf_bytes += len(data)
        if self._deaf_bytes > LINGER_BYTES:
            self.abort()

    # -- answers without a request ---------------------------------------------------------------

    def refuse(self, error: HeadraceError, why: str) -> None:
        """Answer invalid input with an error in OpenAI's shape, and close; `why`: of room.DROPS."""
        self._drop_running()
        self._room.dropped[why] += 1
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
        log.info("refused", "refused: %s", error.cause, request_id=request_id, status=reply.status)
        self._raw.write(head.encode("latin-1") + b"\r\n" + reply.body)
        self.close(lingering=True)


class _Outgoing:
    """The transport as uvicorn's classes see it, with a close that a client can't block."""

    def __init__(self, protocol: Connection, transport: asyncio.Transport) -> None:
        self._protocol = protocol
        self.write = transport.write
        self.get_extra_info = transport.get_extra_info

    def close(self) -> None:
        self._protocol.close()

    def is_closing(self) -> bool:
        return self._protocol.is_closing


def _tune(sock: socket.socket | None, client_timeout_s: float) -> None:
    """So that a client that stops reading holds little memory, and a vanished one is noticed."""
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
    # uvloop would make a new object for each of them.
    own = socket.socket(sock.family, sock.type, sock.proto, fileno=sock.fileno())
    try:
        for level, name, value in options:
            if hasattr(socket, name):
                with contextlib.suppress(OSError):
                    own.setsockopt(level, getattr(socket, name), value)
    finally:
        own.detach()
