"""Replicas that do what a test says, a router in front of them, and a client that reads bytes."""

from __future__ import annotations

import asyncio
import contextlib
import json
import socket
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import dataclass, field
from random import Random
from typing import Any

from headrace.client.connection import parse_address
from headrace.router.fleet import Fleet
from headrace.router.front import Edge
from headrace.router.heartbeat import Heart
from headrace.router.router import Router
from headrace.router.run import serving
from headrace.router.settings import RouterSettings
from headrace.router.versions import Version
from headrace.server.access.keys import Keys

PATH = "/v1/chat/completions"
STREAM_HEAD = (
    b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\ntransfer-encoding: chunked\r\n\r\n"
)
LAST_CHUNK = b"0\r\n\r\n"


def chunk(data: bytes) -> bytes:
    return b"%x\r\n%b\r\n" % (len(data), data)


def plain(status: int, value: object, more: str = "") -> bytes:
    body = json.dumps(value).encode()
    head = f"HTTP/1.1 {status} X\r\ncontent-type: application/json\r\n{more}"
    return f"{head}content-length: {len(body)}\r\n\r\n".encode() + body


@dataclass
class Got:
    """A request that a replica read."""

    head: bytes
    body: bytes

    def header(self, name: str) -> str:
        for line in self.head.decode("latin-1").split("\r\n")[1:]:
            key, _, value = line.partition(":")
            if key.lower() == name:
                return value.strip()
        return ""


Behave = Callable[["FakeReplica", Got, asyncio.StreamWriter], Awaitable[None]]


async def answer(replica: FakeReplica, got: Got, writer: asyncio.StreamWriter) -> None:
    """Three events."""
    writer.write(STREAM_HEAD)
    for number in range(3):
        writer.write(chunk(b"data: %b %d\n\n" % (replica.name.encode(), number)))
        await writer.drain()
    writer.write(LAST_CHUNK)


async def hang(replica: FakeReplica, got: Got, writer: asyncio.StreamWriter) -> None:
    """Silent until the test lets it go on, or the client leaves."""
    replica.began.set()
    await replica.go.wait()


async def close(replica: FakeReplica, got: Got, writer: asyncio.StreamWriter) -> None:
    writer.transport.abort()


async def die_half_way(replica: FakeReplica, got: Got, writer: asyncio.StreamWriter) -> None:
    writer.write(STREAM_HEAD + chunk(b"data: first\n\n"))
    await writer.drain()
    await asyncio.sleep(0.01)
    writer.transport.abort()


async def _closed(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    """Without reading: what comes may be the next request."""
    while not writer.transport.is_closing() and not reader.at_eof():
        await asyncio.sleep(0.005)


def status(number: int, more: str = "") -> Behave:
    async def behave(replica: FakeReplica, got: Got, writer: asyncio.StreamWriter) -> None:
        writer.write(plain(number, {"error": {"message": replica.name}}, more))

    return behave


def raw(data: bytes) -> Behave:
    async def behave(replica: FakeReplica, got: Got, writer: asyncio.StreamWriter) -> None:
        writer.write(data)
        await writer.drain()
        writer.close()

    return behave


@dataclass(eq=False)
class FakeReplica:
    name: str = "a"
    model: str = "m"
    fingerprint: str | None = None  # None: not Headrace
    behave: Behave = answer
    health: int = 200
    is_silent: bool = False  # as after SIGSTOP: nothing is answered, not even a heartbeat
    got: list[Got] = field(default_factory=list)  # POSTs
    connections: int = 0
    left: int = 0  # connections that the other side closed during an answer
    began: asyncio.Event = field(default_factory=asyncio.Event)
    go: asyncio.Event = field(default_factory=asyncio.Event)
    url: str = ""
    _server: asyncio.Server | None = None
    _writers: set[asyncio.StreamWriter] = field(default_factory=set)

    async def start(self, port: int = 0) -> None:
        self._server = await asyncio.start_server(self._serve, "127.0.0.1", port)
        self.url = f"http://127.0.0.1:{self._server.sockets[0].getsockname()[1]}"

    def kill(self) -> None:
        """As kill -9 does: nobody listens, and every connection is reset."""
        if self._server is not None:
            self._server.close()
        for writer in list(self._writers):
            writer.transport.abort()

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.connections += 1
        self._writers.add(writer)
        try:
            while True:
                head = await reader.readuntil(b"\r\n\r\n")
                got = Got(head, b"")
                length = int(got.header("content-length") or 0)
                got.body = await reader.readexactly(length)
                if self.is_silent:
                    await asyncio.Event().wait()
                if head.startswith(b"POST") or b" /v1/responses/" in head:
                    self.got.append(got)
                    await self._watched(got, reader, writer)
                else:
                    writer.write(self._about(head.split(b" ")[1].decode()))
        except (asyncio.IncompleteReadError, ConnectionError):
            pass
        finally:
            self._writers.discard(writer)
            writer.close()

    async def _watched(
        self, got: Got, reader: asyncio.StreamReader, writer: asyncio.StreamWriter
    ) -> None:
        work = asyncio.ensure_future(self.behave(self, got, writer))
        gone = asyncio.ensure_future(_closed(reader, writer))
        try:
            await asyncio.wait({work, gone}, return_when=asyncio.FIRST_COMPLETED)
            if not work.done():
                self.left += 1
                raise ConnectionResetError
            await work
        finally:
            work.cancel()
            gone.cancel()

    def _about(self, path: str) -> bytes:
        if path == "/v1/models":
            return plain(200, {"object": "list", "data": [{"id": self.model, "object": "model"}]})
        if path == "/version" and self.fingerprint is not None:
            return plain(200, {"version": "1", "fingerprint": self.fingerprint})
        if path in ("/health", "/ready"):
            return plain(self.health, {})
        if path == "/load" and self.fingerprint is not None:
            return plain(200, {"server_load": 0, "saturation": 0.5})
        return plain(404, {})


@dataclass
class Rig:
    """A router and its replicas."""

    replicas: list[FakeReplica]
    router: Router
    heart: Heart
    edge: Edge
    port: int

    @property
    def fleet(self) -> Fleet:
        return self.router.fleet

    async def settle(self) -> None:
        """Until no request is open: a client may have its last byte a moment earlier."""
        while self.router.counts.open_requests:
            await asyncio.sleep(0.002)

    def seen(self, fake: FakeReplica) -> Any:
        """As the router sees it."""
        found = self.fleet.find(fake.url)
        assert found is not None
        return found


@contextlib.asynccontextmanager
async def rig(
    *fakes: FakeReplica,
    versions: list[Version] | None = None,
    keys: Keys | None = None,
    clock: Callable[[], float] | None = None,
    beats: bool = True,
    seed: int = 0,
    **settings: Any,
) -> AsyncIterator[Rig]:
    for fake in fakes:
        await fake.start()
    chosen = RouterSettings(**{"heartbeat_s": 5.0, "connect_s": 5.0, **settings})
    named = versions or [
        Version(name="", addresses=tuple(parse_address(fake.url) for fake in fakes))
    ]
    more: dict[str, Any] = {} if clock is None else {"clock": clock}
    fleet = Fleet(named, chosen, random=Random(seed), **more)
    router = Router(fleet, chosen, keys=keys)
    heart = Heart(fleet, chosen)
    if beats:
        await heart.first()
    sock = socket.socket()
    sock.bind(("127.0.0.1", 0))
    sock.listen(512)
    async with serving(router, sock) as edge:
        try:
            yield Rig(list(fakes), router, heart, edge, sock.getsockname()[1])
        finally:
            for fake in fakes:
                fake.kill()
    for _ in range(3):
        await asyncio.sleep(0)  # closed transports say so


@dataclass
class Answer:
    status: int
    headers: dict[str, str]
    body: bytes
    is_whole: bool = True

    @property
    def json(self) -> Any:
        return json.loads(self.body)


def request(
    body: object = None,
    *,
    path: str = PATH,
    method: str = "POST",
    headers: dict[str, str] | None = None,
    keep: bool = False,
) -> bytes:
    data = b"" if body is None else body if isinstance(body, bytes) else json.dumps(body).encode()
    lines = [f"{method} {path} HTTP/1.1", "Host: router"]
    lines += [f"{name}: {value}" for name, value in (headers or {}).items()]
    if data or method == "POST":
        lines.append(f"Content-Length: {len(data)}")
    if not keep:
        lines.append("Connection: close")
    return "\r\n".join([*lines, "", ""]).encode() + data


async def ask(port: int, body: object = None, **how: Any) -> Answer:
    """One request on a connection of its own."""
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    try:
        writer.write(request({"messages": []} if body is None else body, **how))
        return await read_answer(reader)
    finally:
        writer.close()


async def get(port: int, path: str, **how: Any) -> Answer:
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    try:
        writer.write(request(path=path, method="GET", **how))
        return await read_answer(reader)
    finally:
        writer.close()


async def read_answer(reader: asyncio.StreamReader) -> Answer:
    head = await reader.readuntil(b"\r\n\r\n")
    while head.startswith(b"HTTP/1.1 100"):
        head = await reader.readuntil(b"\r\n\r\n")
    line, *rest = head.decode("latin-1").strip().split("\r\n")
    headers = {n.lower(): v.strip() for n, _, v in (each.partition(":") for each in rest)}
    body, is_whole = bytearray(), True
    try:
        if headers.get("transfer-encoding") == "chunked":
            while size := int(await reader.readuntil(b"\r\n"), 16):
                body += await reader.readexactly(size)
                await reader.readexactly(2)
            await reader.readexactly(2)
        elif "content-length" in headers:
            body += await reader.readexactly(int(headers["content-length"]))
        else:
            body += await reader.read()
    except (asyncio.IncompleteReadError, ConnectionError) as error:
        is_whole = False
        body += getattr(error, "partial", b"")
    return Answer(int(line.split(" ")[1]), headers, bytes(body), is_whole)
