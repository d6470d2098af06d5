"""What goes through: bytes, heads, connections, and what a client may not do."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import pytest
from tests.router import fakes
from tests.router.fakes import FakeReplica, ask, get, request, rig

from headrace.policies.routing import ANSWER
from headrace.router.asked import read_asked
from headrace.router.upstream import Broken, read_head


def run(work: Any) -> Any:
    return asyncio.run(asyncio.wait_for(work, 30))


def test_an_answer_comes_as_the_replica_sent_it() -> None:
    async def main() -> None:
        replica = FakeReplica()
        async with rig(replica) as r:
            found = await ask(r.port, {"messages": ["hé"]}, headers={"X-Mine": "1"})
            assert found.status == 200
            assert found.body == b"data: a 0\n\ndata: a 1\n\ndata: a 2\n\n"
            assert found.headers["content-type"] == "text/event-stream"
            (got,) = replica.got
            assert json.loads(got.body) == {"messages": ["hé"]}
            assert got.head.startswith(b"POST /v1/chat/completions HTTP/1.1\r\n")
            assert got.header("x-mine") == "1"
            assert got.header("host") == replica.url.removeprefix("http://")
            assert got.header("x-forwarded-for") == "127.0.0.1"
            assert got.header("x-request-id") == found.headers["x-request-id"]

    run(main())


def test_connections_to_replicas_and_clients_are_kept() -> None:
    async def main() -> None:
        replica = FakeReplica()
        async with rig(replica) as r:
            before = replica.connections
            reader, writer = await asyncio.open_connection("127.0.0.1", r.port)
            for _ in range(5):
                writer.write(request({}, keep=True))
                found = await fakes.read_answer(reader)
                assert (found.status, found.is_whole) == (200, True)
            writer.close()
            assert replica.connections == before + 1

    run(main())


def test_pipelined_requests_are_answered_in_their_order() -> None:
    async def main() -> None:
        async def echo(replica: Any, got: Any, writer: Any) -> None:
            writer.write(fakes.plain(200, json.loads(got.body)))

        async with rig(FakeReplica(behave=echo)) as r:
            reader, writer = await asyncio.open_connection("127.0.0.1", r.port)
            writer.write(b"".join(request({"n": n}, keep=True) for n in range(4)))
            for n in range(4):
                assert (await fakes.read_answer(reader)).json == {"n": n}
            writer.close()

    run(main())


def test_a_client_that_leaves_stops_its_replica() -> None:
    async def main() -> None:
        replica = FakeReplica(behave=fakes.hang)
        async with rig(replica) as r:
            _, writer = await asyncio.open_connection("127.0.0.1", r.port)
            writer.write(request({}))
            await replica.began.wait()
            writer.transport.abort()
            while not replica.left:
                await asyncio.sleep(0.005)
            await r.settle()
            seen = r.seen(replica)
            assert (seen.running, seen.pending_tokens, seen.failures) == (0, 0, 0)
            assert r.router.counts.left == 1
            assert r.edge.bodies_bytes == 0

    run(main())


def test_with_the_first_byte_of_an_answer_its_prompt_is_done() -> None:
    async def main() -> None:
        async def two_parts(replica: FakeReplica, got: Any, writer: asyncio.StreamWriter) -> None:
            await fakes.hang(replica, got, writer)
            writer.write(fakes.STREAM_HEAD)  # vLLM sends this before it has computed anything
            await writer.drain()
            await asyncio.sleep(0.05)
            heads.append(seen.pending_tokens)
            writer.write(fakes.chunk(b"data: 1\n\n"))
            await end.wait()
            writer.write(fakes.LAST_CHUNK)

        replica, end, heads = FakeReplica(behave=two_parts), asyncio.Event(), list[int]()
        async with rig(replica) as r:
            seen = r.seen(replica)
            reader, writer = await asyncio.open_connection("127.0.0.1", r.port)
            body = {"messages": ["x" * 4000], "max_tokens": 50}
            writer.write(request(body))
            await replica.began.wait()
            asked = read_asked(json.dumps(body).encode(), 4096)
            assert asked.prompt_tokens > 1000
            assert seen.pending_tokens == asked.prompt_tokens + 50 * ANSWER
            replica.go.set()
            await reader.readuntil(b"data: 1\n\n")
            assert heads == [asked.prompt_tokens + 50 * ANSWER]
            assert (seen.pending_tokens, seen.running) == (50 * ANSWER, 1)
            end.set()
            await reader.read()
            writer.close()
            await r.settle()
            assert (seen.pending_tokens, seen.running) == (0, 0)

    run(main())


def test_a_client_that_closes_its_sending_side_gets_its_answer() -> None:
    async def main() -> None:
        async def late(replica: FakeReplica, got: Any, writer: asyncio.StreamWriter) -> None:
            await fakes.hang(replica, got, writer)
            await fakes.answer(replica, got, writer)

        replica = FakeReplica(behave=late)
        async with rig(replica) as r:
            reader, writer = await asyncio.open_connection("127.0.0.1", r.port)
            writer.write(request({}))
            writer.write_eof()
            await replica.began.wait()
            while not any(connection._half_closed for connection in r.edge.connections):
                await asyncio.sleep(0.005)
            replica.go.set()
            found = await fakes.read_answer(reader)
            assert (found.status, found.is_whole) == (200, True)
            writer.close()

    run(main())


def test_a_client_that_does_not_read_holds_its_replica_back() -> None:
    async def main() -> None:
        sent = 0

        async def pour(replica: FakeReplica, got: Any, writer: asyncio.StreamWriter) -> None:
            nonlocal sent
            writer.write(fakes.STREAM_HEAD)
            for _ in range(1000):
                writer.write(fakes.chunk(b"x" * 65536))
                await writer.drain()
                sent += 1
            writer.write(fakes.LAST_CHUNK)

        async with rig(FakeReplica(behave=pour)) as r:
            reader, writer = await asyncio.open_connection("127.0.0.1", r.port)
            writer.write(request({}))
            before = -1
            while before != sent or sent == 0:  # until nothing moves any more
                before = sent
                await asyncio.sleep(0.2)
            assert sent < 900  # of 65 MB: the rest is not in anybody's memory
            found = await fakes.read_answer(reader)
            assert (len(found.body), found.is_whole) == (1000 * 65536, True)
            writer.close()

    run(main())


@pytest.mark.parametrize(
    ("sent", "status"),
    [
        (b"GET / HTTP/1.0\r\n\r\n", 505),
        (b"nonsense\r\n\r\n", 400),
        (b"GET / HTTP/1.1\r\n\r\n", 400),  # no host
        (b"GET / HTTP/1.1\r\nHost: a\r\nHost: b\r\n\r\n", 400),
        (b"GET / HTTP/1.1\r\nHost: a\r\nX: " + b"y" * 40_000, 431),
        (b"GET / HTTP/1.1\r\nHost: a\r\n" + b"a: b\r\n" * 300 + b"\r\n", 431),
        (b"POST / HTTP/1.1\r\nHost: a\r\nContent-Length: 99999\r\n\r\n", 413),
        (
            b"POST / HTTP/1.1\r\nHost: a\r\nTransfer-Encoding: chunked\r\n\r\n"
            + fakes.chunk(b"z" * 2000),
            413,
        ),
        (b"POST / HTTP/1.1\r\nHost: a\r\nContent-Length: 3\r\nContent-Length: 4\r\n\r\n", 400),
        (request({}, path="/metrics/../v1/load_lora_adapter"), 404),
        (request({}, path="/v1/load_lora_adapter"), 404),
        (request(path="/drain", method="GET"), 405),
    ],
)
def test_what_a_client_may_not_send(sent: bytes, status: int) -> None:
    async def main() -> None:
        replica = FakeReplica()
        async with rig(replica, max_body_bytes=1000) as r:
            reader, writer = await asyncio.open_connection("127.0.0.1", r.port)
            writer.write(sent)
            found = await fakes.read_answer(reader)
            assert found.status == status
            assert found.json["error"]["message"]
            writer.close()
            assert replica.got == []
            assert r.edge.bodies_bytes == 0

    run(main())


def test_late_clients_are_told_and_idle_ones_closed() -> None:
    async def main() -> None:
        async with rig(FakeReplica()) as r:
            reader, writer = await asyncio.open_connection("127.0.0.1", r.port)
            writer.write(b"POST /v1/completions HTTP/1.1\r\nHost: a\r\nContent-Le")
            idle_reader, idle = await asyncio.open_connection("127.0.0.1", r.port)
            idle.write(request({}, keep=True))
            await fakes.read_answer(idle_reader)
            while not any(connection._reader.in_message for connection in r.edge.connections):
                await asyncio.sleep(0.005)
            r.edge.sweep(1e12)
            assert (await fakes.read_answer(reader)).status == 408
            assert await idle_reader.read() == b""
            writer.close()
            idle.close()

    run(main())


def test_the_routers_own_pages() -> None:
    async def main() -> None:
        replica = FakeReplica(fingerprint="hr-1", model="tiny")
        async with rig(replica) as r:
            assert (await get(r.port, "/health")).json == {"status": "ok"}
            assert (await get(r.port, "/ready")).json == {"ready": True}
            models = (await get(r.port, "/v1/models")).json
            assert [card["id"] for card in models["data"]] == ["tiny"]
            assert (await get(r.port, "/v1/models/tiny")).json["id"] == "tiny"
            assert (await get(r.port, "/v1/models/other")).status == 404
            await ask(r.port)
            text = (await get(r.port, "/metrics")).body.decode()
            labels = f'replica="{replica.url}",status="200"'
            assert f"headrace_router_requests_total{{{labels}}} 1\n" in text
            assert "headrace_router_time_added_seconds_count 1\n" in text
            assert "headrace_router_replica_saturation" in text
            (facts,) = (await get(r.port, "/replicas")).json["replicas"]
            assert (facts["state"], facts["fingerprint"]) == ("up", "hr-1")
            r.seen(replica).went_out("test")
            assert (await get(r.port, "/ready")).status == 503
            assert (await ask(r.port)).status == 503

    run(main())


def test_a_replica_is_drained_and_undrained() -> None:
    async def main() -> None:
        one, two = FakeReplica("one"), FakeReplica("two")
        async with rig(one, two) as r:
            body = {"replica": one.url}
            assert (await ask(r.port, body, path="/drain")).status == 200
            for _ in range(8):
                assert (await ask(r.port)).status == 200
            assert (len(one.got), len(two.got)) == (0, 8)
            assert (await ask(r.port, body, path="/undrain")).status == 200
            r.seen(two).is_draining = True
            assert (await ask(r.port)).status == 200
            assert len(one.got) == 1
            assert (await ask(r.port, {"replica": "http://x:1"}, path="/drain")).status == 404
            assert (await ask(r.port, {}, path="/drain")).status == 400
            pages = {"Origin": "http://evil.example"}
            assert (await ask(r.port, body, path="/drain", headers=pages)).status == 403

    run(main())


def test_a_head_is_read_and_written() -> None:
    raw = b"HTTP/1.1 200 OK\r\nA: 1\r\nConnection: close\r\nContent-Length: 3\r\n\r\n"
    head = read_head(raw, has_body=True)
    assert head.headers == ((b"a", b"1"), (b"content-length", b"3"))
    assert not head.ends_with_connection
    assert head.written(((b"a", b"2"),)) == (
        b"HTTP/1.1 200 OK\r\ncontent-length: 3\r\na: 2\r\n\r\n"
    )
    assert read_head(b"HTTP/1.1 200 OK\r\nA: 1\r\n\r\n", has_body=True).ends_with_connection
    with pytest.raises(Broken):
        read_head(b"HTTP/1.1 200 OK\r\nA: 1\r\n b\r\n\r\n", has_body=True)
