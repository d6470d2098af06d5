"""Keeps an engine process alive: starts it, watches it, starts another when it dies or hangs.

After `max_restarts` failed starts in a row it gives up, and the server exits. Knows processes and
time; nothing of what the engine computes.
"""

from __future__ import annotations

import asyncio
import errno
import logging
import time
from collections.abc import Callable, Sequence
from enum import Enum, auto
from typing import Any

from headrace.core.errors import HeadraceError, UnavailableError
from headrace.server.edge.descriptors import Held
from headrace.server.link import wire
from headrace.server.link.engine_link import ENGINE_COMMAND, EngineLink
from headrace.server.link.snapshot import EngineSnapshot

FIRST_BACK_OFF_S, MOST_BACK_OFF_S = 0.25, 30.0
MOST_EXHAUSTED_S = (
    2.0  # longest pause between tries while the machine has no resources for a process
)
WATCH_S = 0.25
LATE_S = 0.5
STEADY_S = 60.0  # after an engine has lived this long, failures are counted from 0 again
SHUT_DOWN_S = 5.0
USUAL_START_S = 3.0  # assumed until a start was measured
# The machine has run out of a resource, which is no fault of the engine. EAGAIN: of processes.
EXHAUSTED = (errno.EMFILE, errno.ENFILE, errno.ENOMEM, errno.ENOBUFS, errno.EAGAIN)

log = logging.getLogger(__name__)


class State(Enum):
    STARTING = auto()
    READY = auto()
    WAITING = auto()  # to start again
    STOPPED = auto()


class EngineGoneError(HeadraceError):
    """The engine can't be restarted."""

    exit_status = 3


class Supervisor:
    def __init__(
        self,
        configure: wire.Configure,
        *,
        hang_timeout_s: float,
        max_restarts: int,
        on_phase: Callable[[wire.Phase], None] = lambda phase: None,
        on_ready: Callable[[wire.Ready, float], None] = lambda ready, seconds: None,
        command: Sequence[str] = ENGINE_COMMAND,
    ) -> None:
        self._command = command
        self._configure = configure
        self._hang_timeout_s = hang_timeout_s
        self._max_restarts = max_restarts
        self._on_phase = on_phase
        self._on_ready = on_ready
        self._link: EngineLink | None = None
        self._held = Held()
        self._start_s = USUAL_START_S
        self._began_s = self._back_at_s = time.monotonic()
        self.on_snapshot: Callable[[EngineSnapshot], None] = lambda snapshot: None
        self.state = State.STARTING
        self.restarts = 0  # since the server started
        self.facts: wire.Ready | None = None  # reported by the last engine that became ready

    @property
    def engine(self) -> EngineLink:
        """The engine, if it is ready to take requests."""
        if self.state is State.READY and self._link is not None:
            return self._link
        what = "is starting" if self.restarts == 0 else "is being restarted"
        if self.state is State.STOPPED:
            what = "has stopped"
        raise UnavailableError(
            f"The engine {what}.", "Try again shortly.", retry_after_s=self.retry_after_s()
        )

    def retry_after_s(self) -> float:
        """Seconds until the engine should be ready again, estimated from its last start."""
        return max(1.0, self._back_at_s - time.monotonic())

    def fail_requests(self, error: HeadraceError) -> None:
        """Stop watching and end the engine process."""
        if self._link is not None:
            self._link.fail_streams(error)

    def kill(self) -> None:
        """Kill the engine process without asking it to end."""
        if self._link is not None:
            self._link.kill()

    async def run(self) -> None:
        """Runs until cancelled; raises if the engine can't start, or can't be restarted."""
        try:
            await self._keep_alive()
        finally:
            self._held.close()

    async def _keep_alive(self) -> None:
        failures = 0
        while True:
            self._link = link = await self._start()
            link.on_snapshot = lambda snapshot: self.on_snapshot(snapshot)  # as it is then
            cause = await self._watch(link)
            link.fail_streams(
                UnavailableError(
                    f"The engine {cause} while computing this request.",
                    "Send it again: the engine is being restarted.",
                    retry_after_s=FIRST_BACK_OFF_S + self._start_s,
                )
            )
            if link.served or time.monotonic() - self._began_s > STEADY_S:
                failures = 0
            failures += 1
            if failures > self._max_restarts:
                self.state = State.STOPPED
                raise EngineGoneError(
                    f"The engine {cause}; that was failure {failures} in a row.",
                    "The log above says why; --max-restarts sets how many are allowed.",
                )
            back_off_s = self._wait_s(failures)
            self.restarts += 1
            log.error(
                "the engine %s; starting another in %.2f s (failure %d in a row)",
                cause,
                back_off_s,
                failures,
                extra={"event": "engine_lost", "engine_pid": link.pid},
            )
            await asyncio.sleep(back_off_s)

    async def _start(self) -> EngineLink:
        """Starts an engine process. While the machine lacks the resources for one, it keeps trying:
        that is no fault of the engine and does not count as a failed start."""
        tries = 0
        while True:
            self.state = State.STARTING
            self._began_s = time.monotonic()
            self._back_at_s = self._began_s + self._start_s
            try:
                with self._held.lent():
                    return await EngineLink.start(self._command, self._configure, self._on_phase)
            except OSError as error:
                if error.errno not in EXHAUSTED:
                    self.state = State.STOPPED
                    raise EngineGoneError(
                        f"The engine's process can't be started: {error}.",
                        "Check that this Python interpreter is still installed.",
                    ) from error
                tries += 1
                back_off_s = min(self._wait_s(tries), MOST_EXHAUSTED_S)
                log.warning(
                    "can't start an engine process now (%s); trying again in %.2f s",
                    error.strerror or error,
                    back_off_s,
                    extra={"event": "engine_not_started"},
                )
            await asyncio.sleep(back_off_s)

    def _wait_s(self, tries: int) -> float:
        """Seconds to wait after that many failures; sets when the engine should be ready."""
        back_off_s: float = min(FIRST_BACK_OFF_S * 2 ** min(tries - 1, 16), MOST_BACK_OFF_S)
        self.state = State.WAITING
        self._back_at_s = time.monotonic() + back_off_s + self._start_s
        return back_off_s

    async def _watch(self, link: EngineLink) -> str:
        """Runs one engine from its start to its end; returns how it ended."""
        ended = asyncio.create_task(link.lost())
        try:
            first: set[asyncio.Future[Any]] = {ended, link.ready}
            await asyncio.wait(first, return_when=asyncio.FIRST_COMPLETED)
            if link.ready.done() and (error := link.ready.exception()) is None:
                self._start_s = time.monotonic() - self._began_s
                self.facts = link.ready.result()
                self.state = State.READY
                self._on_ready(self.facts, self._start_s)
            elif link.ready.done() and not isinstance(error, UnavailableError):
                await ended
                self.state = State.STOPPED
                link.ready.result()  # raises the engine's error
            while not ended.done():
                looked_s = time.monotonic()
                await asyncio.wait({ended}, timeout=WATCH_S)
                if time.monotonic() - looked_s > WATCH_S + LATE_S:
                    # This process itself was stalled: heartbeats are waiting to be read.
                    link.forgive()
                stuck_s = link.stuck_s()
                if self.state is State.READY and stuck_s > self._hang_timeout_s:
                    link.kill()
                    await ended
                    return f"made no progress for {stuck_s:.1f} s and was killed"
            status = ended.result()
            return f"was killed by signal {-status}" if status < 0 else f"ended with {status}"
        except asyncio.CancelledError:
            await link.shut_down(SHUT_DOWN_S)
            raise
        finally:
            ended.cancel()
            if self.state is State.READY:
                self.state = State.WAITING
