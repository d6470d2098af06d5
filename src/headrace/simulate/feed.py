"""Asks in the order of their time. A turn of a session comes when the turn before it has ended.

Reads its asks only as far as time has come, so that a workload may be as long as it likes. Knows no
engine: whoever serves the asks says when one has ended.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterable

from headrace.core.errors import InvalidRequestError
from headrace.workload.ask import Ask


class Feed:
    def __init__(self, asks: Iterable[Ask]) -> None:
        """`asks` are in order of `at_s`, except those that follow another one. Clients that never
        stop asking can't be read ahead of time: give such a workload a number of requests."""
        self._asks = iter(asks)
        self._next = next(self._asks, None)
        self._ready: list[tuple[float, int, Ask]] = []  # a heap
        self._held: dict[tuple[int, int], Ask] = {}  # by session and the turn they wait for
        self._ended: dict[tuple[int, int], float] = {}  # turns that nothing has followed yet
        self._order = 0
        self._at_s = float("-inf")

    @property
    def next_s(self) -> float | None:
        """When the next ask comes; None if there is none, or if it waits for another to end."""
        while self._next is not None and (not self._ready or self._next.at_s <= self._ready[0][0]):
            ask, self._next = self._next, next(self._asks, None)
            if ask.after_s is None:
                self._check_order(ask)
            self._take(ask)
        return self._ready[0][0] if self._ready else None

    def pop(self) -> tuple[float, Ask]:
        """The next ask, and when it comes. Only if `next_s` is not None."""
        at_s, _, ask = heapq.heappop(self._ready)
        return at_s, ask

    def ended(self, ask: Ask, at_s: float) -> None:
        """An ask has ended, well or not."""
        if ask.session is None:
            return
        turn = (ask.session, ask.turn)
        follower = self._held.pop(turn, None)
        if follower is None:
            self._ended[turn] = at_s
        else:
            self._push(follower, at_s)

    @property
    def held(self) -> int:
        """Asks that wait for another to end."""
        return len(self._held)

    def _check_order(self, ask: Ask) -> None:
        if ask.at_s < self._at_s:
            raise InvalidRequestError(
                f"A request at {ask.at_s} s comes after one at {self._at_s} s; expected requests "
                "in order of time.",
                "Sort them.",
                param="at_s",
            )
        self._at_s = ask.at_s

    def _take(self, ask: Ask) -> None:
        if ask.after_s is None or ask.session is None:
            heapq.heappush(self._ready, (ask.at_s, self._order, ask))
            self._order += 1
            return
        before = (ask.session, ask.turn - 1)
        ended_s = self._ended.pop(before, None)
        if ended_s is None:
            self._held[before] = ask
        else:
            self._push(ask, ended_s)

    def _push(self, ask: Ask, ended_s: float) -> None:
        at_s = max(ask.at_s, ended_s + (ask.after_s or 0.0))
        heapq.heappush(self._ready, (at_s, self._order, ask))
        self._order += 1
