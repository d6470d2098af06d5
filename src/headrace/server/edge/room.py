"""Which connections have a place, and which one is dropped when a new one arrives.

A connection that is being answered, or sends its body, keeps its place. One that is silent, slow
with its headers or idle between requests makes room for a new one, the oldest first. Where none can
be dropped, the new one gets a spare place: enough for a probe, or for a 503. Everything takes
constant time, since tens of thousands may arrive. Knows no sockets and no HTTP.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable
from enum import StrEnum
from typing import Protocol

GRACE_S = (
    1.0  # a new connection's first bytes may be on their way: until then others are dropped first
)
STALLED_S = 2.0  # a connection whose body has stalled this long may be dropped


class Phase(StrEnum):
    SILENT = "silent"  # has not sent a byte yet
    HEADERS = "headers"  # has sent a part of its headers
    BODY = "body"
    BUSY = "busy"  # its request is complete and being answered
    IDLE = "idle"  # between requests
    LINGERING = "lingering"  # was answered and is still sending
    UNREAD = "unread"  # was answered and has not read all of it


# The order in which connections are dropped, and how old each must be.
_ORDER = (
    (Phase.SILENT, GRACE_S),
    (Phase.HEADERS, GRACE_S),
    (Phase.IDLE, 0.0),
    (Phase.SILENT, 0.0),
    (Phase.HEADERS, 0.0),
    (Phase.LINGERING, 0.0),
    (Phase.BODY, STALLED_S),
    (Phase.UNREAD, STALLED_S),
)
# The reasons for which connections are dropped without an answer.
DROPS = (
    *(f"evicted_{phase}" for phase in dict.fromkeys(phase for phase, _ in _ORDER)),
    *("evicted_spare", "full", "silent", "slow_headers", "large_headers", "malformed", "stalled"),
)


class Member(Protocol):
    def abort(self) -> None:
        """Drop the client at once."""
        ...

    @property
    def has_unread(self) -> bool:
        """Whether part of its answer is still unsent."""
        ...


class Room:
    def __init__(
        self,
        max_connections: int,
        max_spare: int,
        dropped: Counter[str] | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.max_connections = max_connections
        self._max_spare = max_spare
        self.dropped = Counter[str]() if dropped is None else dropped
        self._clock = clock
        self._phases: dict[Member, Phase] = {}  # of all connections with a place
        # When each entered its phase, the oldest first.
        self._members: dict[Phase, dict[Member, float]] = {phase: {} for phase in Phase}
        self._spare: dict[Member, None] = {}

    def __len__(self) -> int:
        return len(self._phases) + len(self._spare)

    def count(self, phase: Phase) -> int:
        return len(self._members[phase])

    def enter(self, member: Member) -> bool:
        """Whether it got a regular place; else it has a spare one."""
        if len(self._phases) < self.max_connections or self._evict():
            self._put(member, Phase.SILENT)
            return True
        if len(self._spare) >= self._max_spare:
            self._drop(next(iter(self._spare)), "evicted_spare")
        self._spare[member] = None
        return False

    def is_spare(self, member: Member) -> bool:
        return member in self._spare

    def move(self, member: Member, phase: Phase) -> None:
        """Sets its phase. A body that goes on arriving counts as new."""
        before = self._phases.get(member)
        if before is not None and (before is not phase or phase is Phase.BODY):
            del self._members[before][member]
            self._put(member, phase)

    def leave(self, member: Member) -> None:
        self._spare.pop(member, None)
        phase = self._phases.pop(member, None)
        if phase is not None:
            del self._members[phase][member]

    def _put(self, member: Member, phase: Phase) -> None:
        self._phases[member] = phase
        self._members[phase][member] = self._clock()

    def _evict(self) -> bool:
        now_s = self._clock()
        while (idle := next(iter(self._members[Phase.IDLE]), None)) and idle.has_unread:
            self.move(idle, Phase.UNREAD)
        for phase, least_s in _ORDER:
            member = next(iter(self._members[phase]), None)
            if member is not None and now_s - self._members[phase][member] >= least_s:
                self._drop(member, f"evicted_{phase}")
                return True
        return False

    def _drop(self, member: Member, why: str) -> None:
        self.leave(member)
        self.dropped[why] += 1
        member.abort()
