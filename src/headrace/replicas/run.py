"""Starts the replicas and the router in front of them, and stops all without losing a request.

Knows the order of things: replicas start at the same time, the port listens when the first is
ready, and those that did not start are tried again. cli/serve.py has found the model.
"""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import logging
import os
import secrets
import signal
import socket
import time
from collections.abc import AsyncIterator, Mapping, Sequence
from dataclasses import dataclass, field

from headrace.core.errors import HeadraceError
from headrace.core.server_config import ServerConfig
from headrace.replicas import messages
from headrace.replicas.admin import AdminPort
from headrace.replicas.announce import Announcer
from headrace.replicas.fleet import RollingFleet
from headrace.replicas.front import ReplicasRouter
from headrace.replicas.release import Release
from headrace.replicas.roll import Roller
from headrace.replicas.shares import Share
from headrace.replicas.slot import Common, Slot
from headrace.router.heartbeat import Get, Heart, getter
from headrace.router.replica import Replica
from headrace.router.run import BACKLOG, drain, new_loop, serving
from headrace.router.settings import RouterSettings
from headrace.server.access.keys import Keys
from headrace.server.edge.descriptors import plan_connections
from headrace.server.edge.listen import listen, url_of
from headrace.server.start.run_file import RunFile

OTHERS_S = 10.0  # after the first is ready: how long the others are waited for before saying so
ADMIN_BACKLOG = 64
LONGEST_S = 86_400.0  # a server has no limit of its own on an answer

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """Everything that is decided before the first process starts."""

    release: Release
    config: ServerConfig
    shares: Sequence[Share]
    keys: Keys
    announcer: Announcer
    origins: Mapping[str, str] = field(default_factory=dict)
    offline: bool = False


def serve_replicas(plan: Plan, sock: socket.socket, admin: socket.socket | None = None) -> int:
    """Until a signal; returns the exit status. Raises the error of the first replica if none
    starts."""
    with asyncio.Runner(loop_factory=new_loop) as runner:
        return runner.run(_Life(plan, sock, admin).run())


def router_settings(config: ServerConfig, internal_key: str) -> RouterSettings:
    return RouterSettings(
        first_byte_s=LONGEST_S,
        whole_s=LONGEST_S,
        drain_s=config.drain_timeout_s,
        max_connections=config.max_connections,
        max_body_bytes=config.max_body_bytes,
        max_bodies_bytes=config.max_bodies_bytes,
        max_headers_bytes=config.max_headers_bytes,
        client_timeout_s=config.client_timeout_s,
        internal_key=internal_key,
        operator_key=config.metrics_key,
    )


class _Life:
    def __init__(self, plan: Plan, sock: socket.socket, admin: socket.socket | None) -> None:
        config = plan.config
        internal_key = secrets.token_urlsafe(32)
        settings = router_settings(config, internal_key)
        fleet = RollingFleet(settings)
        self._common = common = Common(
            internal=hashlib.sha256(internal_key.encode()).digest(),
            weights=plan.keys.weights,
            origins=plan.origins,
            offline=plan.offline,
            hang_timeout_s=config.hang_timeout_s,
            drain_s=config.drain_timeout_s,
        )
        self._heart = heart = Heart(fleet, settings, self._noted)
        self._slots = [
            Slot(number, share, fleet, common, heart.follow)
            for number, share in enumerate(plan.shares, start=1)
        ]
        self._roller = Roller(self._slots, common, plan.release)
        self._router = ReplicasRouter(
            fleet,
            settings,
            config=config,
            keys=plan.keys,
            slots=self._slots,
            roller=self._roller,
            scrape=lambda replica: getter(replica, settings),
        )
        self._plan, self._socket, self._admin_socket = plan, sock, admin
        self._settings = settings
        self._stopped = asyncio.Event()
        self._hangups: set[asyncio.Task[None]] = set()
        self._run_file: RunFile | None = None

    def _noted(self, replica: Replica, settings: RouterSettings) -> Get:
        """Heartbeats, which also tell when a replica last answered anything."""
        get = getter(replica, settings)

        async def noted(path: str) -> tuple[int, bytes]:
            found = await get(path)
            self._common.answered_s[replica.url] = time.monotonic()
            return found

        return noted

    async def run(self) -> int:
        self._on_signals()
        try:
            await self._serve()
        finally:
            self._heart.stop()
            await self._roller.stop()
            await asyncio.gather(*(slot.stop() for slot in self._slots))
            if self._run_file is not None:
                self._run_file.close()
        return 0

    async def _serve(self) -> None:
        starting = {asyncio.create_task(self._bring_up(slot)): slot for slot in self._slots}
        stopping = asyncio.create_task(self._stopped.wait())
        try:
            await self._first(starting, stopping)
            if self._stopped.is_set():
                return
            note = plan_connections(2 * self._settings.max_connections, BACKLOG).note
            if note:
                self._plan.announcer.note(note)
            listen(self._socket, BACKLOG)
            async with serving(self._router, self._socket) as edge, self._admin():
                others = asyncio.create_task(self._others(starting))
                await stopping
                others.cancel()
                await self._roller.stop()
                await drain(self._router, edge, self._settings.drain_s)
        finally:
            stopping.cancel()
            for task in starting:
                task.cancel()
            await asyncio.wait(starting)

    async def _bring_up(self, slot: Slot) -> HeadraceError | None:
        """A replica that starts is kept alive from then on."""
        plan = self._plan
        began_s = time.perf_counter()

        def told(message: messages.FromReplica) -> None:
            if isinstance(message, messages.Note):
                plan.announcer.replica_note(slot.number, message.text)

        try:
            await slot.start(plan.release, told)
        except HeadraceError as error:
            return error
        plan.announcer.replica(slot, time.perf_counter() - began_s)
        slot.keep()
        return None

    async def _first(
        self,
        starting: Mapping[asyncio.Task[HeadraceError | None], Slot],
        stopping: asyncio.Task[bool],
    ) -> None:
        """Until one is ready. Raises where none starts."""
        left = set(starting)
        while left:
            done, _ = await asyncio.wait({*left, stopping}, return_when=asyncio.FIRST_COMPLETED)
            if stopping in done or any(task.result() is None for task in done & left):
                return
            left -= done
        errors = [error for task in starting if (error := task.result()) is not None]
        raise errors[0]

    async def _others(self, starting: Mapping[asyncio.Task[HeadraceError | None], Slot]) -> None:
        """Says what there is; those that did not start are tried again."""
        plan = self._plan
        done, late = await asyncio.wait(starting, timeout=OTHERS_S)
        for task in done:
            if (error := task.result()) is not None:
                self._try_again(starting[task], error)
        url = url_of(self._socket)
        ready = [slot for slot in self._slots if slot.facts is not None]
        plan.announcer.ready(url, ready, len(self._slots), has_keys=len(plan.keys) > 0)
        facts = ready[0].facts
        assert facts is not None
        self._run_file = RunFile.write(
            url=url,
            model=facts.model,
            context_tokens=facts.context_tokens,
            has_keys=len(plan.keys) > 0,
        )
        for ending in asyncio.as_completed(late):
            error = await ending
            if error is not None:
                slot = next(each for each in self._slots if each.state == "waiting")
                self._try_again(slot, error)

    def _try_again(self, slot: Slot, error: HeadraceError) -> None:
        self._plan.announcer.replica_note(slot.number, f"does not start: {error.cause}")
        slot.release = self._plan.release
        slot.keep()

    @contextlib.asynccontextmanager
    async def _admin(self) -> AsyncIterator[None]:
        if self._admin_socket is None:
            yield
            return
        listen(self._admin_socket, ADMIN_BACKLOG)
        self._plan.announcer.note(f"the admin port is at {url_of(self._admin_socket)}")
        async with serving(self._router, self._admin_socket, AdminPort(self._router)):
            yield

    # -- signals ---------------------------------------------------------------------------------

    def _on_signals(self) -> None:
        loop = asyncio.get_running_loop()
        for number in (signal.SIGINT, signal.SIGTERM):
            loop.add_signal_handler(number, self._stop, number)
        loop.add_signal_handler(signal.SIGHUP, self._hang_up)

    def _stop(self, number: signal.Signals) -> None:
        if self._stopped.is_set():
            for slot in self._slots:
                slot.kill()
            log.warning("a second signal: stopped at once", extra={"event": "stopped"})
            os._exit(128 + number)
        self._router.is_draining = True
        self._stopped.set()

    def _hang_up(self) -> None:
        """SIGHUP: every replica is restarted, one after the other."""

        async def restart() -> None:
            try:
                await self._roller.begin()
            except HeadraceError as error:
                log.warning("SIGHUP: %s", error.cause, extra={"event": "not_rolled"})

        task = asyncio.create_task(restart())
        self._hangups.add(task)
        task.add_done_callback(self._hangups.discard)
