"""Asks every replica, again and again, whether it lives, what it serves and how full it is.

Heartbeats begin twice in each `heartbeat_s`. One that is not answered by the time the next should
begin makes its replica late: it gets no new requests while others take them, so within
`heartbeat_s` of its last sign of life, until some in a row are answered in time. One that fails, or
has no answer within `heartbeat_s`, takes its replica out; the first that succeeds brings it back,
after a look at what it serves now. Knows what Headrace, vLLM, SGLang and llama-server answer;
decides by fleet.py.
"""

from __future__ import annotations

import asyncio
import json
import logging
import time
from collections.abc import Awaitable, Callable
from typing import Any

from headrace.client.connection import Connections, Unreachable
from headrace.core.errors import HeadraceError
from headrace.router.fleet import Fleet
from headrace.router.replica import Identity, Replica
from headrace.router.settings import RouterSettings

MAX_SHOWN_MODELS = 32

log = logging.getLogger(__name__)

LATE_BEATS = 8  # in a row, of the last replica that takes requests


class Late(Unreachable):
    """It may only be busy."""


# A GET of a path: status and body. Raises Unreachable.
Get = Callable[[str], Awaitable[tuple[int, bytes]]]


def getter(replica: Replica, settings: RouterSettings) -> Get:
    """Over a connection of its own, which is kept while it works."""
    connections: Connections | None = None

    async def get(path: str) -> tuple[int, bytes]:
        nonlocal connections
        try:
            async with asyncio.timeout(settings.heartbeat_s):
                if connections is None:
                    opened = Connections(replica.address)
                    await opened.resolve()
                    connections = opened
                return await connections.get(path, settings.internal_key, settings.heartbeat_s)
        except TimeoutError:
            connections = _close(connections)
            raise Late(f"no answer to {path} within {settings.heartbeat_s:g} s") from None
        except HeadraceError as error:
            connections = _close(connections)
            raise Unreachable(error.cause.rstrip(".")) from None
        except OSError as error:
            connections = _close(connections)
            raise Unreachable(error.strerror or str(error)) from None
        except asyncio.CancelledError:
            connections = _close(connections)
            raise

    return get


def _close(connections: Connections | None) -> Connections | None:
    if connections is not None:
        connections.close()
    return None


async def beat(replica: Replica, fleet: Fleet, get: Get) -> None:
    """One heartbeat: up or out, and kept out if it serves something else."""
    try:
        if replica.identity is None or not replica.is_up:
            identity = await identify(get)
        else:
            identity = replica.identity
        path = "/ready" if identity.is_headrace else "/health"
        status, _ = await get(path)
        if status not in (200, 404):  # 404: a server without it lives all the same
            raise Unreachable(f"{path} answered {status}")
        load = await read_load(get) if identity.is_headrace else {}
    except Unreachable as error:
        replica.late_beats += 1
        if isinstance(error, Late) and _may_be_late(replica, fleet):
            return
        replica.identity = None
        replica.went_out(error.cause.rstrip("."))
        if isinstance(error, Late):
            replica.was_late()
        return
    replica.late_beats = 0
    was_out = replica.ejections > 0 and not replica.is_up
    replica.load = load
    replica.came_up()
    fleet.group_of(replica).admit(replica, identity)
    if was_out and not replica.kept_out:
        log.info("%s is back: %s", replica.url, identity.shown, extra={"event": "replica_back"})


def _may_be_late(replica: Replica, fleet: Fleet) -> bool:
    """The last one that takes requests has some more heartbeats: on a machine that has too much to
    do a late answer is better than none."""
    if not replica.is_member or replica.late_beats > LATE_BEATS:
        return False
    others = fleet.group_of(replica).replicas.values()
    return not any(each.is_member for each in others if each is not replica)


async def identify(get: Get) -> Identity:
    """Headrace tells its fingerprint; others are known by their list of models."""
    status, body = await get("/v1/models")
    if status in (401, 403):
        raise Unreachable(f"/v1/models answered {status}: the internal key is not accepted")
    if status != 200:
        raise Unreachable(f"/v1/models answered {status}")
    listed = _object(body).get("data")
    cards = [card for card in listed if isinstance(card, dict)] if isinstance(listed, list) else []
    models = tuple(sorted(str(card.get("id", "")) for card in cards))[:MAX_SHOWN_MODELS]
    if not models:
        raise Unreachable("/v1/models lists no model")
    status, body = await get("/version")
    fingerprint = _object(body).get("fingerprint") if status == 200 else None
    if isinstance(fingerprint, str):
        if not fingerprint:
            raise Unreachable("its engine is starting")
        return Identity(
            fingerprint=fingerprint, models=models, is_headrace=True, cards=tuple(cards)
        )
    return Identity(fingerprint=", ".join(models), models=models, cards=tuple(cards))


async def read_load(get: Get) -> dict[str, object]:
    """Empty where the key does not open it."""
    status, body = await get("/load")
    return _object(body) if status == 200 else {}


def _object(body: bytes) -> dict[str, Any]:
    try:
        value = json.loads(body)
    except (ValueError, RecursionError):
        return {}
    return value if isinstance(value, dict) else {}


class Heart:
    """Beats for all replicas, each on its own, so that a silent one delays no other."""

    def __init__(
        self,
        fleet: Fleet,
        settings: RouterSettings,
        get_of: Callable[[Replica, RouterSettings], Get] = getter,
    ) -> None:
        self._fleet, self._settings, self._get_of = fleet, settings, get_of
        self._tasks: dict[Replica, asyncio.Task[None]] = {}
        self._gets: dict[Replica, Get] = {}

    async def first(self) -> None:
        """One beat of each, at the same time."""
        await asyncio.gather(*(self._beat(replica) for replica in self._fleet.replicas))

    def follow(self) -> None:
        """Begins to beat for replicas that are new, and stops for those that are gone."""
        present = set(self._fleet.replicas)
        for replica in present - self._tasks.keys():
            self._tasks[replica] = asyncio.create_task(self._run(replica))
        for replica in self._tasks.keys() - present:
            self._tasks.pop(replica).cancel()
            self._gets.pop(replica, None)

    def stop(self) -> None:
        for task in self._tasks.values():
            task.cancel()
        self._tasks = {}

    async def _run(self, replica: Replica) -> None:
        loop, half_s = asyncio.get_running_loop(), self._settings.heartbeat_s / 2
        began_s = loop.time()
        if not replica.is_up:  # a new one
            await self._beat(replica)
        while True:
            await asyncio.sleep(max(0.0, began_s + half_s - loop.time()))
            began_s = loop.time()
            late = loop.call_later(half_s, replica.was_late)
            try:
                await self._beat(replica)
            finally:
                late.cancel()

    async def _beat(self, replica: Replica) -> None:
        get = self._gets.setdefault(replica, self._get_of(replica, self._settings))
        began_s = time.monotonic()
        try:
            await beat(replica, self._fleet, get)
            if replica.is_up and time.monotonic() - began_s < self._settings.heartbeat_s / 2:
                replica.was_in_time()
        except Exception as error:  # heartbeats must go on, whatever a replica says
            log.exception("a heartbeat failed", extra={"event": "fault"})
            replica.went_out(f"unexpected {type(error).__name__}")
