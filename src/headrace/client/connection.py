"""Addresses, requests as bytes, and kept connections to one endpoint.

Names are resolved once, before the first request. A connection is used again only after its answer
was read to the end.
"""

from __future__ import annotations

import asyncio
import socket
import ssl
import time
from dataclasses import dataclass
from functools import cache
from urllib.parse import urlsplit

from headrace.client.answer import Answer, Failure
from headrace.client.exchange import Backlog, Clock, Exchange
from headrace.core.errors import ConfigError, HeadraceError
from headrace.core.version import headrace_version

_HANDSHAKE_S = 10.0
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

    @property
    def is_idle(self) -> bool:
        """Everything that arrived was read."""
        return self._backlog.is_empty

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
        answer = Answer()
        await one.ask(request_bytes(self.address, path, None, key), answer, timeout_s)
        if answer.failure in (Failure.RESET, Failure.TIMEOUT, Failure.NOT_HTTP):
            raise Unreachable(f"{answer.failure.capitalize()}: {answer.detail}.")
        status, body = one.status, one.body
        self.give(one)
        if 300 <= status < 400:
            where = one.headers.get("location", "somewhere")
            raise Unreachable(
                f"{self.address.url}{path} redirects to {where!r}.",
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
