"""One place for a replica: its port and its share stay, its process comes and goes.

Starts a process, brings it into the fleet when it is ready, starts another with growing pauses when
it dies or hangs, and takes it out without losing a request. Knows one replica; roll.py knows all.
"""

from __future__ import annotations

import asyncio
import logging
import socket
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace

from headrace.client.connection import Address
from headrace.core.errors import HeadraceError
from headrace.replicas import messages
from headrace.replicas.child import Child, Told
from headrace.replicas.fleet import RollingFleet
from headrace.replicas.release import Release, for_replicas
from headrace.replicas.shares import Share
from headrace.router.replica import Replica
from headrace.server.api.responses.store import StoredResponse

HOST = "127.0.0.1"
FIRST_BACK_OFF_S, MOST_BACK_OFF_S = 0.25, 30.0
STEADY_S = 60.0  # after a process has lived this long, failures are counted from 0 again
LOOK_S = 0.005
WATCH_S = 0.25
STOP_S = 8.0  # from SIGTERM to SIGKILL: its own drain, its last words, the engine's end

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class Common:
    """What all replicas have in common."""

    internal: bytes  # digest of the internal key
    weights: Mapping[str, int]
    origins: Mapping[str, str]
    offline: bool = False
    hang_timeout_s: float = 5.0
    drain_s: float = 30.0
    answered_s: dict[str, float] = field(
        default_factory=dict
    )  # by URL: the last heartbeat's answer


class Slot:
    def __init__(
        self,
        number: int,
        share: Share,
        fleet: RollingFleet,
        common: Common,
        follow: Callable[[], None],
    ) -> None:
        """`follow` begins heartbeats of what is new in the fleet, and ends those of the others."""
        self.number, self.share = number, share
        self._fleet, self._common, self._follow = fleet, common, follow
        self._reserved = reserve_port()
        port = self._reserved.getsockname()[1]
        self.address = Address(scheme="http", host=HOST, port=port, path="")
        self.release: Release | None = None  # of the process that runs, or ran last
        self.facts: messages.Ready | None = None
        self.state = "starting"  # ready, draining, restarting, waiting (to start again), stopped
        self.why = ""  # it is not ready
        self.restarts = 0  # that nobody asked for
        self._child: Child | None = None
        self._replica: Replica | None = None
        self._stored: Mapping[str, StoredResponse] = {}
        self._keeping: asyncio.Task[None] | None = None

    @property
    def pid(self) -> int | None:
        return None if self._child is None or not self._child.is_alive else self._child.pid

    @property
    def is_kept(self) -> bool:
        """It has been started, or is tried again and again."""
        return self._keeping is not None

    @property
    def takes_requests(self) -> bool:
        return self._replica is not None and self._replica.is_member

    # -- starting --------------------------------------------------------------------------------

    async def start(self, release: Release, told: Told = lambda message: None) -> messages.Ready:
        """Returns when it is ready and in the fleet. Raises StartError."""
        self.state, self.why = "starting", ""
        child = self._child = await self._spawn(release, told)
        try:
            found = await asyncio.shield(child.begun)
        except BaseException as error:
            self.why = str(error) if isinstance(error, HeadraceError) else "not started"
            await child.stop(0.0)
            self.state = "waiting"
            raise
        assert isinstance(found, messages.Ready)
        self.release, self.facts = release, found
        self._stored = {}
        replica = self._enter(found)
        while not replica.is_up and child.is_alive:
            await asyncio.sleep(LOOK_S)
        if not child.is_alive or replica.kept_out:
            await child.stop(STOP_S)
            self.state, self.why = "waiting", replica.kept_out or f"it {child.ended.result()}"
            raise messages.StartError(
                f"Replica {self.number} was ready, and takes no requests: {self.why}.",
                "The log above says more.",
            )
        self.state = "ready"
        return found

    async def _spawn(self, release: Release, told: Told) -> Child:
        share, common = self.share, self._common
        begin = messages.Begin(
            number=self.number,
            socket=-1,
            path=release.path,
            typed=release.typed,
            server=for_replicas(release.server),
            engine=replace(
                release.engine,
                threads=share.threads or release.engine.threads,
                memory_share=share.memory_bytes,
            ),
            internal=common.internal,
            weights=common.weights,
            origins=common.origins,
            cpus=share.cpus,
            offline=True,
            checked=release.checked,
            keeps_names=release.keeps_names,
            stored=self._stored,
        )
        with bind_port(self.address.port) as listening:
            return await Child.start(begin, listening=listening, gpus=share.gpus, told=told)

    def _enter(self, facts: messages.Ready) -> Replica:
        """After a crash the same replica comes back, as the router saw it; else it is a new one."""
        old = self._replica
        if old is not None and self._fleet.is_in(old, facts.fingerprint):
            return old
        if old is not None:
            self._fleet.take_out(old)
        self._replica = new = self._fleet.enter(facts.fingerprint, self.address)
        self._follow()
        return new

    # -- keeping it alive ------------------------------------------------------------------------

    def keep(self) -> None:
        """From now on, until it is taken out or stopped."""
        self._keeping = asyncio.create_task(self._keep())

    async def _keep(self) -> None:
        failures = 0
        while True:
            began_s = time.monotonic()
            if (child := self._child) is not None and self.state == "ready":
                words = await self._watch(child)
                self.why = f"its process {words}"
                if self._replica is not None:
                    self._replica.went_out(self.why)
                log.error(
                    "replica %d %s; starting another",
                    self.number,
                    words,
                    extra={"event": "replica_lost", "replica_pid": child.pid},
                )
                self.restarts += 1
            failures = 1 if time.monotonic() - began_s > STEADY_S else failures + 1
            self.state = "waiting"
            await asyncio.sleep(min(FIRST_BACK_OFF_S * 2 ** min(failures - 1, 16), MOST_BACK_OFF_S))
            release = self.release
            assert release is not None
            try:
                await self.start(release)
            except HeadraceError as error:
                log.error(
                    "replica %d does not start: %s",
                    self.number,
                    error.cause,
                    extra={"event": "replica_not_started"},
                )
            else:
                log.info("replica %d is back", self.number, extra={"event": "replica_back"})

    async def _watch(self, child: Child) -> str:
        """Until its process ends, or is killed because it answers nothing any more."""
        common, url = self._common, self.address.url
        common.answered_s[url] = time.monotonic()
        while child.is_alive:
            looked_s = time.monotonic()
            await asyncio.wait({child.ended}, timeout=WATCH_S)
            now_s = time.monotonic()
            if now_s - looked_s > WATCH_S + 1.0:  # this process itself was stopped
                common.answered_s[url] = now_s
            silent_s = now_s - common.answered_s[url]
            if child.is_alive and silent_s > common.hang_timeout_s:
                child.kill()
                await asyncio.wait({child.ended})
                return f"answered nothing for {silent_s:.1f} s and was killed"
        return child.ended.result()

    # -- taking it out ---------------------------------------------------------------------------

    async def take_out(self) -> None:
        """No new requests; those that run end, within the drain; then its process ends."""
        await self._stop_keeping()
        child, replica = self._child, self._replica
        self.state = "draining"
        if replica is not None:
            self._fleet.take_out(replica)
            self._follow()  # no more heartbeats
            end_s = time.monotonic() + self._common.drain_s
            while replica.running and time.monotonic() < end_s:
                await asyncio.sleep(LOOK_S)
            if replica.running:
                log.warning(
                    "replica %d: %d requests did not end within %g s and are cut",
                    *(self.number, replica.running, self._common.drain_s),
                )
        self._replica = None
        self.state = "restarting"
        if child is not None and child.is_alive:
            self._stored = await child.retire()
            await child.stop(STOP_S)

    async def stop(self) -> None:
        """For good."""
        await self._stop_keeping()
        self.state = "stopped"
        if self._child is not None:
            await self._child.stop(STOP_S)
        self._reserved.close()

    def kill(self) -> None:
        if self._child is not None:
            self._child.kill()

    async def _stop_keeping(self) -> None:
        keeping, self._keeping = self._keeping, None
        if keeping is not None:
            keeping.cancel()
            await asyncio.wait({keeping})


def reserve_port() -> socket.socket:
    """A port that no other program gets while this socket is open. It never listens: connections
    to the port are refused while no replica listens on it."""
    return bind_port(0)


def bind_port(port: int) -> socket.socket:
    sock = socket.socket(socket.AF_INET, socket.SOCK_STREAM)
    try:
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
        sock.bind((HOST, port))
    except BaseException:
        sock.close()
        raise
    return sock
