"""Starts a router, runs it until a signal, and stops it without losing a request.

Knows the order of things: replicas are asked once, then the port listens.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import signal
import socket
import time
from collections.abc import AsyncIterator, Callable, Sequence

from headrace.core.errors import HeadraceError
from headrace.router.discover import Discovery, Source
from headrace.router.fleet import Fleet
from headrace.router.front import SWEEP_S, ClientConnection, Edge, Handler
from headrace.router.heartbeat import Heart
from headrace.router.prefill import Prefills
from headrace.router.router import Router
from headrace.router.settings import RouterSettings
from headrace.router.versions import Version
from headrace.server.access.keys import Keys
from headrace.server.edge.descriptors import plan_connections
from headrace.server.edge.listen import listen, url_of

BACKLOG = 2048
LOOK_S = 0.02
LAST_WORDS_S = 2.0  # to send what was written already

log = logging.getLogger(__name__)


class NoReplicaError(HeadraceError):
    """None of the replicas answers."""

    status = 503


def serve_router(
    versions: Sequence[Version],
    settings: RouterSettings,
    sock: socket.socket,
    *,
    keys: Keys | None = None,
    discover: Source | None = None,
    prefills: Callable[[], Prefills] | None = None,
    say: Callable[[str], None] = lambda line: None,
) -> int:
    """Until a signal; returns the exit status."""
    with asyncio.Runner(loop_factory=new_loop) as runner:
        return runner.run(_run(versions, settings, sock, keys, discover, prefills, say))


def new_loop() -> asyncio.AbstractEventLoop:
    try:
        import uvloop
    except ImportError:  # Windows has none
        return asyncio.new_event_loop()
    return uvloop.new_event_loop()


async def _run(
    versions: Sequence[Version],
    settings: RouterSettings,
    sock: socket.socket,
    keys: Keys | None,
    discover: Source | None,
    make_prefills: Callable[[], Prefills] | None,
    say: Callable[[str], None],
) -> int:
    fleet = Fleet(versions, settings)
    prefills = None if make_prefills is None else make_prefills()
    router = Router(fleet, settings, keys=keys, prefills=prefills)
    heart = Heart(fleet, settings)
    discovery = None if discover is None else Discovery(discover, fleet)
    if discovery is not None:
        await discovery.look()
    await heart.first()
    check_start(fleet, may_be_empty=discovery is not None)
    if prefills is not None:
        await prefills.start(fleet)
    for line in [*start_lines(fleet), *(prefills.lines() if prefills else ())]:
        say(line)
    plan = plan_connections(2 * settings.max_connections, BACKLOG)
    if plan.note:
        say(plan.note)
    listen(sock, BACKLOG)
    async with serving(router, sock) as edge:
        heart.follow()
        if prefills is not None:
            prefills.follow()
        following = discovery and asyncio.create_task(discovery.follow(heart.follow))
        say(f"routing at {url_of(sock)} by {settings.routing}; Ctrl-C stops")
        stopped = asyncio.Event()
        _on_signals(router, stopped)
        await stopped.wait()
        await drain(router, edge, settings.drain_s)
        router.shadows.stop()
        heart.stop()
        if prefills is not None:
            prefills.stop()
        if following:
            following.cancel()
    return 0


def check_start(fleet: Fleet, *, may_be_empty: bool = False) -> None:
    """Raises where no replica answers, or those of one version are not the same. Those that are
    found by name may come later."""
    fleet.check_mixed()
    if not may_be_empty and not fleet.takes_requests():
        why = "; ".join(f"{r.url}: {r.why_out}" for r in fleet.replicas)
        raise NoReplicaError(f"No replica answers. {why}.", "Start one, or check the URLs.")


def start_lines(fleet: Fleet) -> list[str]:
    lines = []
    for group in fleet.groups.values():
        version = group.version
        name = f"{version.name}: " if version.name else ""
        share = f", shadow of {version.shadow:.0%}" if version.shadow is not None else ""
        for replica in group.replicas.values():
            seen = replica.identity
            found = f"out: {replica.why_out}" if seen is None else seen.shown
            lines.append(f"{name}{replica.url}  {found}{share}")
    return lines


@contextlib.asynccontextmanager
async def serving(
    router: Router, sock: socket.socket, handler: Handler | None = None
) -> AsyncIterator[Edge]:
    """Accepts connections on a socket that listens. `handler` is for another port than clients'."""
    edge = Edge(settings=router.settings, handler=handler or router)
    if handler is None:
        router.open_connections = lambda: len(edge.connections)
    loop = asyncio.get_running_loop()
    server = await loop.create_server(lambda: ClientConnection(edge), sock=sock, backlog=BACKLOG)
    sweeping = asyncio.create_task(_sweep(edge))
    try:
        yield edge
    finally:
        sweeping.cancel()
        server.close()
        for connection in list(edge.connections):
            connection.close()


async def _sweep(edge: Edge) -> None:
    while True:
        await asyncio.sleep(SWEEP_S)
        edge.sweep(time.monotonic())


def _on_signals(router: Router, stopped: asyncio.Event) -> None:
    def on_signal(number: signal.Signals) -> None:
        if stopped.is_set():
            log.warning("a second signal: stopped at once", extra={"event": "stopped"})
            os._exit(128 + number)
        router.is_draining = True
        stopped.set()

    loop = asyncio.get_running_loop()
    for number in (signal.SIGINT, signal.SIGTERM):
        loop.add_signal_handler(number, on_signal, number)


async def drain(router: Router, edge: Edge, limit_s: float) -> None:
    """Running requests end; connections without one are closed."""
    edge.is_closing = True
    log.info(
        "stopping: %d requests running, given up to %g s; a second signal stops at once",
        router.counts.open_requests,
        limit_s,
        extra={"event": "drain"},
    )
    for connection in list(edge.connections):
        connection.close_if_idle()
    end_s = time.monotonic() + limit_s
    while router.counts.open_requests and time.monotonic() < end_s:
        await asyncio.sleep(LOOK_S)
    if left := router.counts.open_requests:
        log.warning("%d requests did not end in time and were cut", left)
        return
    end_s = time.monotonic() + LAST_WORDS_S
    while edge.connections and time.monotonic() < end_s:  # what was written is still being sent
        await asyncio.sleep(LOOK_S)
