"""File descriptors: how many connections the limit allows, and a reserve for the server itself.

Each client needs a descriptor, and so does the server: for a new engine's socket, a log file, a
read of /proc. Knows numbers; not what the descriptors are for.
"""

from __future__ import annotations

import contextlib
import os
import sys
from collections.abc import Iterator
from dataclasses import dataclass

OWN = 64  # for the server: an idle one uses about 25, an engine's start takes 10 for a moment
HELD = 16  # of these, held open until an engine is started
MOST_SPARE = 256  # connections beyond the limit: probes, and clients that get the 503
_MANY = 1 << 20  # where there is no limit


@dataclass(frozen=True, slots=True)
class Plan:
    """The connections that the limit on open files allows."""

    max_connections: int
    max_spare: int
    note: str | None = None  # for the operator, where they are fewer than was set


def plan_connections(wanted: int, backlog: int, own: int = OWN) -> Plan:
    """Raises the soft limit as far as needed and allowed. A whole backlog may be accepted in one
    burst before any of it is handled: room for that is preferred, but not required."""
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
        f"max_connections is lowered from {wanted} to {most}: this process may open only {limit} "
        "files (ulimit -n; LimitNOFILE= in a systemd unit)",
    )


def _raise_limit(wanted: int) -> int:
    """Raises the limit and returns its new value."""
    if sys.platform == "win32":
        return _MANY
    import resource

    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft == resource.RLIM_INFINITY:
        return _MANY
    most = wanted if hard == resource.RLIM_INFINITY else min(wanted, hard)
    if most > soft:
        with contextlib.suppress(OSError, ValueError):  # macOS has undocumented limits
            resource.setrlimit(resource.RLIMIT_NOFILE, (most, hard))
            soft = most
    return soft


class Held:
    """Descriptors reserved for an engine's start, so that a restart does not fail for lack of them.
    They are taken after the first start, which happens before any client can connect."""

    def __init__(self, count: int = HELD) -> None:
        self._count = count
        self._held: list[int] = []

    def _take(self) -> None:
        with contextlib.suppress(OSError):  # none are free now: try again later
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
