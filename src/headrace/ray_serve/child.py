"""A replica's server: one `headrace serve` process on a loopback port, and requests to it.

A process of its own, not the engine inside Ray's worker: it has everything that a Headrace server
has (queue bounds, keys, metrics, an engine that is restarted), and Ray's packages stay out of it.
It ends when the worker ends, however that ends. Knows processes and HTTP answers; no Ray.
"""

from __future__ import annotations

import asyncio
import contextlib
import ctypes
import json
import os
import secrets
import signal
import sys
from collections import deque
from collections.abc import AsyncGenerator
from dataclasses import dataclass

import httptools

from headrace.core.children import python_command
from headrace.core.errors import HeadraceError

_LAST_LINES = 20
_READ_BYTES = 64 << 10
_PR_SET_PDEATHSIG = 1


class ReplicaError(HeadraceError):
    """A replica's server can't be started, or is gone."""

    status = 503


class Lost(Exception):
    """The connection ended before the answer was whole."""


@dataclass(frozen=True, slots=True)
class Head:
    status: int
    headers: tuple[tuple[str, str], ...]  # names in lower case

    def get(self, name: str) -> str:
        return next((value for key, value in self.headers if key == name), "")


class Child:
    def __init__(self, process: asyncio.subprocess.Process, metrics_key: str) -> None:
        self._process = process
        self._lines: deque[str] = deque(maxlen=_LAST_LINES)
        self._url: asyncio.Future[str] = asyncio.get_running_loop().create_future()
        self._reading = asyncio.create_task(self._read_log())
        self.metrics_key = metrics_key
        self.host, self.port = "127.0.0.1", 0

    @classmethod
    async def start(cls, words: list[str], timeout_s: float) -> Child:
        """Returns when it is ready. `words` are the command's arguments without an address."""
        key = secrets.token_hex(16)
        process = await asyncio.create_subprocess_exec(
            *python_command("headrace"),
            *words,
            *("--host", "127.0.0.1", "--port", "0"),
            env={**os.environ, "HEADRACE_METRICS_KEY": key},
            stdin=asyncio.subprocess.DEVNULL,
            stderr=asyncio.subprocess.PIPE,
            preexec_fn=_end_with_parent,
        )
        child = cls(process, key)
        try:
            url = await asyncio.wait_for(asyncio.shield(child._url), timeout_s)
        except TimeoutError:
            await child.stop(0.0)
            raise ReplicaError(
                f"`headrace {' '.join(words)}` was not ready after {timeout_s:g} s.",
                "Raise start_s, or see the replica's log.",
            ) from None
        except ReplicaError:
            await child.stop(0.0)
            raise
        child.port = int(url.rpartition(":")[2])
        return child

    @property
    def pid(self) -> int:
        return self._process.pid

    @property
    def is_running(self) -> bool:
        return self._process.returncode is None

    async def _read_log(self) -> None:
        """Its log lines go to the worker's log; the one that says `ready` has the address."""
        assert self._process.stderr is not None
        async for raw in self._process.stderr:
            line = raw.decode(errors="replace").rstrip()
            self._lines.append(line)
            print(line, file=sys.stderr, flush=True)
            if not self._url.done() and '"ready"' in line:
                with contextlib.suppress(ValueError, KeyError, TypeError):
                    said = json.loads(line)
                    if said["event"] == "ready":
                        self._url.set_result(said["url"])
        status = await self._process.wait()
        if not self._url.done():
            self._url.set_exception(
                ReplicaError(f"`headrace serve` ended with {status}: " + "\n".join(self._lines))
            )

    def kill(self) -> None:
        with contextlib.suppress(ProcessLookupError):
            self._process.kill()

    async def stop(self, timeout_s: float) -> None:
        """Lets running requests finish."""
        with contextlib.suppress(ProcessLookupError):
            self._process.terminate()
        try:
            await asyncio.wait_for(self._process.wait(), timeout_s)
        except TimeoutError:
            self.kill()
            await self._process.wait()
        # Its log may still be open, held by a process of its own that is on its way out.
        self._reading.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await self._reading
        self._process._transport.close()  # type: ignore[attr-defined]

    async def get(self, path: str, timeout_s: float = 5.0) -> tuple[int, bytes]:
        request = f"GET {path} HTTP/1.1\r\nauthorization: Bearer {self.metrics_key}\r\n"
        body, status = [], 0
        async with asyncio.timeout(timeout_s):
            async for each in self.ask(request.encode()):
                if isinstance(each, Head):
                    status = each.status
                else:
                    body.append(each)
        return status, b"".join(body)

    async def ask(self, request: bytes, body: bytes = b"") -> AsyncGenerator[Head | bytes, None]:
        """`request` is a request line and headers, without those of the connection. The answer's
        head, then its body as it comes, chunks decoded. Raises Lost or OSError."""
        reader, writer = await asyncio.open_connection(self.host, self.port)
        answer = _Answer()
        try:
            writer.write(
                request
                + b"host: %b:%d\r\nconnection: close\r\n" % (self.host.encode(), self.port)
                + (b"content-length: %d\r\n\r\n" % len(body) if body else b"\r\n")
                + body
            )
            has_head = False
            while not answer.is_whole:
                data = await reader.read(_READ_BYTES)
                if not data:
                    raise Lost("the server closed the connection")
                answer.feed(data)
                if answer.head is not None and not has_head:
                    has_head = True
                    yield answer.head
                if part := answer.take():
                    yield part
        except ConnectionError as error:
            raise Lost(str(error)) from None
        finally:
            writer.close()  # also when nobody reads on: the server then stops computing


class _Answer:
    def __init__(self) -> None:
        self._parser = httptools.HttpResponseParser(self)
        self._headers: list[tuple[str, str]] = []
        self._parts: list[bytes] = []
        self.head: Head | None = None
        self.is_whole = False

    def feed(self, data: bytes) -> None:
        try:
            self._parser.feed_data(data)
        except httptools.HttpParserError as error:
            raise Lost(f"not HTTP: {error}") from None

    def take(self) -> bytes:
        parts, self._parts = self._parts, []
        return b"".join(parts)

    def on_header(self, name: bytes, value: bytes) -> None:
        self._headers.append((name.decode("latin-1").lower(), value.decode("latin-1")))

    def on_headers_complete(self) -> None:
        self.head = Head(self._parser.get_status_code(), tuple(self._headers))

    def on_body(self, body: bytes) -> None:
        self._parts.append(body)

    def on_message_complete(self) -> None:
        self.is_whole = True


# Looked up before any fork: a child of a process with threads may only call it.
_prctl = ctypes.CDLL(None).prctl if sys.platform == "linux" else None


def _end_with_parent() -> None:
    """A worker that is killed says nothing to its children: the kernel does."""
    if _prctl is not None:
        _prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
