"""Copies of requests for shadow versions: sent, read to the end, dropped.

Nothing waits for a shadow: where too many are under way, a copy is left out and counted. Knows
exchanges; the client of each is nobody.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import replace

from headrace.core.errors import HeadraceError
from headrace.policies.routing import Wanted
from headrace.router.exchange import Exchange, Way
from headrace.router.fleet import Fleet
from headrace.router.metrics import Counts
from headrace.router.request import Request
from headrace.router.settings import RouterSettings
from headrace.router.upstream import Head, Upstream

MOST_AT_ONCE = 64
MOST_BODY_BYTES = 1 << 20  # larger ones are not copied


class Nobody:
    """Takes an answer and keeps its status."""

    def __init__(self) -> None:
        self.outcome = "lost"
        self.write: Callable[[bytes], None] = _drop

    def begin(self, head: Head, early: bytes, upstream: Upstream) -> Callable[[bytes], None]:
        self.outcome = str(head.status)
        return _drop

    def answer(self, head: Head, body: bytes) -> None:
        self.outcome = str(head.status)

    def refuse(self, error: HeadraceError) -> None:
        self.outcome = "lost"

    def cut(self, end: bytes) -> None:
        self.outcome = "lost"


def _drop(data: bytes) -> None:
    pass


class Shadows:
    def __init__(self, fleet: Fleet, settings: RouterSettings, counts: Counts) -> None:
        self._fleet, self._settings, self._counts = fleet, settings, counts
        self._uncounted = Counts()  # a shadow's retries are not those of clients
        self._tasks: set[asyncio.Task[None]] = set()

    def copy(self, request: Request, wanted: Wanted, headers: bytes) -> None:
        """To each shadow whose turn it is."""
        for name in self._fleet.shadows_for():
            if len(self._tasks) >= MOST_AT_ONCE or len(request.body) > MOST_BODY_BYTES:
                self._counts.shadowed[name, "left out"] += 1
                continue
            way = Way(wanted=wanted, version=name, headers=headers, stays=True)
            task = asyncio.create_task(self._send(name, replace(request), way))
            self._tasks.add(task)
            task.add_done_callback(self._tasks.discard)

    async def _send(self, name: str, request: Request, way: Way) -> None:
        nobody = Nobody()
        exchange = Exchange(self._fleet, self._settings, self._uncounted, nobody, request, way)
        try:
            await exchange.run()
        finally:
            self._counts.shadowed[name, nobody.outcome] += 1

    def stop(self) -> None:
        for task in self._tasks:
            task.cancel()
