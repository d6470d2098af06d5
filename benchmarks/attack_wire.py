"""HTTP as an attacker speaks it: bytes that were made elsewhere, sent as they are, and answers read
with no more trust than they deserve. For asyncio; light, since it runs where it measures.

Knows HTTP/1.1's framing and server-sent events; not what is asked.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import zlib
from dataclasses import dataclass, field
from typing import Any

HOST = "127.0.0.1"
MOST_HEADER_BYTES = 1 << 20


class BrokenAnswerError(Exception):
    """What came is no answer in HTTP/1.1."""


@dataclass(slots=True)
class Answer:
    status: int
    headers: dict[str, str]  # names in lower case
    body: bytes = b""
    is_whole: bool = True  # as its own framing says

    @property
    def is_stream(self) -> bool:
        return self.headers.get("content-type", "").startswith("text/event-stream")

    @property
    def keeps_alive(self) -> bool:
        return self.is_whole and self.headers.get("connection", "").lower() != "close"

    def json(self) -> Any:
        return json.loads(self.body)


def make_head(
    method: str,
    path: str,
    headers: list[tuple[str, str]],
    length: int | None,
    *,
    content_type: str | None = "application/json",
) -> bytes:
    lines = [f"{method} {path} HTTP/1.1"]
    names = {name.lower() for name, _ in headers}
    if "host" not in names:
        lines.append("host: 127.0.0.1")
    if length is not None:
        lines.append(f"content-length: {length}")
    if content_type is not None and "content-type" not in names and length is not None:
        lines.append(f"content-type: {content_type}")
    lines += [f"{name}: {value}" for name, value in headers]
    return "\r\n".join(lines).encode("utf-8", "surrogateescape") + b"\r\n\r\n"


def post(path: str, body: Any, *headers: tuple[str, str]) -> bytes:
    data = body if isinstance(body, bytes) else json.dumps(body).encode()
    return make_head("POST", path, list(headers), len(data)) + data


class Wire:
    """One connection."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.reader = reader
        self.writer = writer

    @classmethod
    async def open(cls, port: int) -> Wire:
        return cls(*await asyncio.open_connection(HOST, port, limit=MOST_HEADER_BYTES))

    def send(self, data: bytes) -> None:
        self.writer.write(data)

    async def drain(self) -> None:
        await self.writer.drain()

    def half_close(self) -> None:
        self.writer.write_eof()

    async def answer(self, method: str = "GET") -> Answer:
        """The next answer, whole. OSError or IncompleteReadError where none comes."""
        answer = await self._head()
        while answer.status == 100:
            answer = await self._head()
        if method == "HEAD" or answer.status in (204, 304):
            return answer
        coding = answer.headers.get("transfer-encoding", "").lower()
        length = answer.headers.get("content-length", "")
        if coding == "chunked":
            answer.body = await self._chunks(answer)
        elif length.isdigit():
            try:
                answer.body = await self.reader.readexactly(int(length))
            except asyncio.IncompleteReadError as error:
                answer.body, answer.is_whole = error.partial, False
        else:
            answer.body = await self.reader.read()
            answer.headers["connection"] = "close"
        return answer

    async def _head(self) -> Answer:
        try:
            raw = await self.reader.readuntil(b"\r\n\r\n")
        except asyncio.LimitOverrunError as error:
            raise BrokenAnswerError("headers without an end") from error
        status_line, *lines = raw[:-4].split(b"\r\n")
        parts = status_line.split(b" ", 2)
        if len(parts) < 2 or not parts[0].startswith(b"HTTP/1.") or not parts[1].isdigit():
            raise BrokenAnswerError(f"no status line: {status_line[:100]!r}")
        headers = {}
        for line in lines:
            name, colon, value = line.partition(b":")
            if not colon:
                raise BrokenAnswerError(f"no header: {line[:100]!r}")
            headers[name.decode("latin-1").lower()] = value.strip().decode("latin-1")
        return Answer(int(parts[1]), headers)

    async def _chunks(self, answer: Answer) -> bytes:
        found = bytearray()
        try:
            while True:
                size = int(await self.reader.readuntil(b"\r\n"), 16)
                found += (await self.reader.readexactly(size + 2))[:-2]
                if size == 0:
                    return bytes(found)
        except (asyncio.IncompleteReadError, ConnectionError):
            answer.is_whole = False
            return bytes(found)
        except ValueError as error:
            raise BrokenAnswerError(f"a broken chunk: {error}") from error

    def abort(self) -> None:
        """Gone, as a client that crashed is."""
        self.writer.transport.abort()

    async def close(self) -> None:
        self.writer.close()
        with contextlib.suppress(OSError):
            await self.writer.wait_closed()


async def ask(
    port: int, path: str, body: Any, *headers: tuple[str, str], limit_s: float = 120.0
) -> Answer:
    """One request on a connection of its own."""
    async with asyncio.timeout(limit_s):
        wire = await Wire.open(port)
        try:
            wire.send(post(path, body, *headers, ("connection", "close")))
            return await wire.answer("POST")
        finally:
            wire.abort()


async def health(port: int, *, limit_s: float = 10.0) -> int:
    """The status of /health; an error where it does not come."""
    async with asyncio.timeout(limit_s):
        wire = await Wire.open(port)
        try:
            wire.send(make_head("GET", "/health", [("connection", "close")], None))
            return (await wire.answer()).status
        finally:
            wire.abort()


@dataclass(slots=True)
class Events:
    """A stream's events as they stand in a body."""

    names: list[str] = field(default_factory=list)  # "" where an event has none
    data: list[str] = field(default_factory=list)
    rest: bytes = b""  # what is no whole event


def read_events(body: bytes) -> Events:
    events = Events()
    *whole, events.rest = body.replace(b"\r\n", b"\n").split(b"\n\n")
    for block in whole:
        name, data = "", []
        for line in block.decode("utf-8", "replace").split("\n"):
            key, _, value = line.partition(":")
            value = value.removeprefix(" ")
            if key == "event":
                name = value
            elif key == "data":
                data.append(value)
        events.names.append(name)
        events.data.append("\n".join(data))
    return events


def digest(value: Any) -> str:
    """Short, for telling answers apart in a report."""
    return f"{zlib.crc32(json.dumps(value, sort_keys=True).encode()):08x}"
