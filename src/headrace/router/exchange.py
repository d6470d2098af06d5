"""One request from its last byte to its answer's: choose a replica, send, try another, pass on.

Another replica is tried only while no byte of an answer's body has gone to the client, and only
after a lost connection, a 503 or a 429. Afterwards an answer that breaks off is broken off for the
client too. Knows replicas and a client; no sockets.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

import msgspec

from headrace.core.errors import HeadraceError, UnavailableError
from headrace.policies.routing import Counted, Wanted
from headrace.router.fleet import Fleet
from headrace.router.metrics import Counts
from headrace.router.replica import Replica
from headrace.router.request import Request, request_bytes
from headrace.router.settings import BrokenAnswerError, DeadlineError, RouterSettings
from headrace.router.stored import Home, Stored
from headrace.router.upstream import Broken, Head, Lost, Upstream
from headrace.server.request.error_payload import error_payload

ELSEWHERE = frozenset({429, 503})  # another replica may do better
_EVENT_END = b"\n\n\r\n"  # of a chunk that holds whole events
_LAST_CHUNK = b"0\r\n\r\n"

log = logging.getLogger(__name__)


class Client(Protocol):
    """Who asked."""

    write: Callable[[bytes], None]

    def begin(self, head: Head, early: bytes, upstream: Upstream) -> Callable[[bytes], None]:
        """The answer's head and what has come of its body; the rest follows, as the replica sends
        it, to what this returns."""
        ...

    def answer(self, head: Head, body: bytes) -> None: ...

    def refuse(self, error: HeadraceError) -> None: ...

    def cut(self, end: bytes) -> None:
        """What was sent is not a whole answer, and no more of it will come. `end` says so and ends
        it properly; where it is empty only a connection that ends early can say so."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class Refusal:
    """Why a replica did not answer: an answer to pass on, or an error."""

    head: Head | None = None
    body: bytes = b""
    error: Lost | None = None
    url: str = ""

    @property
    def order(self) -> tuple[int, float]:
        """The least comes first: what is best to tell a client."""
        if self.head is None:
            return 2, 0.0
        try:
            wait_s = float(self.head.get(b"retry-after") or b"inf")
        except ValueError:
            wait_s = float("inf")  # a date: allowed, and nobody sends one
        return (0 if self.head.status == 429 else 1), wait_s


@dataclass(slots=True, kw_only=True)
class Way:
    """Where a request may go."""

    wanted: Wanted
    version: str
    headers: bytes  # that replicas get
    stays: bool = False  # in its version, whatever happens
    on_begin: Callable[[], None] | None = None  # with the first byte of an answer
    home: int | None = None  # the replica that has the stored answer it asks for
    searches: bool = False  # nobody knows which one has it: 404 is another's turn
    stored: Stored | None = None  # where its answer's id is remembered
    owner: str | None = None  # its key's name


class Exchange:
    def __init__(
        self,
        fleet: Fleet,
        settings: RouterSettings,
        counts: Counts,
        client: Client,
        request: Request,
        way: Way,
    ) -> None:
        self._fleet, self._settings, self._counts = fleet, settings, counts
        self._client, self._request, self._way = client, request, way
        self._has_begun = False  # a byte of the body went to the client
        self._upstream: Upstream | None = None  # that a replica must get back
        self._answering: Upstream | None = None  # whose answer goes to the client
        self._replica: Replica | None = None  # the last that was asked
        self._counted: Counted | None = None  # as it is pending there

    async def run(self) -> None:
        """Until the client has its answer. Cancelled where the client leaves."""
        settings, counts = self._settings, self._counts
        try:
            async with asyncio.timeout(settings.first_byte_s) as deadline:
                await self._serve(deadline)
        except TimeoutError:
            self._late()
        except HeadraceError as error:
            self._refuse(error)
        except asyncio.CancelledError:
            answering = self._answering
            counts.left += answering is None or not answering.is_whole
            raise

    async def _serve(self, deadline: asyncio.Timeout) -> None:
        way, refusals = self._way, list[Refusal]()
        tried: set[int] = set()
        while len(tried) < self._settings.tries:
            replica = None
            if not tried and way.home is not None:
                replica = self._fleet.taking(way.home)
            if replica is None:
                replica = self._fleet.choose(way.wanted, way.version, tried, strict=way.stays)
            if replica is None:
                break
            if tried:
                self._counts.retries[_reason(refusals[-1])] += 1
            tried.add(replica.number)
            refusal = await self._try(replica, deadline)
            if refusal is None:
                return
            refusals.append(refusal)
        self._give_up(refusals)

    async def _try(self, replica: Replica, deadline: asyncio.Timeout) -> Refusal | None:
        """None: the client has its answer, whole or not."""
        self._counted = counted = self._fleet.send(replica, self._way.wanted)
        self._replica = replica
        is_judged = False  # the replica's health, by this request
        try:
            head = await self._ask(replica)
            upstream = self._upstream
            assert upstream is not None
            is_judged = True
            if head.status >= 500:
                replica.failed(f"it answered {head.status}")
            else:
                replica.succeeded()
            if head.status in ELSEWHERE or (self._way.searches and head.status == 404):
                await upstream.whole()
                return Refusal(head=head, body=upstream.take_early(), url=replica.url)
            self._begin(replica, head, upstream, deadline)
            await upstream.whole()
        except Lost as error:
            is_judged = True
            replica.failed(str(error))
            if not self._has_begun:
                return Refusal(error=error, url=replica.url)
            self._break_off(f"The replica failed half-way: {error}.")
        finally:
            replica.ended(counted.tokens)
            if not is_judged:  # the client left, or the time is over
                replica.left_open()
            if self._upstream is not None:
                replica.release(self._upstream)
                self._upstream = None
        return None

    async def _ask(self, replica: Replica) -> Head:
        """Raises Lost. A kept connection may have been closed just now, which says nothing about
        the replica: then once more, on a new one."""
        data = request_bytes(replica.address, self._request, self._way.headers)
        has_body = self._request.method != b"HEAD"
        upstream = replica.free()
        if upstream is not None:
            try:
                return await self._ask_on(replica, upstream, data, has_body)
            except Broken:
                raise
            except Lost:
                self._upstream = None
                replica.release(upstream)
                if upstream.has_bytes or not replica.is_up:
                    raise
        upstream = await replica.connect(self._settings.connect_s)
        return await self._ask_on(replica, upstream, data, has_body)

    async def _ask_on(
        self, replica: Replica, upstream: Upstream, data: bytes, has_body: bool
    ) -> Head:
        self._upstream = upstream
        self._counts.added.observe(time.perf_counter() - self._request.arrived_s)
        replica.waits(upstream)
        head = await upstream.ask(data, has_body=has_body)
        replica.answers(upstream)
        return head

    # -- what the client gets --------------------------------------------------------------------

    def _begin(
        self, replica: Replica, head: Head, upstream: Upstream, deadline: asyncio.Timeout
    ) -> None:
        self._has_begun = True
        self._answering = upstream
        if self._way.on_begin is not None:
            self._way.on_begin()
        assert self._counted is not None
        replica.done(self._counted.begin())
        loop = asyncio.get_running_loop()
        deadline.reschedule(loop.time() + self._settings.whole_s)
        self._count(replica.url, head.status)
        replica.statuses[head.status] += 1
        self._request.body = b""  # it will not be sent again
        early = upstream.take_early()
        write = self._client.begin(head, early, upstream)
        if self._way.stored is not None and head.status == 200:
            home = Home(replica.number, self._way.owner)
            write = self._way.stored.reading(early, home, write)
        upstream.flow(write)

    def _give_up(self, refusals: list[Refusal]) -> None:
        if not refusals:
            raise UnavailableError(
                "No replica takes requests now.",
                "Try again shortly; GET /replicas of the router says why.",
                retry_after_s=max(1.0, self._settings.heartbeat_s),
            )
        best = min(refusals, key=lambda each: each.order)
        if best.head is not None:
            self._count(best.url, best.head.status)
            self._client.answer(best.head, best.body)
            return
        if isinstance(best.error, Broken):
            raise BrokenAnswerError(
                f"A replica's answer is not HTTP/1.1: {best.error}.",
                "Check what listens at the replica's URL.",
            )
        raise UnavailableError(
            f"No replica could be asked: {best.error}.",
            "Try again shortly.",
            retry_after_s=max(1.0, self._settings.heartbeat_s),
        )

    def _late(self) -> None:
        if self._has_begun:
            limit = f"The answer was not whole within {self._settings.whole_s:g} s"
            self._break_off(f"{limit} (--deadline).")
            return
        if self._replica is not None:
            self._replica.failed("it did not begin to answer in time")
        self._refuse(
            DeadlineError(
                f"No replica began to answer within {self._settings.first_byte_s:g} s.",
                "Ask for less at a time, or start the router with a longer --first-byte.",
            )
        )

    def _refuse(self, error: HeadraceError) -> None:
        self._count("", error.status)
        self._client.refuse(error)

    def _break_off(self, why: str) -> None:
        """In a stream of events the last one says why. Any other answer just ends early, so that no
        client takes it for whole."""
        self._counts.cut += 1
        end = b""
        upstream = self._answering
        head = None if upstream is None else upstream.head
        if upstream is not None and head is not None and upstream.last.endswith(_EVENT_END):
            error = BrokenAnswerError(why, "Send the request again.")
            payload = msgspec.json.encode(error_payload(error, status=error.status))
            event = b"data: " + payload + b"\n\n"
            is_events = head.get(b"content-type").startswith(b"text/event-stream")
            if is_events and head.get(b"transfer-encoding") == b"chunked":
                end = b"%x\r\n%b\r\n%b" % (len(event), event, _LAST_CHUNK)
        self._client.cut(end)

    def _count(self, url: str, status: int) -> None:
        self._counts.answers[url, status] += 1


def _reason(refusal: Refusal) -> str:
    return "connection" if refusal.head is None else str(refusal.head.status)
