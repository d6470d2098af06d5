"""Clients in a closed loop, in several processes: each sends its next request when its last ended.

Light on purpose, since they run where they measure: requests are made before the clock starts, a
connection is kept, and of a stream only its first text, its last and its final count are looked at.
Knows HTTP and server-sent events as far as that takes; nothing of engines.
"""

from __future__ import annotations

import asyncio
import gc
import multiprocessing
import re
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import partial
from multiprocessing.connection import Connection
from typing import Any, NamedTuple, cast

from served_workloads import Job, Request

# A stream's last events: a token, the counts, the end. The counts are within so many bytes of it.
_TAIL_BYTES = 2048
PATIENCE_S = 300  # with one run; the longest of a GPU takes a tenth
_COUNT = re.compile(rb'"completion_tokens": ?(\d+)')


class Timing(NamedTuple):
    """Of one request, by a clock that all processes share."""

    began_s: float
    first_s: float  # text
    last_s: float  # text
    tokens: int


class LoadFailure(Exception):
    """A request that was not answered as it should have been."""


class Client(asyncio.Protocol):
    """One connection. `done` ends with the timings, or with why there are none."""

    def __init__(self, requests: Sequence[Request], done: asyncio.Future[list[Timing]]) -> None:
        self._requests = requests
        self._done = done
        self._timings: list[Timing] = []
        self._failure = ""
        self._head = b""
        self._tail = b""
        self._began_s = self._first_s = self._last_s = 0.0

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)
        self._send()

    def connection_lost(self, error: Exception | None) -> None:
        if len(self._timings) == len(self._requests):
            self._done.set_result(self._timings)
        else:
            why = self._failure or f"the server closed the connection ({error})"
            self._done.set_exception(LoadFailure(why))

    def data_received(self, data: bytes) -> None:
        now = time.perf_counter()
        if not self._first_s:
            self._head += data
            if not self._head.startswith(b"HTTP/1.1 200 "[: len(self._head)]):
                self._refused()
                return
            # Only texts have quotes that are not escaped; the first may come with the headers.
            if self._head.count(b'"text":"') > self._head.count(b'"text":""'):
                self._first_s, self._head = now, b""
        if b'"text":"' in data:
            self._last_s = now
        self._tail = (self._tail + data)[-_TAIL_BYTES:]
        if self._tail.endswith(b"\r\n0\r\n\r\n"):
            self._end()

    def _send(self) -> None:
        request = self._requests[len(self._timings)]
        self._head = self._tail = b""
        self._first_s = self._last_s = 0.0
        self._began_s = time.perf_counter()
        self._transport.writelines(request.parts)

    def _end(self) -> None:
        """The stream is over: as it should be?"""
        asked = self._requests[len(self._timings)].output_tokens
        counts = _COUNT.findall(self._tail)
        if not counts or not self._first_s:
            self._fail(f"the stream ended with {self._tail[-400:]!r}")
            return
        if int(counts[-1]) != asked:
            self._fail(f"{int(counts[-1])} tokens came; asked for {asked}")
            return
        self._timings.append(Timing(self._began_s, self._first_s, self._last_s, asked))
        if len(self._timings) < len(self._requests):
            self._send()
        else:
            self._transport.close()

    def _refused(self) -> None:
        """Once its words are here too: they may come in a packet of their own."""
        loop = asyncio.get_running_loop()
        loop.call_later(0.1, lambda: self._fail(f"the server answered {self._head[:600]!r}"))

    def _fail(self, why: str) -> None:
        self._failure = self._failure or why
        self._transport.close()


async def run_clients(port: int, clients: Sequence[Sequence[Request]]) -> list[Timing]:
    """All at once, to their end. A client that fails sends no more; the others go on."""
    loop = asyncio.get_running_loop()
    futures: list[asyncio.Future[list[Timing]]] = [loop.create_future() for _ in clients]
    makers = [partial(Client, *pair) for pair in zip(clients, futures, strict=True)]
    await asyncio.gather(*(loop.create_connection(make, "127.0.0.1", port) for make in makers))
    timings: list[Timing] = []
    failures: list[BaseException] = []
    for found in await asyncio.gather(*futures, return_exceptions=True):
        if isinstance(found, BaseException):
            failures.append(found)
        else:
            timings += found
    if failures:
        raise LoadFailure(f"{len(failures)} of {len(clients)} clients failed: {failures[0]}")
    return timings


def work(connection: Connection, port: int, number: int, processes: int) -> None:
    """The life of a process: jobs in; "ready", and after "go" timings, out."""
    with suppress(EOFError, KeyboardInterrupt):
        while True:
            job: Job = connection.recv()
            clients = [job.requests_of(c) for c in range(number, job.workload.clients, processes)]
            connection.send("ready")
            connection.recv()
            gc.collect()
            gc.disable()
            try:
                connection.send(run_loop(port, clients))
            except (LoadFailure, OSError) as error:
                connection.send(str(error))
            finally:
                gc.enable()


def run_loop(port: int, clients: Sequence[Sequence[Request]]) -> list[Timing]:
    """With the quicker event loop, where it is installed: the server needs it too."""
    make: Callable[[], asyncio.AbstractEventLoop] = asyncio.new_event_loop
    with suppress(ImportError):
        import uvloop

        make = uvloop.new_event_loop
    with asyncio.Runner(loop_factory=make) as runner:
        try:
            return runner.run(asyncio.wait_for(run_clients(port, clients), PATIENCE_S))
        except TimeoutError:
            raise LoadFailure(f"no end after {PATIENCE_S} s") from None


class Processes:
    """Client processes that live as long as the server that they load."""

    def __init__(self, port: int, count: int) -> None:
        context = multiprocessing.get_context("spawn")  # nothing of ours is in them
        self._connections: list[Connection[Any, Any]] = []
        self._processes = []
        for number in range(count):
            ours, theirs = context.Pipe()
            process = context.Process(
                target=work, args=(theirs, port, number, count), name=f"clients {number}"
            )
            process.start()
            theirs.close()
            self._connections.append(ours)
            self._processes.append(process)

    def run(self, job: Job) -> list[Timing]:
        for connection in self._connections:
            connection.send(job)
        for connection in self._connections:
            connection.recv()
        for connection in self._connections:
            connection.send("go")
        found = [connection.recv() for connection in self._connections]
        failures = [said for said in found if isinstance(said, str)]
        if failures:
            raise LoadFailure("; ".join(failures))
        return [timing for timings in found for timing in timings]

    def close(self) -> None:
        for connection in self._connections:
            connection.close()
        for process in self._processes:
            process.join(10)
            if process.is_alive():
                process.terminate()
                process.join()
