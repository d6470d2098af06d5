"""Which request comes next, from a workload: those with a time of their own, and followers.

In an open loop requests have times, and a later turn follows its answer. In a closed loop each
client's next request follows its last, so that a run keeps its concurrency until it stops, however
differently long answers are. Knows no clock and no endpoint.
"""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Iterator

from headrace.workload.arrivals import ClosedLoop
from headrace.workload.ask import Ask
from headrace.workload.workload import Synthetic, Workload


def clients_of(workload: Workload) -> int | None:
    """Of a closed loop; None: it is an open one."""
    if isinstance(workload, Synthetic) and isinstance(workload.arrivals, ClosedLoop):
        return workload.arrivals.clients
    return None


class Feed:
    """`asks` are a workload's; `clients`: of a closed loop, whose asks may have no end."""

    def __init__(self, asks: Iterator[Ask], clients: int | None = None) -> None:
        self._asks = asks
        self._clients = clients
        self._waiting: defaultdict[int, deque[Ask]] = defaultdict(deque)  # by session
        self._ended: dict[int, float] = {}  # sessions whose next turn was not read yet
        self._begun = 0

    def timed(self) -> tuple[float, Ask] | None:
        """The next request that has a time, or whose predecessor has ended: (when, what)."""
        if self._clients is not None and self._begun >= self._clients:
            return None
        for ask in self._asks:
            if ask.after_s is None or ask.session is None:
                self._begun += 1
                return ask.at_s, ask
            if ask.session in self._ended:
                ended_s = self._ended.pop(ask.session)
                return max(ask.at_s, ended_s + ask.after_s), ask
            self._waiting[ask.session].append(ask)
        return None

    def follower(self, ask: Ask, ended_s: float) -> tuple[float, Ask] | None:
        """What follows this request, which ended then; None: nothing that is known yet."""
        session = ask.session
        if session is None:
            return None
        if self._clients is not None and not self._waiting[session]:
            self._read_until(session)
        if not self._waiting[session]:
            self._ended[session] = ended_s
            return None
        found = self._waiting[session].popleft()
        return max(found.at_s, ended_s + (found.after_s or 0.0)), found

    def next_of(self, ask: Ask) -> Ask | None:
        """What a client of a closed loop sends after this, if that is known before the answer."""
        session = ask.session
        if session is None or self._clients is None:
            return None
        if not self._waiting[session]:
            self._read_until(session)
        waiting = self._waiting[session]
        return waiting[0] if waiting and not _needs_answer(waiting[0]) else None

    def _read_until(self, session: int) -> None:
        for ask in self._asks:
            if ask.session is None:
                continue
            self._waiting[ask.session].append(ask)
            if ask.session == session:
                return


def _needs_answer(ask: Ask) -> bool:
    """It continues a conversation."""
    return any(name.endswith(" answer") for name, _ in ask.shared)
