"""One replica as the router sees it: where it is, what was sent to it, and whether it takes more.

Keeps its free connections. Heartbeats and requests tell it what happened; the circuit breaker is
policies/breaker.py's. Knows no clients and no policies of choice.
"""

from __future__ import annotations

import asyncio
import logging
import ssl
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field

from headrace.client.connection import Address
from headrace.policies.breaker import Breaker, Circuit
from headrace.policies.routing import key_of
from headrace.router.upstream import Lost, Upstream

FREE_S = 4.0  # a free connection is not used after this: vLLM closes its own after 5 s
MOST_FREE = 512
BEATS_IN_TIME = 3  # in a row, until one that was late takes new requests again

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class Identity:
    """What a replica serves. Two that are equal give the same answers, as far as can be known."""

    fingerprint: str  # Headrace's own; of others, their list of models
    models: tuple[str, ...]
    is_headrace: bool = False
    cards: tuple[dict[str, object], ...] = field(default=(), compare=False)

    @property
    def shown(self) -> str:
        name = ", ".join(self.models)
        return f"{name} ({self.fingerprint})" if self.is_headrace else name


class Replica:
    def __init__(self, address: Address, *, clock: Callable[[], float] = time.monotonic) -> None:
        self.address = address
        self.url = address.url
        self.number = key_of("url", self.url)  # the same in every router
        self._clock = clock
        self._ssl = ssl.create_default_context() if address.is_tls else None
        self._free: list[Upstream] = []
        self._waiting: set[Upstream] = set()  # those whose answer has not begun
        self.breaker = Breaker()
        self.identity: Identity | None = None
        self.is_up = False  # by its last heartbeat
        self.why_out = "no heartbeat yet"
        self.is_late = False  # its heartbeat should have been answered by now
        self.late_beats = 0  # in a row that had no answer
        self._beats_in_time = 0  # in a row, since one was late
        self.kept_out = ""  # it lives, and serves something else than the others
        self.is_draining = False
        self.pending_tokens = 0
        self.running = 0  # requests
        self.load: dict[str, object] = {}  # as GET /load has it
        self.statuses: Counter[int] = Counter()  # of answers
        self.failures = 0
        self.ejections = 0
        self.on_out: Callable[[], None] = lambda: None  # what it had cached may be gone

    # -- whether it takes requests ---------------------------------------------------------------

    @property
    def is_member(self) -> bool:
        return self.is_up and not self.is_draining and not self.kept_out

    def takes(self, now_s: float) -> bool:
        return self.is_member and self.breaker.may_send(now_s)

    @property
    def state(self) -> str:
        if not self.is_up:
            return "out"
        if self.kept_out:
            return "kept out"
        if self.is_draining:
            return "draining"
        if self.is_late:
            return "late"
        return "up" if self.breaker.state is Circuit.CLOSED else f"circuit {self.breaker.state}"

    def came_up(self) -> None:
        if not self.is_up:
            self.is_up, self.why_out = True, ""
            self.breaker = Breaker(rules=self.breaker.rules)

    def was_late(self) -> None:
        """It gets no new requests while others take them; those that it has stay."""
        self.is_late, self._beats_in_time = True, 0

    def was_in_time(self) -> None:
        """Once is not enough: a process that runs for a moment now and then answers one heartbeat
        in each."""
        self._beats_in_time += 1
        if self._beats_in_time >= BEATS_IN_TIME:
            self.is_late = False

    def went_out(self, why: str) -> None:
        """Requests that wait for an answer of it go elsewhere."""
        if self.is_up:
            self.ejections += 1
            log.warning("%s is out: %s", self.url, why, extra={"event": "replica_out"})
            self.on_out()
        self.is_up, self.is_late, self.why_out = False, False, why
        for upstream in list(self._waiting):
            upstream.fail(Lost(why))
        self.close_free()

    def succeeded(self) -> None:
        self.breaker = self.breaker.succeeded()

    def failed(self, why: str) -> None:
        self.failures += 1
        before = self.breaker.state
        self.breaker = self.breaker.failed(self._clock())
        if self.breaker.state is Circuit.OPEN and before is not Circuit.OPEN:
            self.ejections += 1
            log.warning(
                "%s gets no requests for %g s: %s",
                self.url,
                self.breaker.open_s,
                why,
                extra={"event": "circuit_open"},
            )

    def left_open(self) -> None:
        """A request ended that says nothing about it."""
        self.breaker = self.breaker.unknown(self._clock())

    # -- what it carries -------------------------------------------------------------------------

    def began(self, tokens: int) -> None:
        self.breaker = self.breaker.sent(self._clock())
        self.pending_tokens += tokens
        self.running += 1

    def done(self, tokens: int) -> None:
        """Some of what was pending."""
        self.pending_tokens -= tokens

    def ended(self, tokens: int) -> None:
        self.pending_tokens -= tokens
        self.running -= 1

    # -- connections -----------------------------------------------------------------------------

    def free(self) -> Upstream | None:
        """The one that was used last: it is the least likely to be closed."""
        oldest_s = self._clock() - FREE_S
        while self._free:
            upstream = self._free.pop()
            if upstream.is_open and upstream.free_since_s >= oldest_s:
                return upstream
            upstream.abort()
        return None

    async def connect(self, timeout_s: float) -> Upstream:
        """Raises Lost."""
        loop = asyncio.get_running_loop()
        try:
            async with asyncio.timeout(timeout_s):
                _, upstream = await loop.create_connection(
                    lambda: Upstream(self._forget),
                    self.address.host,
                    self.address.port,
                    ssl=self._ssl,
                )
        except TimeoutError:
            raise Lost(f"no connection within {timeout_s:g} s") from None
        except OSError as error:
            raise Lost(f"no connection: {error.strerror or error}") from None
        return upstream

    def waits(self, upstream: Upstream) -> None:
        self._waiting.add(upstream)

    def answers(self, upstream: Upstream) -> None:
        self._waiting.discard(upstream)

    def release(self, upstream: Upstream) -> None:
        """After an exchange: kept if its answer was read to the end."""
        self._waiting.discard(upstream)
        if upstream.can_be_used_again and self.is_up and len(self._free) < MOST_FREE:
            upstream.rest(self._clock())
            self._free.append(upstream)
        else:
            upstream.abort()

    def _forget(self, upstream: Upstream) -> None:
        if upstream in self._free:
            self._free.remove(upstream)

    def close_free(self) -> None:
        for upstream in self._free:
            upstream.abort()
        self._free = []
