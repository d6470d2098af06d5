"""The application and its edge in a thread of this process, over endpoints that wait on command."""

from __future__ import annotations

import asyncio
import socket
import threading
from collections.abc import AsyncIterator
from types import TracebackType
from typing import Any, cast

import uvloop

from headrace.core.config import EngineConfig
from headrace.core.server_config import ServerConfig
from headrace.policies.queue import QueueBounds
from headrace.server.access.keys_file import read_keys
from headrace.server.access.operators import admin_routes
from headrace.server.api.route import Route
from headrace.server.edge.app import App
from headrace.server.edge.bodies import Bodies
from headrace.server.edge.http_server import HttpServer, make_server
from headrace.server.edge.room import Room
from headrace.server.request.call import AnyReply, Call, StreamReply, json_reply
from headrace.server.request.service import Service

LOOPS = {"asyncio": asyncio.new_event_loop, "uvloop": uvloop.new_event_loop}


class EdgeServer:
    """/health is open, /echo says how much came, /wait answers once `go` is set."""

    def __init__(self, loop: str = "uvloop", max_spare: int = 8, **settings: Any) -> None:
        self._loop_name = loop
        self.config = ServerConfig(**settings)
        keys, _ = read_keys(self.config)
        self.service = Service(
            config=self.config,
            engine_config=EngineConfig(),
            model=cast("Any", None),
            supervisor=cast("Any", None),
            queue=QueueBounds.from_config(self.config),
            bodies=Bodies(self.config.max_bodies_bytes),
            keys=keys,
        )
        self.room = Room(self.config.max_connections, max_spare, self.service.dropped)
        self.cancelled = threading.Event()
        self.waiting = threading.Semaphore(0)
        self._sockets = [socket.create_server(("127.0.0.1", 0), backlog=2048) for _ in range(2)]
        self.port, self.admin_port = (sock.getsockname()[1] for sock in self._sockets)
        self._thread = threading.Thread(target=self._run)

    def __enter__(self) -> EdgeServer:
        self._thread.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.let_go()
        for server in self._servers:
            server.should_exit = True
        self._thread.join()

    def let_go(self) -> None:
        self._loop.call_soon_threadsafe(self._go.set)

    def _run(self) -> None:
        with asyncio.Runner(loop_factory=LOOPS[self._loop_name]) as runner:
            runner.run(self._serve())

    async def _serve(self) -> None:
        self._loop, self._go = asyncio.get_running_loop(), asyncio.Event()
        routes = self._routes()
        main = make_server(App(self.service, routes), self.config, self.room, 2048)
        admin = make_server(
            App(self.service, admin_routes(routes), is_admin=True), self.config, Room(4, 4), 64
        )
        self._servers: list[HttpServer] = [main, admin]
        await asyncio.gather(
            *(s.serve(sockets=[sock]) for s, sock in zip((main, admin), self._sockets, strict=True))
        )

    def _routes(self) -> list[Route]:
        both = ("GET", "POST")
        return [
            Route(path="/health", endpoint=self._health, is_open=True),
            Route(path="/echo", endpoint=self._echo, methods=both),
            Route(path="/wait", endpoint=self._wait, methods=both),
            Route(path="/stream", endpoint=self._stream, methods=both),
            Route(path="/metrics", endpoint=self._told, is_operators=True),
            Route(path="/load", endpoint=self._told, is_operators=True),
            Route(path="/history", endpoint=self._told, is_operators=True),
            Route(path="/diagnosis", endpoint=self._told, is_operators=True),
            Route(path="/version", endpoint=self._told, tells_operators_more=True),
            Route(path="/", endpoint=self._told, is_open=True),
        ]

    async def _health(self, service: Service, call: Call) -> AnyReply:
        """Lives."""
        return json_reply({"status": "ok"})

    async def _echo(self, service: Service, call: Call) -> AnyReply:
        return json_reply({"length": call.body_bytes})

    async def _told(self, service: Service, call: Call) -> AnyReply:
        return json_reply({"all": call.is_operators})

    async def _wait(self, service: Service, call: Call) -> AnyReply:
        self.waiting.release()
        try:
            await self._go.wait()
        except asyncio.CancelledError:
            self.cancelled.set()
            raise
        return json_reply({"length": call.body_bytes})

    async def _stream(self, service: Service, call: Call) -> AnyReply:
        return StreamReply(chunks=self._chunks())

    async def _chunks(self) -> AsyncIterator[bytes]:
        yield b"data: 1\n\n"
        self.waiting.release()
        await self._go.wait()
        yield b"data: 2\n\n"
