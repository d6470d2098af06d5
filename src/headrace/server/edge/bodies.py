"""Request bodies being read: how slow one may be, and how much memory all may take together.

A body may take as long as it keeps arriving: it starts with `limit_s`, and every byte adds the time
that it takes at the slowest allowed rate, but never to more than `limit_s`. So a burst does not
allow a long silence. Where all bodies together exceed the budget, the owner with the most bytes
loses its body that is furthest behind. Knows bytes and time; not what they mean.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections import defaultdict
from collections.abc import Awaitable, Callable, Iterator, MutableMapping
from typing import Any

from headrace.core.errors import (
    ClientTimeoutError,
    HeadraceError,
    PayloadTooLargeError,
    RetryLaterError,
)
from headrace.server.edge.memory import give_back

SLOWEST_BYTES_S = 32 << 10  # a body that arrives faster than this never times out
LARGE_BYTES = 8 << 20  # freed memory beyond this is returned to the system

Receive = Callable[[], Awaitable[MutableMapping[str, Any]]]


class ClientGone(Exception):
    """The client disconnected."""


class BodiesFullError(RetryLaterError):
    """The bodies being read exceed their memory budget."""

    status = 503


class Body:
    """A body that is being read."""

    def __init__(self, bodies: Bodies, owner: str, limit_s: float) -> None:
        self._bodies = bodies
        self._loop = asyncio.get_running_loop()
        self._limit_s = limit_s
        self.owner = owner
        self.data = bytearray()
        self.deadline_s = self._loop.time() + limit_s
        self.is_dropped = False
        self.wake: Callable[[], None] = lambda: None  # tells the reader that it was dropped

    def add(self, piece: bytes) -> None:
        if self.is_dropped:
            return
        self.data += piece
        later_s = self.deadline_s + len(piece) / SLOWEST_BYTES_S
        self.deadline_s = min(later_s, self._loop.time() + self._limit_s)
        self._bodies.grow(self.owner, len(piece))

    def drop(self) -> None:
        self.is_dropped = True
        self.data = bytearray()
        self.wake()


class Bodies:
    """All bodies that are being read."""

    def __init__(self, max_bytes: int) -> None:
        self.max_bytes = max_bytes
        self.bytes = 0
        self._owned: defaultdict[str, int] = defaultdict(int)  # bytes, by owner
        self._reading: dict[Body, None] = {}
        self._most_bytes = 0  # peak since memory was last returned to the system
        self._end: HeadraceError | None = None

    def __len__(self) -> int:
        return len(self._reading)

    @contextlib.contextmanager
    def reading(self, owner: str, limit_s: float) -> Iterator[Body]:
        body = Body(self, owner, limit_s)
        self._reading[body] = None
        try:
            yield body
        finally:
            self._release(body)

    def end(self, error: HeadraceError) -> None:
        """The server is stopping: refuse requests whose bodies are incomplete."""
        self._end = error
        for body in list(self._reading):
            self._release(body)
            body.drop()

    def refusal(self) -> HeadraceError:
        """The error for a body that was dropped."""
        if self._end is not None:
            return self._end
        return BodiesFullError(
            f"The request bodies being read have reached their limit of {self.max_bytes} bytes "
            "together, and this one was the furthest behind.",
            "Send it again, faster; or start the server with a higher --max-bodies.",
            retry_after_s=1.0,
        )

    def grow(self, owner: str, count: int) -> None:
        self.bytes += count
        self._owned[owner] += count
        self._most_bytes = max(self._most_bytes, self.bytes)
        while self.bytes > self.max_bytes:
            victim = self._furthest_behind()
            self._release(victim)
            victim.drop()

    def _furthest_behind(self) -> Body:
        """A body of the owner that holds most, so that others lose nothing to it."""
        greedy = max(self._owned, key=self._owned.__getitem__)
        of_it = (body for body in self._reading if body.owner == greedy and body.data)
        return min(of_it, key=lambda body: body.deadline_s)

    def _release(self, body: Body) -> None:
        if body not in self._reading:
            return
        del self._reading[body]
        self.bytes -= len(body.data)
        self._owned[body.owner] -= len(body.data)
        if not self._owned[body.owner]:
            del self._owned[body.owner]
        if not self._reading and self._most_bytes >= LARGE_BYTES:
            self._most_bytes = 0
            # Later, when the reader has released it too.
            asyncio.get_running_loop().call_later(1.0, give_back)


async def read_body(
    bodies: Bodies, receive: Receive, *, owner: str, most: int, limit_s: float
) -> bytes:
    """Reads the whole body. ASGI's `receive` pauses the client while no more is read."""
    with bodies.reading(owner, limit_s) as body:
        try:
            async with asyncio.timeout_at(body.deadline_s) as timeout:
                body.wake = lambda: _expire(timeout)
                while True:
                    message = await receive()
                    if message["type"] == "http.disconnect":
                        raise ClientGone
                    body.add(message.get("body", b""))
                    if body.is_dropped:
                        raise bodies.refusal()
                    if len(body.data) > most:
                        raise too_large("The body has more bytes than this server's limit of", most)
                    if not message.get("more_body", False):
                        return bytes(body.data)
                    timeout.reschedule(body.deadline_s)
        except TimeoutError as error:
            if body.is_dropped:
                raise bodies.refusal() from None
            raise ClientTimeoutError(
                f"Only {len(body.data)} bytes of the body arrived, too slowly: it has "
                f"{limit_s:g} s, and longer while at least {SLOWEST_BYTES_S >> 10} KiB arrive in "
                "every second.",
                "Send it faster, and as much as Content-Length says.",
            ) from error


def too_large(what: str, most: int) -> PayloadTooLargeError:
    return PayloadTooLargeError(
        f"{what} {most}.", "Send less, or start the server with a higher --max-body."
    )


def _expire(timeout: asyncio.Timeout) -> None:
    with contextlib.suppress(RuntimeError):  # the event loop is closed already
        timeout.reschedule(asyncio.get_running_loop().time())
