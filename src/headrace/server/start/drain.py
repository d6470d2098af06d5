"""How a server stops: it is not ready at once, running requests finish, then the process ends.

The first signal starts the drain, which has a timeout; requests that have not finished by then end
with an error. The second signal stops at once. Knows running requests, not what they are.
"""

from __future__ import annotations

import asyncio
import logging
import os
import signal
import time

from headrace.core.errors import UnavailableError
from headrace.server.edge.http_server import HttpServer
from headrace.server.request.service import Service

LOOK_S = 0.02
LAST_WORDS_S = 2.0  # time to send the error to clients whose requests were ended

log = logging.getLogger(__name__)


class Drain:
    def __init__(self, service: Service, server: HttpServer) -> None:
        self._service = service
        self._server = server
        self._draining: asyncio.Task[None] | None = None

    def listen(self) -> None:
        """Take over SIGINT and SIGTERM."""
        loop = asyncio.get_running_loop()
        for number in (signal.SIGINT, signal.SIGTERM):
            loop.add_signal_handler(number, self.on_signal, number)

    def on_signal(self, number: signal.Signals) -> None:
        if self._draining is not None:
            self._service.supervisor.kill()
            log.warning("a second signal: stopped at once", extra={"event": "stopped"})
            os._exit(128 + number)
        self._service.draining = True
        self._service.bodies.end(
            UnavailableError(
                "The server is shutting down, and this request had not arrived completely.",
                "Send it to another replica, or again when this one is back.",
                retry_after_s=self._service.config.drain_timeout_s,
            )
        )
        self._draining = asyncio.create_task(self._drain())

    async def _drain(self) -> None:
        config = self._service.config
        running = len(self._server.server_state.tasks)
        log.info(
            "stopping: %d requests running, given up to %g s; a second signal stops at once",
            running,
            config.drain_timeout_s,
            extra={"event": "drain", "running": running},
        )
        await self._wait_idle(config.drain_timeout_s)
        left = len(self._server.server_state.tasks)
        if left:
            log.warning(
                "%d requests did not finish within %g s and were ended",
                left,
                config.drain_timeout_s,
                extra={"event": "drain_timeout", "running": left},
            )
            self._service.supervisor.fail_requests(
                UnavailableError(
                    "The server was shut down before this request finished.",
                    "Send it again: to another replica, or when this one is back.",
                    retry_after_s=1.0,
                )
            )
            await self._wait_idle(LAST_WORDS_S)
        self._server.should_exit = True
        self._server.force_exit = bool(self._server.server_state.tasks)

    async def _wait_idle(self, limit_s: float) -> None:
        end_s = time.monotonic() + limit_s
        while self._server.server_state.tasks and time.monotonic() < end_s:
            await asyncio.sleep(LOOK_S)
