"""Open files: how many connections there may be with them, and some held back for what must work.

Clients cost a descriptor each, and what keeps the server alive needs some too: a new engine's
socket, a log, a scrape of /proc. Knows numbers; not what the descriptors are for.
"""

from __future__ import annotations

import contextlib
import os
import sys
from collections.abc import Iterator
from dataclasses import dataclass

OWN = 64  # beside clients: a server at rest has about 25, an engine's start takes 10 for a moment
HELD = 16  # of these, kept until an engine is started
MOST_SPARE = 256  # connections beyond the bound: probes, and those being told that it is reached
_MANY = 1 << 20  # where there is no limit


@dataclass(frozen=True, slots=True)
class Plan:
    """What the limit on open files allows for."""

    max_connections: int
    max_spare: int
    note: str | None = None  # for the operator, where it is less than was asked for


def plan_connections(wanted: int, backlog: int, own: int = OWN) -> Plan:
    """Raises the soft limit as far as is needed and allowed. A burst of a whole backlog may be
    accepted before any of it is looked at: room for that is wanted, but not insisted on."""
    limit = _raise_limit(wanted + MOST_SPARE + backlog + own)
    return fit(wanted, limit, own)


def fit(wanted: int, limit: int, own: int = OWN) -> Plan:
    spare = max(4, min(MOST_SPARE, limit // 8))
    most = max(1, limit - own - spare)
    if wanted <= most:
        return Plan(wanted, spare)
    return Plan(
        most,
        spare,
        f"max_connections is {most} rather than {wanted}: this process may have {limit} files open "
        "(ulimit -n; LimitNOFILE= in a systemd unit)",
    )


def _raise_limit(wanted: int) -> int:
    """What the limit is afterwards."""
    if sys.platform == "win32":
        return _MANY
    import resource

    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft == resource.RLIM_INFINITY:
        return _MANY
    most = wanted if hard == resource.RLIM_INFINITY else min(wanted, hard)
    if most > soft:
        with contextlib.suppress(OSError, ValueError):  # macOS has bounds that it does not tell
            resource.setrlimit(resource.RLIMIT_NOFILE, (most, hard))
            soft = most
    return soft


class Held:
    """Descriptors kept for an engine's start: a restart must not fail for want of a few. The first
    start is when nobody is there yet: they are taken after it."""

    def __init__(self, count: int = HELD) -> None:
        self._count = count
        self._held: list[int] = []

    def _take(self) -> None:
        with contextlib.suppress(OSError):  # there are none now: another time
            while len(self._held) < self._count:
                self._held.append(os.open(os.devnull, os.O_RDONLY | getattr(os, "O_CLOEXEC", 0)))

    @contextlib.contextmanager
    def lent(self) -> Iterator[None]:
        self.close()
        try:
            yield
        finally:
            self._take()

    def close(self) -> None:
        while self._held:
            os.close(self._held.pop())
