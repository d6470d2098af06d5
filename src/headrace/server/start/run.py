"""Starts everything: the engine process first, then the HTTP side while the engine loads.

`serve()` runs a server from start to end and returns its exit status. Knows the order of things.
The HTTP modules are imported after the engine process was started: with few cores that halves the
time until the server is ready.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import socket
import time
from collections import Counter
from collections.abc import AsyncIterator, Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from headrace.core.config import EngineConfig
from headrace.core.server_config import ServerConfig
from headrace.fetch.verify import Checked
from headrace.server.edge.descriptors import OWN, plan_connections
from headrace.server.edge.listen import bind, bind_admin, is_loopback, listen, url_of
from headrace.server.handover.setup import HandoverSetup
from headrace.server.link import wire
from headrace.server.link.supervisor import Supervisor
from headrace.server.observe.logs import set_up_logging
from headrace.server.start.banner import Serving, StartUp
from headrace.server.start.run_file import RunFile

if TYPE_CHECKING:
    from headrace.server.access.keys import Keys
    from headrace.server.edge.http_server import HttpServer
    from headrace.server.edge.room import Room
    from headrace.server.request.service import Service

BACKLOG = 2048
# For the admin port: it has few clients, which must be answered whatever happens on the main port.
ADMIN_CONNECTIONS, ADMIN_SPARE, ADMIN_BACKLOG = 16, 4, 64

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class Behind:
    """What differs for a replica behind a router on this host, which is what users see."""

    keys: Keys
    on_service: Callable[[Service], None] = lambda service: None  # before it takes requests


def serve(
    path: Path,
    name: str,
    config: ServerConfig,
    engine: EngineConfig,
    *,
    typed: str | None = None,
    sock: socket.socket | None = None,
    admin: socket.socket | None = None,
    start_up: StartUp | None = None,
    checked: Checked | None = None,
    origins: Mapping[str, str] | None = None,
    behind: Behind | None = None,
) -> int:
    """Serves until it is told to stop. `typed` is what the user gave as MODEL; `sock` and `admin`
    are sockets that the caller has bound already; `checked` is the verdict on the model's files;
    `origins` says where each setting came from; `behind` makes it a replica behind a router."""
    set_up_logging(config.log_level, config.log_format, show_content=config.log_content)
    with (
        sock or bind(config.host, config.port) as sock,
        admin or bind_admin(config) or contextlib.nullcontext() as admin,
    ):
        start_up = start_up or StartUp(config.log_format)
        found = checked or Checked()
        life = _Life(
            path, name, typed, config, engine, sock, admin, start_up, found, origins, behind
        )
        with asyncio.Runner(loop_factory=_new_loop) as runner:
            return runner.run(life.run())


def _new_loop() -> asyncio.AbstractEventLoop:
    try:
        import uvloop
    except ImportError:  # Windows has none
        return asyncio.new_event_loop()
    return uvloop.new_event_loop()


class _Life:
    def __init__(
        self,
        path: Path,
        name: str,
        typed: str | None,
        config: ServerConfig,
        engine: EngineConfig,
        sock: socket.socket,
        admin: socket.socket | None,
        start_up: StartUp,
        checked: Checked,
        origins: Mapping[str, str] | None = None,
        behind: Behind | None = None,
    ) -> None:
        self._behind = behind
        self._path = path
        self._name = name
        self._typed = typed
        self._config = config
        self._engine = engine
        self._socket = sock
        self._admin_socket = admin
        self._start_up = start_up
        self._checked = checked
        self._origins = origins or {}
        self._service: Service | None = None
        self._stop_watching: Callable[[], None] = lambda: None
        self._listening = False
        self._announced = False
        self._run_file: RunFile | None = None  # set once the server is announced
        self._supervisor = Supervisor(
            wire.Configure(
                model_path=str(path),
                engine=engine,
                log_level=config.log_level,
                log_format=config.log_format,
                grammars_bytes=config.max_grammars_bytes,
                checked=checked,
                handover=HandoverSetup.from_config(config),
            ),
            hang_timeout_s=config.hang_timeout_s,
            max_restarts=config.max_restarts,
            on_phase=lambda phase: self._start_up.phase(phase.name, phase.seconds),
            on_ready=self._on_ready,
        )

    async def run(self) -> int:
        watching = asyncio.create_task(self._supervisor.run())
        await asyncio.sleep(0)  # the process is started here
        try:
            service, server, admin = await asyncio.to_thread(self._prepare)
            if watching.done():  # the engine can't start, so there is no reason to listen
                await watching
            from headrace.server.start.drain import Drain

            Drain(service, server).listen()
            async with self._admin(admin):
                await self._serve(server, watching)
        finally:
            watching.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await watching
            self._stop_watching()
            if self._run_file is not None:
                self._run_file.close()
        return 0

    @contextlib.asynccontextmanager
    async def _admin(self, server: HttpServer | None) -> AsyncIterator[None]:
        """The admin port answers until the last request on the main port is over."""
        if server is None or self._admin_socket is None:
            yield
            return
        listen(self._admin_socket, ADMIN_BACKLOG)
        serving = asyncio.create_task(server.serve(sockets=[self._admin_socket]))
        self._start_up.note(f"the admin port is at {url_of(self._admin_socket)}")
        try:
            yield
        finally:
            server.should_exit = server.force_exit = True
            await serving

    async def _serve(self, server: HttpServer, watching: asyncio.Task[None]) -> None:
        began = time.perf_counter()
        listen(self._socket, BACKLOG)
        serving = asyncio.create_task(server.serve(sockets=[self._socket]))
        started = asyncio.create_task(server.has_started.wait())
        try:
            await asyncio.wait({serving, started}, return_when=asyncio.FIRST_COMPLETED)
            if started.done():
                host, port = self._socket.getsockname()[:2]
                where = f"listening on {host}, port {port}"
                self._start_up.phase("http", time.perf_counter() - began, where)
                self._listening = True
                self._announce()
            await asyncio.wait({serving, watching}, return_when=asyncio.FIRST_COMPLETED)
        finally:
            started.cancel()
            server.should_exit = True
            await serving

    def _prepare(self) -> tuple[Service, HttpServer, HttpServer | None]:
        """Loads what HTTP needs. In a thread: the engine's first messages arrive meanwhile."""
        began = time.perf_counter()
        from headrace.policies.queue import QueueBounds
        from headrace.server.access.keys_file import read_keys
        from headrace.server.access.operators import admin_routes, operator_warnings
        from headrace.server.api.responses.store import ResponseStore
        from headrace.server.api.routes import all_routes
        from headrace.server.edge.app import App
        from headrace.server.edge.bodies import Bodies
        from headrace.server.edge.browsers import browser_warnings
        from headrace.server.edge.http_server import make_server
        from headrace.server.observe.watching import watch
        from headrace.server.request.service import Service
        from headrace.server.start.model import read_model

        imported = time.perf_counter()
        self._start_up.phase("code", imported - began, "HTTP server imported")
        served = read_model(
            self._path,
            self._name,
            server=self._config,
            engine=self._engine,
            typed=self._typed,
        )
        self._checked.confirm()
        behind = self._behind
        keys, warnings = read_keys(self._config) if behind is None else (behind.keys, [])
        warnings += browser_warnings(self._config, has_keys=len(keys) > 0)
        warnings += operator_warnings(self._config, keys)
        for warning in warnings:
            self._start_up.note(warning)
        self._service = service = Service(
            config=self._config,
            engine_config=self._engine,
            model=served.model,
            supervisor=self._supervisor,
            queue=QueueBounds.from_config(self._config, keys.weights),
            keys=keys,
            responses=ResponseStore.from_config(self._config),
            bodies=Bodies(self._config.max_bodies_bytes),
            watchers=[keys],
            identity=served.identity,
            origins=self._origins,
        )
        if behind is not None:
            behind.on_service(service)
        self._identify()
        self._stop_watching = watch(service)
        what = f"{served.model.tokenizer.vocab_size:,} tokens"
        if served.model.template is None:
            what += ", no chat template"
        self._start_up.phase("tokenizer", time.perf_counter() - imported, what)
        room, admin_room = self._rooms(service.dropped)
        service.open_connections = lambda: len(room) + len(admin_room)
        routes = all_routes()
        server = make_server(App(service, routes), self._config, room, BACKLOG)
        if self._admin_socket is None:
            return service, server, None
        app = App(service, admin_routes(routes), is_admin=True)
        return service, server, make_server(app, self._config, admin_room, ADMIN_BACKLOG)

    def _rooms(self, dropped: Counter[str]) -> tuple[Room, Room]:
        from headrace.server.edge.room import Room

        own = OWN + ADMIN_CONNECTIONS + ADMIN_SPARE
        plan = plan_connections(self._config.max_connections, BACKLOG, own)
        if plan.note:
            self._start_up.note(plan.note)
        return (
            Room(plan.max_connections, plan.max_spare, dropped),
            Room(ADMIN_CONNECTIONS, ADMIN_SPARE, dropped),
        )

    def _identify(self) -> None:
        """Called when both the model was read and the engine has reported its backend. After a
        restart the backend may be a different one."""
        facts, service = self._supervisor.facts, self._service
        if facts is None or service is None:
            return
        from headrace.server.start.fingerprint import complete, fingerprint

        service.identity = complete(service.identity, facts.backend)
        service.fingerprint = fingerprint(service.identity)

    def _on_ready(self, ready: wire.Ready, seconds: float) -> None:
        self._identify()
        if self._announced:
            log.info("the engine is back after %.2f s", seconds, extra={"event": "engine_back"})
            return
        self._start_up.engine_ready(seconds, ready.pid)
        for note in ready.notes:
            self._start_up.note(note)
        self._announce()

    def _announce(self) -> None:
        """Called once the engine is ready and the server listens."""
        facts, service = self._supervisor.facts, self._service
        if facts is None or service is None or not self._listening or self._announced:
            return
        self._announced = True
        has_keys = bool(self._config.api_key or self._config.api_keys_file)
        if not has_keys and not is_loopback(self._config.host):
            self._start_up.note(
                f"{self._config.host} can be reached from other machines, and there is no "
                "authentication: set --api-key or --api-keys-file"
            )
        url = url_of(self._socket)
        if self._behind is None:
            self._run_file = RunFile.write(
                url=url,
                model=service.model.name,
                context_tokens=facts.context_tokens,
                has_keys=has_keys,
            )
        self._start_up.ready(
            Serving(
                url=url,
                model=service.model.name,
                fingerprint=service.fingerprint,
                context_tokens=facts.context_tokens,
                kv_tokens=facts.total_blocks * facts.block_tokens,
                has_chat=service.model.template is not None,
                has_keys=has_keys,
            )
        )
