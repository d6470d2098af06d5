"""A small client for completions that stream, and a server of this Headrace to ask.

Light on purpose, since it runs where it measures: plain sockets, bodies made before they are sent,
and of what comes only the times and the last counts are kept. A time is taken when bytes arrive,
before anything is looked at. Knows HTTP and server-sent events as far as that takes.
"""

from __future__ import annotations

import asyncio
import json
import re
import signal
import socket
import subprocess
import time
import urllib.error
import urllib.request
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType
from typing import Self, cast

from headrace.core.children import child_environment, end_with_parent, python_command
from headrace.core.errors import HeadraceError

PATIENCE_S = 300.0  # with one request
START_S = 180.0  # until a server is ready
_COUNT = re.compile(rb'"completion_tokens": ?(\d+)')
_IDS = re.compile(rb'"token_ids":\[([0-9,]*)\]')
_METRIC = re.compile(r"^headrace:(\w+?)(?:_total)?\{([^}]*)\} ([0-9.e+-]+)$", re.MULTILINE)
_PART = re.compile(r'(?:part|state)="(\w+)"')
_TAIL_BYTES = 4096


@dataclass(slots=True, kw_only=True)
class Heard:
    """What a client saw of one request, by time.perf_counter."""

    sent_s: float = 0.0
    first_s: float = 0.0  # text
    last_s: float = 0.0  # text
    tokens: int = 0
    text_s: list[float] = field(default_factory=list)  # whenever text came
    token_ids: list[int] = field(default_factory=list)  # of the answer, if they were asked for

    @property
    def ttft_s(self) -> float:
        return self.first_s - self.sent_s

    @property
    def tpot_s(self) -> float:
        return (self.last_s - self.first_s) / max(1, self.tokens - 1)


def completion(prompt_ids: Sequence[int], output_tokens: int, *, wants_ids: bool = False) -> bytes:
    """A whole request: greedy, exactly so many tokens, streamed. With `wants_ids` the answer's
    tokens come too, for a next turn that begins with them."""
    body = json.dumps(
        {
            **({"return_token_ids": True} if wants_ids else {}),
            "prompt": list(prompt_ids),
            "max_tokens": output_tokens,
            "temperature": 0,
            "ignore_eos": True,
            "stream": True,
            "stream_options": {"include_usage": True},
        }
    ).encode()
    head = (
        "POST /v1/completions HTTP/1.1\r\nHost: 127.0.0.1\r\nContent-Type: application/json\r\n"
        f"Content-Length: {len(body)}\r\n\r\n"
    )
    return head.encode() + body


class _Stream(asyncio.Protocol):
    def __init__(self, done: asyncio.Future[Heard]) -> None:
        self.done = done
        self.heard = Heard()
        self.tail = b""
        self.kept: list[bytes] | None = None  # all that came, if the answer's ids are wanted
        self.transport: asyncio.Transport

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport = cast(asyncio.Transport, transport)

    def data_received(self, data: bytes) -> None:
        now_s = time.perf_counter()
        heard = self.heard
        if self.kept is not None:
            self.kept.append(data)
        if not heard.first_s:
            data = self.tail + data
        if data.count(b'"text":"') > data.count(b'"text":""'):
            heard.first_s = heard.first_s or now_s
            heard.last_s = now_s
            heard.text_s.append(now_s)
        self.tail = (self.tail + data)[-_TAIL_BYTES:] if heard.first_s else data
        if data.endswith(b"\r\n0\r\n\r\n") or self.tail.endswith(b"\r\n0\r\n\r\n"):
            self._end()
        elif not heard.first_s and not data.startswith(b"HTTP/1.1 200"[: len(data)]):
            self._fail(data[:300])

    def connection_lost(self, error: Exception | None) -> None:
        if not self.done.done():
            self._fail(str(error).encode())

    def _end(self) -> None:
        counts = _COUNT.findall(self.tail)
        if not counts or not self.heard.first_s:
            self._fail(self.tail[-300:])
            return
        self.heard.tokens = int(counts[-1])
        for ids in _IDS.findall(b"".join(self.kept or ())):
            self.heard.token_ids += [int(one) for one in ids.split(b",") if one]
        if not self.done.done():
            self.done.set_result(self.heard)

    def _fail(self, said: bytes) -> None:
        if not self.done.done():
            self.done.set_exception(
                HeadraceError(
                    f"The server answered {said.decode('utf-8', 'replace')!r}; expected a stream.",
                    "Look at its log.",
                )
            )


class Connection:
    """One kept connection: one request at a time."""

    def __init__(self, transport: asyncio.Transport, protocol: _Stream) -> None:
        self._transport = transport
        self._protocol = protocol

    @classmethod
    async def open(cls, port: int) -> Connection:
        loop = asyncio.get_running_loop()
        transport, protocol = await loop.create_connection(
            lambda: _Stream(loop.create_future()), "127.0.0.1", port
        )
        protocol.done.cancel()
        return cls(transport, protocol)

    @property
    def is_open(self) -> bool:
        """Servers close connections that nobody uses for a while."""
        return not self._transport.is_closing()

    async def ask(self, request: bytes, *, wants_ids: bool = False) -> Heard:
        """Only while it is open: nobody would answer."""
        protocol = self._protocol
        protocol.done = asyncio.get_running_loop().create_future()
        protocol.heard = Heard()
        protocol.tail, protocol.kept = b"", [] if wants_ids else None
        protocol.heard.sent_s = time.perf_counter()
        self._transport.write(request)
        return await asyncio.wait_for(protocol.done, PATIENCE_S)

    def close(self) -> None:
        self._transport.close()


class Server:
    """`headrace serve` as a process, until the with-block ends."""

    def __init__(self, model: str | None, flags: Sequence[str] = ()) -> None:
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            self.port: int = probe.getsockname()[1]
        command = [*python_command("headrace"), "serve", *([model] if model else [])]
        own = ["--port", str(self.port), "--log-level", "error", "--log-format", "json"]
        self._process = subprocess.Popen(
            [*command, *own, *flags],
            env=child_environment(),
            stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            start_new_session=True,  # a Ctrl-C is for us
            preexec_fn=end_with_parent,  # who kills us does not know about it
        )

    def __enter__(self) -> Self:
        try:
            self._wait()
        except BaseException:
            self.stop()
            raise
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.stop()

    def stop(self) -> None:
        if self._process.poll() is None:
            self._process.send_signal(signal.SIGTERM)
            try:
                self._process.wait(30)
            except subprocess.TimeoutExpired:
                self._process.kill()
                self._process.wait()
        if self._process.stderr is not None:
            self._process.stderr.close()

    def _wait(self) -> None:
        until_s = time.monotonic() + START_S
        while time.monotonic() < until_s:
            if self._process.poll() is not None:
                said = self._process.stderr.read() if self._process.stderr else b""
                raise HeadraceError(
                    "The server to be measured did not start.",
                    "Start headrace serve by hand to see why.",
                    detail=said.decode("utf-8", "replace")[-2000:],
                )
            try:
                with urllib.request.urlopen(f"http://127.0.0.1:{self.port}/ready"):
                    return
            except (urllib.error.URLError, OSError):
                time.sleep(0.05)
        raise HeadraceError(f"The server was not ready within {START_S:g} s.", "Look at its log.")

    def get(self, path: str) -> str:
        with urllib.request.urlopen(f"http://127.0.0.1:{self.port}{path}") as reply:
            return str(reply.read().decode())

    def http_busy_s(self) -> float:
        """Processor time of the process that speaks HTTP, so far; 0 where it can't be read."""
        try:
            ran_ns, *_ = Path(f"/proc/{self._process.pid}/schedstat").read_text().split()
        except (OSError, ValueError):
            return 0.0
        return int(ran_ns) / 1e9

    def counters(self) -> dict[str, float]:
        """The server's own figures by name; step_seconds by part, kv_blocks by state."""
        found: dict[str, float] = {}
        for name, labels, value in _METRIC.findall(self.get("/metrics")):
            part = _PART.search(labels)
            found[f"{name} {part[1]}" if part else name] = float(value)
        return found
