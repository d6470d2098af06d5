"""Which grammars are compiled, and when: a bounded number of places, shared fairly by tenants.

Requests with a grammar come in through `submit` and leave through `take`, with a constraint or the
reason why there is none. A grammar that a tenant uses, or used a moment ago, is not compiled again;
one that was refused is refused at once. At most `MAX_COMPILING` compile at a time: the next one is
from the tenant with the fewest of these places, so that a tenant's slow grammars delay only its own
requests. Used by the engine's loop alone, and never blocks. Knows requests; not what compiling is.
"""

from __future__ import annotations

import time
from collections import OrderedDict, deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Protocol

from headrace.core.constraint import Constraint, GrammarKind, GrammarSpec
from headrace.core.errors import (
    HeadraceError,
    InvalidRequestError,
    QueueTimeoutError,
    UnavailableError,
)
from headrace.core.request import GenerateRequest
from headrace.server.grammars.host import Host, too_much

MAX_COMPILING = 4
MAX_WAITING = 32  # grammars of one tenant that may wait for a place
WAIT_S = 10.0  # longest wait for a place
COMPILE_WALL_S = 15.0  # wall-clock limit, for a process that gets too little CPU time
RETRY_S = 5.0
# Idle processes kept for the next request with the same grammar: how many, and for how long.
MAX_IDLE = 16
IDLE_S = 60.0
MAX_REFUSED = 512  # refused grammars that are remembered
# When all processes together take this many times their limit, the largest is killed.
OVERDRAWN = 1.25

Key = tuple[str, GrammarKind, str]  # tenant, and grammar


class Starts(Protocol):
    def start(self, spec: GrammarSpec) -> Host: ...

    def close(self) -> None: ...


@dataclass(frozen=True, slots=True, kw_only=True)
class Compiled:
    """A request whose grammar is settled: a constraint, or the error."""

    request: GenerateRequest
    result: Constraint | HeadraceError


@dataclass(slots=True)
class _Waiter:
    request: GenerateRequest
    arrived_s: float

    def is_late(self, now_s: float) -> bool:
        timeout_s = self.request.timeout_s
        return timeout_s is not None and now_s - self.arrived_s >= timeout_s

    def settle(self, now_s: float) -> None:
        """The request with its timeout reduced by the time it waited here."""
        if self.request.timeout_s is not None:
            left_s = self.request.timeout_s - (now_s - self.arrived_s)
            self.request.timeout_s = max(left_s, 1e-6)


@dataclass(slots=True)
class _Wanted:
    """A grammar that requests wait for, in a queue or while it compiles."""

    key: Key
    spec: GrammarSpec
    since_s: float
    waiters: list[_Waiter] = field(default_factory=list)
    host: Host | None = None  # set once it compiles


@dataclass(slots=True)
class GrammarStats:
    """Counts since the engine started; `bytes` and `processes` are now."""

    outcomes: dict[str, int] = field(default_factory=dict)
    processes: int = 0
    bytes: int = 0
    seconds: float = 0.0

    def count(self, outcome: str) -> None:
        self.outcomes[outcome] = self.outcomes.get(outcome, 0) + 1


class Grammars:
    def __init__(
        self,
        starter: Starts,
        *,
        most_bytes: int,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._starter = starter
        self._most_bytes = most_bytes
        self._clock = clock
        self._wanted: dict[Key, _Wanted] = {}  # grammars with waiting requests
        self._queues: dict[
            str, deque[_Wanted]
        ] = {}  # by tenant; a tenant that had its turn goes to the end
        self._compiling: dict[Key, _Wanted] = {}
        self._ready: OrderedDict[Key, Host] = OrderedDict()  # least recently used first
        self._idle_since_s: dict[Key, float] = {}
        self._refused: OrderedDict[Key, InvalidRequestError] = OrderedDict()
        self._finished: deque[Compiled] = deque()
        self._past_seconds = 0.0  # used by processes that have ended
        self.stats = GrammarStats()

    def filenos(self) -> list[int]:
        """File descriptors that become readable when a grammar may have been compiled. A process
        that ended as soon as it was started has none; `take` finds it."""
        hosts = (wanted.host for wanted in self._compiling.values())
        return [host.fileno() for host in hosts if host is not None and not host.is_gone]

    @property
    def is_idle(self) -> bool:
        return not (self._wanted or self._finished)

    def submit(self, request: GenerateRequest) -> None:
        spec = request.grammar
        assert spec is not None
        key = request.tenant, spec.kind, spec.source
        waiter = _Waiter(request, self._clock())
        host = self._ready.get(key)
        if host is not None and not host.is_gone:
            self._ready.move_to_end(key)
            self._give(waiter, host, "reused")
        elif key in self._refused:
            self._refused.move_to_end(key)
            self._refuse(waiter, self._refused[key], "refused_again")
        elif key in self._wanted:
            self._wanted[key].waiters.append(waiter)
        else:
            self._queue(key, spec, waiter)

    def forget(self, request_id: str) -> None:
        """The client left. A grammar that no other request waits for is not compiled further."""
        for wanted in list(self._wanted.values()):
            wanted.waiters = [w for w in wanted.waiters if w.request.request_id != request_id]
            if not wanted.waiters:
                self._drop(wanted)
        for compiled in [c for c in self._finished if c.request.request_id == request_id]:
            self._finished.remove(compiled)
            if not isinstance(compiled.result, HeadraceError):
                compiled.result.close()

    def take(self) -> list[Compiled]:
        """The requests whose grammars were settled since the last call."""
        now_s = self._clock()
        for wanted in list(self._compiling.values()):
            self._look(wanted)
        for wanted in list(self._wanted.values()):
            self._expire(wanted, now_s)
        self._start_next()
        found = list(self._finished)
        self._finished.clear()
        return found

    def tidy(self) -> None:
        """Periodic work: measure memory, and end processes that are idle or take too much."""
        now_s = self._clock()
        for key, host in list(self._ready.items()):
            since_s = self._idle_since_s.setdefault(key, now_s) if host.is_idle else now_s
            if not host.is_idle:
                self._idle_since_s.pop(key, None)
            if host.is_gone or now_s - since_s > IDLE_S:
                self._forget_host(key)
        idle = [key for key, host in self._ready.items() if host.is_idle]
        for key in idle[: max(0, len(idle) - MAX_IDLE)]:
            self._forget_host(key)
        while self._bytes() > OVERDRAWN * self._most_bytes:
            self.stats.count("killed")
            self._forget_host(max(self._ready, key=lambda key: self._ready[key].grown_bytes))
        self.stats.processes = len(self._ready) + len(self._compiling)
        self.stats.bytes = self._bytes()
        alive = sum(host.seconds for host in self._ready.values())
        self.stats.seconds = self._past_seconds + alive

    def close(self) -> None:
        for key in list(self._ready):
            self._forget_host(key)
        for wanted in list(self._compiling.values()):
            self._drop(wanted)
        self._starter.close()

    # -- waiting for a place -----------------------------------------------------------------------

    def _queue(self, key: Key, spec: GrammarSpec, waiter: _Waiter) -> None:
        waiting = len(self._queues.get(key[0], ()))
        if waiting >= MAX_WAITING:
            self._refuse(waiter, _busy(f"{waiting} grammars are waiting to be compiled"), "busy")
            return
        if not self._has_room():
            self._refuse(waiter, _busy("The grammars in use take all the memory allowed"), "busy")
            return
        wanted = _Wanted(key, spec, waiter.arrived_s, [waiter])
        self._wanted[key] = wanted
        self._queues.setdefault(key[0], deque()).append(wanted)

    def _has_room(self) -> bool:
        """Whether there is memory for one more, after ending an idle process if necessary."""
        for key in [key for key, host in self._ready.items() if host.is_idle]:
            if self._bytes() < self._most_bytes:
                return True
            self._forget_host(key)
        return self._bytes() < self._most_bytes

    def _start_next(self) -> None:
        while self._queues and len(self._compiling) < MAX_COMPILING:
            held: dict[str, int] = dict.fromkeys(self._queues, 0)
            for tenant, _, _ in self._compiling:
                if tenant in held:
                    held[tenant] += 1
            tenant = min(held, key=held.__getitem__)  # on a tie, the first
            queue = self._queues.pop(tenant)
            wanted = queue.popleft()
            if queue:
                self._queues[tenant] = queue
            self._start(wanted)

    def _start(self, wanted: _Wanted) -> None:
        try:
            wanted.host = self._starter.start(wanted.spec)
        except OSError as error:
            self._finish_all(wanted, _busy(f"No process can be started ({error.strerror})"), "busy")
            return
        wanted.since_s = self._clock()
        self._compiling[wanted.key] = wanted

    # -- while it compiles, and after --------------------------------------------------------------

    def _look(self, wanted: _Wanted) -> None:
        host = wanted.host
        assert host is not None
        host.pump()
        if host.compiled is not None:
            self._ready[wanted.key] = host
            del self._compiling[wanted.key], self._wanted[wanted.key]
            for number, waiter in enumerate(wanted.waiters):
                self._give(waiter, host, "reused" if number else "compiled")
        elif host.failed is not None:
            failed = host.failed
            error = InvalidRequestError(failed.cause, failed.remedy)
            self._remember(wanted, error)
        elif host.is_gone:
            self._remember(wanted, too_much(wanted.spec.param))

    def _expire(self, wanted: _Wanted, now_s: float) -> None:
        is_compiling = wanted.host is not None
        waited_s = now_s - wanted.since_s
        if waited_s > (COMPILE_WALL_S if is_compiling else WAIT_S):
            what = "was not compiled" if is_compiling else "waited for others to be compiled"
            self._finish_all(wanted, _busy(f"The grammar {what} within {waited_s:.0f} s"), "busy")
            return
        for waiter in [waiter for waiter in wanted.waiters if waiter.is_late(now_s)]:
            wanted.waiters.remove(waiter)
            self._refuse(waiter, _out_of_time(), "timeout")
        if not wanted.waiters:
            self._drop(wanted)

    def _give(self, waiter: _Waiter, host: Host, outcome: str) -> None:
        self.stats.count(outcome)
        waiter.settle(self._clock())
        self._finished.append(Compiled(request=waiter.request, result=host.open()))

    def _refuse(self, waiter: _Waiter, error: HeadraceError, outcome: str) -> None:
        """An error of its own for each request: it names the field that held the grammar."""
        self.stats.count(outcome)
        assert waiter.request.grammar is not None
        if isinstance(error, InvalidRequestError):
            param = waiter.request.grammar.param
            error = InvalidRequestError(error.cause, error.remedy, param=param)
        self._finished.append(Compiled(request=waiter.request, result=error))

    def _remember(self, wanted: _Wanted, error: InvalidRequestError) -> None:
        self._refused[wanted.key] = error
        if len(self._refused) > MAX_REFUSED:
            self._refused.popitem(last=False)
        self._finish_all(wanted, error, "refused")

    def _finish_all(self, wanted: _Wanted, error: HeadraceError, outcome: str) -> None:
        waiters, wanted.waiters = wanted.waiters, []
        self._drop(wanted)
        for waiter in waiters:
            self._refuse(waiter, error, outcome)

    def _drop(self, wanted: _Wanted) -> None:
        """No request needs this grammar any more."""
        self._wanted.pop(wanted.key, None)
        self._compiling.pop(wanted.key, None)
        tenant = wanted.key[0]
        if wanted in (queue := self._queues.get(tenant, deque())):
            queue.remove(wanted)
            if not queue:
                del self._queues[tenant]
        if wanted.host is not None:
            self._past_seconds += wanted.host.seconds
            wanted.host.close()

    def _forget_host(self, key: Key) -> None:
        host = self._ready.pop(key)
        self._idle_since_s.pop(key, None)
        self._past_seconds += host.seconds
        host.close()

    def _hosts(self) -> Iterator[Host]:
        yield from self._ready.values()
        yield from (wanted.host for wanted in self._compiling.values() if wanted.host)

    def _bytes(self) -> int:
        return sum(host.grown_bytes for host in self._hosts())


def _busy(what: str) -> UnavailableError:
    return UnavailableError(f"{what}.", "Try again later.", retry_after_s=RETRY_S)


def _out_of_time() -> QueueTimeoutError:
    return QueueTimeoutError(
        "The request's timeout_s passed before its grammar was compiled.",
        "Send it again later, or with a larger timeout_s.",
        retry_after_s=1.0,
        param="timeout_s",
    )
