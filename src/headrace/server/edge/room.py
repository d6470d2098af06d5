"""Who of all connections has a place, and who loses it when another comes.

A connection that is being answered, or sends its body, keeps its place. One that says nothing, is
slow with its headers or waits for its next request makes room for a newcomer, the oldest first.
Where none can go a newcomer gets a spare place: enough for a probe, and for being told so. All in
constant time, for they may come by the ten thousand. Knows no sockets and no HTTP.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable
from enum import StrEnum
from typing import Protocol

GRACE_S = 1.0  # a newcomer's first bytes are on their way: before that, others go first
STALLED_S = 2.0  # a body of which nothing came for so long has no right to its place


class Phase(StrEnum):
    SILENT = "silent"  # has not said a word yet
    HEADERS = "headers"  # has begun a request
    BODY = "body"
    BUSY = "busy"  # its request is whole and is being answered
    IDLE = "idle"  # between requests
    LINGERING = "lingering"  # was answered, and is still sending
    UNREAD = "unread"  # was answered, and has not read all of it


# Who goes first, and how old it must be.
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
# What became of connections that were not answered. As many as there are here.
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
        """Part of its answer is still here."""
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
        self._phases: dict[Member, Phase] = {}  # of all that have a place
        # Each since when, the oldest first.
        self._members: dict[Phase, dict[Member, float]] = {phase: {} for phase in Phase}
        self._spare: dict[Member, None] = {}

    def __len__(self) -> int:
        return len(self._phases) + len(self._spare)

    def count(self, phase: Phase) -> int:
        return len(self._members[phase])

    def enter(self, member: Member) -> bool:
        """Whether it has a place of its own; else it has a spare one."""
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
        """It is in this phase now. A body that goes on is as good as new."""
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
