"""Requests on their way into a server, through the one process that takes them all in.

That process is an event loop: it works on all requests that have come by the time it looks, a piece
of each in turn, and looks again when it is done with them. So a request that comes while it is idle
goes through at once; those that come meanwhile go through together, after the sum of their work.
What is no work but delay is added afterwards, and may be had by many at once. Knows requests as
things to be handed on; no engine.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Iterator
from typing import Generic, NamedTuple, TypeVar

Item = TypeVar("Item")


class _Coming(NamedTuple, Generic[Item]):
    item: Item
    work_s: float
    delay_s: float


class Intake(Generic[Item]):
    def __init__(self) -> None:
        self._working: list[_Coming[Item]] = []  # until `_done_s`
        self._done_s = math.inf
        self._waiting: list[_Coming[Item]] = []
        self._ready: list[tuple[float, int, Item]] = []  # a heap
        self._order = 0

    def __len__(self) -> int:
        return len(self._working) + len(self._waiting) + len(self._ready)

    def __iter__(self) -> Iterator[Item]:
        yield from (each.item for each in (*self._working, *self._waiting))
        yield from (entry[-1] for entry in self._ready)

    def offer(self, item: Item, at_s: float, *, work_s: float = 0.0, delay_s: float = 0.0) -> None:
        """One that has work comes not before those that were offered earlier."""
        if work_s <= 0:
            self._hand_on(item, at_s + delay_s)
            return
        self._advance(at_s)
        self._waiting.append(_Coming(item, work_s, delay_s))
        if not self._working:
            self._begin(at_s)

    @property
    def next_s(self) -> float:
        """When one is ready, or the work on some is done; infinity: never."""
        ready_s = self._ready[0][0] if self._ready else math.inf
        return min(ready_s, self._done_s)

    def take(self, now_s: float) -> Iterator[tuple[float, Item]]:
        """Those that are ready by now, and when each was."""
        self._advance(now_s)
        while self._ready and self._ready[0][0] <= now_s:
            ready_s, _, item = heapq.heappop(self._ready)
            yield ready_s, item

    def _advance(self, to_s: float) -> None:
        while self._working and self._done_s <= to_s:
            done_s = self._done_s
            for each in self._working:
                self._hand_on(each.item, done_s + each.delay_s)
            self._begin(done_s)

    def _begin(self, at_s: float) -> None:
        self._working, self._waiting = self._waiting, []
        work_s = math.fsum(each.work_s for each in self._working)
        self._done_s = at_s + work_s if self._working else math.inf

    def _hand_on(self, item: Item, ready_s: float) -> None:
        self._order += 1
        heapq.heappush(self._ready, (ready_s, self._order, item))
