"""The application and its edge over endpoints that misbehave, on both event loops."""

from __future__ import annotations

import asyncio
import json
import socket
import threading
from collections.abc import AsyncIterator, Callable, Iterator
from typing import Any, cast

import pytest
import uvloop
from tests.server.raw_client import RawClient

from headrace.core.config import EngineConfig
from headrace.core.errors import InvalidRequestError, UnavailableError
from headrace.core.server_config import ServerConfig
from headrace.policies.queue import QueueBounds
from headrace.server.api.route import Route
from headrace.server.edge.app import App
from headrace.server.edge.descriptors import MOST_SPARE
from headrace.server.edge.http_server import make_server
from headrace.server.edge.room import Room
from headrace.server.request.call import AnyReply, Call, Reply, StreamReply, json_reply
from headrace.server.request.service import Service

CHUNK = b"data: " + b"x" * 2000 + b"\n\n"


class Endpoints:
    """What was seen of clients that left."""

    def __init__(self) -> None:
        self.closed = threading.Event()
        self.cancelled = threading.Event()

    async def fault(self, service: Service, call: Call) -> AnyReply:
        raise ZeroDivisionError("a secret of the server's")

    async def unsafe(self, service: Service, call: Call) -> AnyReply:
        call.warn("line\r\nx-injected: 1 \u2603")
        return json_reply({"length": len(call.body)})

    async def early(self, service: Service, call: Call) -> AnyReply:
        return StreamReply(chunks=self._fail_at_once())

    async def _fail_at_once(self) -> AsyncIterator[bytes]:
        raise InvalidRequestError("Nothing has been said yet.")
        yield b""

    async def late(self, service: Service, call: Call) -> AnyReply:
        return StreamReply(chunks=self._fail_later(call.query))

    async def _fail_later(self, how: str) -> AsyncIterator[bytes]:
        yield b"data: 1\n\n"
        if how == "known":
            raise UnavailableError("The engine went.", "Ask again.", retry_after_s=1.0)
        raise ZeroDivisionError("a secret of the server's")

    async def endless(self, service: Service, call: Call) -> AnyReply:
        return StreamReply(chunks=self._go_on())

    async def _go_on(self) -> AsyncIterator[bytes]:
        try:
            while True:
                yield CHUNK
                await asyncio.sleep(0)
        finally:
            self.closed.set()

    async def slow(self, service: Service, call: Call) -> AnyReply:
        try:
            await asyncio.sleep(600)
        except asyncio.CancelledError:
            self.cancelled.set()
            raise
        return Reply(body=b"")


class Running:
    """The application under a server of this process, in a thread."""

    def __init__(self, new_loop: Callable[[], asyncio.AbstractEventLoop]) -> None:
        self.endpoints = Endpoints()
        names = ("fault", "unsafe", "early", "late", "endless", "slow")
        self._routes = [
            Route(path=f"/{name}", endpoint=getattr(self.endpoints, name), methods=("GET", "POST"))
            for name in names
        ]
        config = ServerConfig(client_timeout_s=0.5, max_body="1MiB", max_headers=4096)
        self._service = Service(
            config=config,
            engine_config=EngineConfig(),
            model=cast("Any", None),
            supervisor=cast("Any", None),
            queue=QueueBounds.from_config(config),
            fingerprint="hr-test",
        )
        self._socket = socket.create_server(("127.0.0.1", 0))
        self.port: int = self._socket.getsockname()[1]
        self._new_loop = new_loop
        self._thread = threading.Thread(target=self._run)
        self._thread.start()

    def _run(self) -> None:
        with asyncio.Runner(loop_factory=self._new_loop) as runner:
            runner.run(self._serve())

    async def _serve(self) -> None:
        config = self._service.config
        self.room = Room(config.max_connections, MOST_SPARE, self._service.dropped)
        self._server = make_server(App(self._service, self._routes), config, self.room, 64)
        await self._server.serve(sockets=[self._socket])

    def stop(self) -> None:
        self._server.should_exit = True
        self._thread.join()

    @property
    def connections(self) -> int:
        return len(self._server.server_state.connections)


@pytest.fixture(scope="module", params=["asyncio", "uvloop"])
def running(request: pytest.FixtureRequest) -> Iterator[Running]:
    server = Running(uvloop.new_event_loop if request.param == "uvloop" else asyncio.new_event_loop)
    with RawClient(server.port) as client:  # it listens already; this waits until it answers
        client.send(get("/fault")).answer()
    yield server
    server.stop()


def get(path: str, version: str = "1.1") -> bytes:
    return f"GET {path} HTTP/{version}\r\nhost: localhost\r\n\r\n".encode()


def test_a_fault_is_a_500_with_an_id_and_the_connection_stays_good(
    running: Running, caplog: pytest.LogCaptureFixture
) -> None:
    with RawClient(running.port) as client:
        answer = client.send(get("/fault")).answer()
        assert answer.status == 500
        assert answer.error["type"] == "server_error"
        assert answer.headers["x-request-id"] in answer.error["message"]
        assert b"secret" not in answer.body
        assert client.send(get("/unsafe")).answer().status == 200
    (logged,) = [record for record in caplog.records if record.exc_info]
    assert logged.__dict__["request_id"] == answer.headers["x-request-id"]
    assert "ZeroDivisionError" in caplog.text


def test_headers_carry_no_line_ends(running: Running) -> None:
    with RawClient(running.port) as client:
        answer = client.send(get("/unsafe")).answer()
    assert answer.headers["x-headrace-warning"] == "line??x-injected: 1 ?"
    assert "x-injected" not in answer.headers
    assert answer.headers["x-headrace-fingerprint"] == "hr-test"


def test_an_error_before_the_first_event_has_its_own_status(running: Running) -> None:
    with RawClient(running.port) as client:
        assert client.send(get("/early")).answer().error["message"] == "Nothing has been said yet."


@pytest.mark.parametrize("version", ["1.0", "1.1"])
@pytest.mark.parametrize(("how", "status"), [("known", 503), ("unknown", 500)])
def test_an_error_after_it_is_an_event(
    running: Running, how: str, status: int, version: str
) -> None:
    with RawClient(running.port) as client:
        answer = client.send(get(f"/late?{how}", version)).answer()
        assert answer.status == 200
        first, last, end = answer.body.split(b"\n\n")
        assert (first, end) == (b"data: 1", b"")
        assert json.loads(last.removeprefix(b"data: "))["error"]["status"] == status
        assert b"secret" not in answer.body
        if version == "1.1":
            assert client.send(get("/unsafe")).answer().status == 200


def test_a_stream_that_is_left_is_closed(running: Running) -> None:
    running.endpoints.closed.clear()
    with RawClient(running.port) as client:
        client.send(get("/endless")).socket.recv(10_000)
        assert not running.endpoints.closed.is_set()
    assert running.endpoints.closed.wait(60)


def test_a_stream_that_nobody_reads_is_closed(running: Running) -> None:
    running.endpoints.closed.clear()
    with RawClient(running.port, receive_bytes=4096) as client:
        client.send(get("/endless"))
        assert running.endpoints.closed.wait(60)


def test_a_slow_reader_is_served(running: Running) -> None:
    """As long as it reads: one that takes twice the time limit in all gets everything."""
    with RawClient(running.port, receive_bytes=65536) as client:
        client.send(get("/endless"))
        running.endpoints.closed.clear()
        for _ in range(10):
            assert len(client.socket.recv(65536)) > 0
            threading.Event().wait(0.1)
        assert not running.endpoints.closed.is_set()


@pytest.mark.parametrize("queued", [b"", get("/unsafe")])
def test_work_for_a_client_that_left_is_cancelled(running: Running, queued: bytes) -> None:
    running.endpoints.cancelled.clear()
    with RawClient(running.port) as client:
        client.send(get("/slow") + queued)
        threading.Event().wait(0.1)
        assert not running.endpoints.cancelled.is_set()
    assert running.endpoints.cancelled.wait(60)


def test_a_refusal_reaches_a_client_that_sends_before_it_reads(running: Running) -> None:
    """Closing on what is unread would reset the connection, and the answer with it."""
    with RawClient(running.port) as client:
        client.send(b"POST /unsafe HTTP/1.1\r\nhost: localhost\r\ncontent-length: 20000000\r\n\r\n")
        client.send(bytes(20_000_000))
        assert client.answer().status == 413
        assert client.is_closed()
    with RawClient(running.port) as client:
        client.send(b"GET / HTTP/1.1\r\nx: ", b"y" * 1_000_000)
        assert client.answer().status == 431


def test_large_bodies_arrive_whole(running: Running) -> None:
    with RawClient(running.port) as client:
        for size in (0, 1, 65_535, 65_536, 1 << 20):
            client.send(
                f"POST /unsafe HTTP/1.1\r\nhost: localhost\r\ncontent-length: {size}\r\n\r\n"
            )
            client.send(bytes(size))
            assert json.loads(client.answer().body) == {"length": size}


def test_no_connection_is_left(running: Running) -> None:
    """After all that: each was closed, by whom it may."""
    end = threading.Event()
    for _ in range(600):
        if running.connections == 0:
            return
        end.wait(0.1)
    pytest.fail(f"{running.connections} connections are open")
