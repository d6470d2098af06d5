"""Kept connections to one endpoint, over asyncio: a request goes out, an `Answer` fills.

The time is taken when bytes arrive, before anything is parsed. Names are resolved once, before the
first request. A connection is used again only after its answer was read to the end.
"""

from __future__ import annotations

import asyncio
import socket
import ssl
import time
from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cache
from typing import cast
from urllib.parse import urlsplit

import httptools

from headrace.client.answer import Answer, Failure, message_of
from headrace.core.errors import ConfigError, HeadraceError
from headrace.core.version import headrace_version

Clock = Callable[[], float]
_HANDSHAKE_S = 10.0
_TURN_S = 0.0002  # of reading what arrived, before requests may go out
_REMEDY = "Give the server's URL, such as http://127.0.0.1:8000."


class Unreachable(HeadraceError):
    """The endpoint can't be asked at all."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Address:
    """`path` is what stands before /v1."""

    scheme: str
    host: str
    port: int
    path: str

    @property
    def url(self) -> str:
        host = f"[{self.host}]" if ":" in self.host else self.host
        return f"{self.scheme}://{host}:{self.port}{self.path}"

    @property
    def is_tls(self) -> bool:
        return self.scheme == "https"


def parse_address(url: str) -> Address:
    """With or without a scheme, a host and /v1 at its end: `:8000` is this machine."""
    text = url if "://" in url else f"http://{'127.0.0.1' if url.startswith(':') else ''}{url}"
    try:
        parts = urlsplit(text.rstrip("/").removesuffix("/v1"))
        port = parts.port
    except ValueError as error:
        raise ConfigError(f"{url!r} is not a URL: {error}.", _REMEDY) from None
    if parts.scheme not in ("http", "https") or not parts.hostname:
        raise ConfigError(f"{url!r} is not a URL with http or https.", _REMEDY)
    if parts.username or parts.password:
        raise ConfigError(
            "The URL has a user name or a password.", "Give a key by --key-variable instead."
        )
    default = 443 if parts.scheme == "https" else 80
    return Address(scheme=parts.scheme, host=parts.hostname, port=port or default, path=parts.path)


@cache
def _version() -> str:
    """Looked up once: that takes a millisecond, and requests are made while others are timed."""
    return headrace_version()


def request_bytes(address: Address, path: str, body: bytes | None, key: str | None = None) -> bytes:
    """A whole request: POST with a body, GET without."""
    host = f"[{address.host}]" if ":" in address.host else address.host
    lines = [
        f"{'GET' if body is None else 'POST'} {address.path}{path} HTTP/1.1",
        f"Host: {host}:{address.port}",
        f"User-Agent: headrace/{_version()}",
        "Accept: text/event-stream, application/json",
    ]
    if key:
        lines.append(f"Authorization: Bearer {key}")
    if body is not None:
        lines += ["Content-Type: application/json", f"Content-Length: {len(body)}"]
    return "\r\n".join([*lines, "", ""]).encode("latin-1") + (body or b"")


class Backlog:
    """What arrived and is not read yet, of all connections, in order. Many streams get their token
    at the same moment: who parses one before looking at the next stamps the last one late. So
    everything that is there gets its time first, and is then read in short turns, between which
    requests go out."""

    def __init__(self) -> None:
        self._items: deque[tuple[Callable[[bytes | None], None], float, bytes | None]] = deque()
        self.now_s = 0.0  # when what is being read arrived
        self._is_due = False

    def add(self, read: Callable[[bytes | None], None], at_s: float, data: bytes | None) -> None:
        """`data`: None for the end of a connection."""
        self._items.append((read, at_s, data))
        if not self._is_due:
            self._is_due = True
            asyncio.get_running_loop().call_soon(self._turn)

    def _turn(self) -> None:
        until_s = time.perf_counter() + _TURN_S
        items = self._items
        while items:
            read, self.now_s, data = items.popleft()
            read(data)
            if items and time.perf_counter() > until_s:
                asyncio.get_running_loop().call_soon(self._turn)
                return
        self._is_due = False


class Exchange(asyncio.Protocol):
    """One connection: bytes to an answer. One request at a time."""

    def __init__(self, clock: Clock = time.perf_counter, backlog: Backlog | None = None) -> None:
        self._clock = clock
        self._backlog = backlog or Backlog()
        self._transport: asyncio.Transport | None = None
        self._parser = httptools.HttpResponseParser(self)
        self._answer: Answer | None = None
        self._waiter: asyncio.Future[None] | None = None
        self._is_stream = False
        self._headers: dict[str, str] = {}
        self._body: list[bytes] = []
        self._error: Exception | None = None
        self.is_free = True  # may be asked (again)
        self.is_open = False

    # What asyncio calls.

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)
        self.is_open = True

    def data_received(self, data: bytes) -> None:
        self._backlog.add(self._read, self._clock(), data)

    def connection_lost(self, error: Exception | None) -> None:
        self.is_open = self.is_free = False
        self._error = error
        self._backlog.add(self._read, self._clock(), None)

    def _read(self, data: bytes | None) -> None:
        if data is None:
            self._lost()
            return
        try:
            self._parser.feed_data(data)
        except httptools.HttpParserError as error:
            self._fail(Failure.NOT_HTTP, f"{error}: {data[:80]!r}")

    def _lost(self) -> None:
        answer = self._answer
        if answer is None:
            return
        if self._is_stream and answer.is_done:
            self._finish()
        else:
            said = str(self._error) if self._error else "the endpoint closed it"
            self._fail(Failure.RESET, said)

    # What the parser calls.

    def on_message_begin(self) -> None:
        self._headers, self._body, self._is_stream = {}, [], False

    def on_header(self, name: bytes, value: bytes) -> None:
        self._headers[name.lower().decode("latin-1")] = value.decode("latin-1")

    def on_headers_complete(self) -> None:
        status = self._parser.get_status_code()
        kind = self._headers.get("content-type", "")
        self._is_stream = 200 <= status < 300 and kind.startswith("text/event-stream")

    def on_body(self, body: bytes) -> None:
        if not self._is_stream or self._answer is None:
            self._body.append(body)
            return
        self._answer.feed(body, self._backlog.now_s)
        if self._answer.failure is not None or self._answer.is_done:
            self._wake()

    def on_message_complete(self) -> None:
        answer = self._answer
        if answer is not None:
            if not self._is_stream:
                fail_by_status(
                    answer, self._parser.get_status_code(), self._headers, b"".join(self._body)
                )
            self._finish()
        self.is_free = self.is_open and self._parser.should_keep_alive()
        self._parser = httptools.HttpResponseParser(self)

    # What a caller calls.

    async def ask(self, request: bytes, answer: Answer, timeout_s: float) -> None:
        """Until the answer is whole, or has failed. Never raises for what the endpoint does."""
        assert self._transport is not None
        loop = asyncio.get_running_loop()
        self._answer, self.is_free = answer, False
        self._waiter = loop.create_future()
        timer = loop.call_later(timeout_s, self._expire, timeout_s)
        try:
            self._transport.write(request)
            await self._waiter
        finally:
            timer.cancel()
            self._answer = self._waiter = None
            if not self.is_free:
                self.close()

    async def get(self, request: bytes, timeout_s: float) -> tuple[int, dict[str, str], bytes]:
        """A plain answer: status, headers, body. It has failed only where no answer came."""
        answer = Answer()
        await self.ask(request, answer, timeout_s)
        if answer.failure in (Failure.RESET, Failure.TIMEOUT, Failure.NOT_HTTP):
            raise Unreachable(f"{answer.failure.capitalize()}: {answer.detail}.")
        return self._status, self._headers, b"".join(self._body)

    def close(self) -> None:
        self.is_free = self.is_open = False
        if self._transport is not None:
            self._transport.close()

    _status = 0

    def _expire(self, timeout_s: float) -> None:
        detail = f"no whole answer within {timeout_s:g} s"
        # What is there already is read first.
        self._backlog.add(lambda _: self._fail(Failure.TIMEOUT, detail), self._clock(), None)

    def _fail(self, failure: Failure, detail: str) -> None:
        self.is_free = False
        if self._answer is not None:
            self._answer.fail(failure, detail)
        self._wake()

    def _finish(self) -> None:
        if self._answer is not None:
            self._status = self._parser.get_status_code()
            if self._is_stream:
                self._answer.end(self._backlog.now_s)
        self._wake()

    def _wake(self) -> None:
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)


def fail_by_status(answer: Answer, status: int, headers: Mapping[str, str], body: bytes) -> None:
    """What an answer that is no stream means."""
    if status == 429:
        answer.fail(Failure.RATE_LIMITED, message_of(body))
    elif 300 <= status < 400:
        answer.fail(Failure.REDIRECT, f"{status} to {headers.get('location', 'somewhere')}")
    elif 200 <= status < 300:
        kind = headers.get("content-type", "no content type")
        answer.fail(Failure.NO_STREAM, f"{status} with {kind}: {message_of(body)}")
    else:
        answer.fail(Failure.HTTP, f"{status}: {message_of(body)}")


class Connections:
    """All connections to one endpoint; those that are free are used again, last used first."""

    def __init__(self, address: Address, clock: Clock = time.perf_counter) -> None:
        self.address = address
        self._clock = clock
        self._free: list[Exchange] = []
        self._ssl = ssl.create_default_context() if address.is_tls else None
        self._place: tuple[str, int] | None = None
        self._backlog = Backlog()
        self.opened = 0

    async def resolve(self) -> None:
        """Once, so that no request waits for a name."""
        loop = asyncio.get_running_loop()
        address = self.address
        try:
            found = await loop.getaddrinfo(
                address.host, address.port, type=socket.SOCK_STREAM, proto=socket.IPPROTO_TCP
            )
        except OSError as error:
            raise Unreachable(
                f"The host {address.host} has no address: {error.strerror or error}.", _REMEDY
            ) from None
        # The first address that takes a connection.
        for *_, place in found:
            self._place = (str(place[0]), int(place[1]))
            try:
                self._free.append(await self._open())
                return
            except OSError as failed:
                last = failed
        raise unreachable(address, last)

    async def prepare(self, count: int) -> None:
        """So many open connections, before the clock starts."""
        self._free = [one for one in self._free if one.is_open and one.is_free]
        while len(self._free) < count:
            self._free.append(await self._open())

    async def check(self) -> None:
        """Raises OSError if nobody listens any more."""
        self._free.append(await self._open())

    async def take(self) -> Exchange:
        """A free one, or a new one. Raises OSError where none can be opened."""
        while self._free:
            one = self._free.pop()
            if one.is_open and one.is_free:
                return one
            one.close()
        return await self._open()

    def give(self, one: Exchange) -> None:
        if one.is_open and one.is_free:
            self._free.append(one)
        else:
            one.close()

    def close(self) -> None:
        for one in self._free:
            one.close()
        self._free = []

    async def get(self, path: str, key: str | None, timeout_s: float) -> tuple[int, bytes]:
        """Status and body. A redirect is refused, so that keys stay where they belong."""
        try:
            one = await self.take()
        except OSError as error:
            raise unreachable(self.address, error) from None
        status, headers, body = await one.get(
            request_bytes(self.address, path, None, key), timeout_s
        )
        self.give(one)
        if 300 <= status < 400:
            raise Unreachable(
                f"{self.address.url}{path} redirects to {headers.get('location', 'somewhere')!r}.",
                "Give that URL: redirects are not followed.",
            )
        return status, body

    async def _open(self) -> Exchange:
        assert self._place is not None, "resolve first"
        self.opened += 1
        _, protocol = await asyncio.get_running_loop().create_connection(
            lambda: Exchange(self._clock, self._backlog),
            *self._place,
            ssl=self._ssl,
            server_hostname=self.address.host if self._ssl else None,
            ssl_handshake_timeout=_HANDSHAKE_S if self._ssl else None,
        )
        return protocol


def unreachable(address: Address, error: OSError) -> Unreachable:
    if isinstance(error, ssl.SSLError) or (address.is_tls and error.errno is None):
        said = str(error) or "the connection was closed during the handshake"
        return Unreachable(
            f"TLS with {address.host} failed: {said.rstrip('.')}.",
            "Check the certificate, or use http.",
        )
    return Unreachable(
        f"{address.host}:{address.port} can't be reached: {error.strerror or error}.",
        "Is the server running?",
    )
