"""uvicorn, configured for this server."""

from __future__ import annotations

import asyncio
import contextlib
import socket
from collections.abc import Iterator
from typing import Any

import uvicorn

from headrace.core.server_config import ServerConfig
from headrace.server.api.routes import PROBES
from headrace.server.edge.connection import Bounds, EdgeConfig
from headrace.server.edge.http import EdgeProtocol
from headrace.server.edge.room import Room

CLOSING_S = 5.0  # to send what is left when the server stops: some clients never read


class HttpServer(uvicorn.Server):
    """uvicorn without its own signal handlers."""

    def __init__(self, config: uvicorn.Config) -> None:
        super().__init__(config)
        self.has_started = asyncio.Event()

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets)
        self.has_started.set()

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        force = asyncio.get_running_loop().call_later(CLOSING_S, self._force)
        try:
            await super().shutdown(sockets)
        finally:
            force.cancel()

    def _force(self) -> None:
        self.force_exit = True


def make_server(app: Any, config: ServerConfig, room: Room, backlog: int) -> HttpServer:
    bounds = Bounds(
        max_headers_bytes=config.max_headers_bytes,
        client_timeout_s=config.client_timeout_s,
        probes=PROBES,
    )
    return HttpServer(EdgeConfig(app, EdgeProtocol, bounds, room, backlog))
