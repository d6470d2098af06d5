"""What happens when replicas fail: tried elsewhere before the first byte, broken off after it."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import pytest
from tests.router import fakes
from tests.router.fakes import FakeReplica, ask, request, rig

from headrace.core.errors import ConfigError
from headrace.policies.breaker import Circuit
from headrace.policies.routing import Routing
from headrace.router.run import NoReplicaError, check_start, start_lines

TURNS = Routing.ROUND_ROBIN


def run(work: Any) -> Any:
    return asyncio.run(asyncio.wait_for(work, 30))


@pytest.mark.parametrize("bad", [fakes.close, fakes.status(503), fakes.status(429)])
def test_another_replica_answers(bad: Any) -> None:
    async def main() -> None:
        one, two = FakeReplica("one", behave=bad), FakeReplica("two")
        async with rig(one, two, routing=TURNS) as r:
            for _ in range(4):
                found = await ask(r.port)
                assert (found.status, found.is_whole) == (200, True)
                assert b"two" in found.body
            assert len(two.got) == 4
            assert 0 < sum(r.router.counts.retries.values()) == len(one.got)
            await r.settle()
            for fake in (one, two):
                assert r.seen(fake).pending_tokens == 0

    run(main())


def test_other_statuses_are_the_answer() -> None:
    async def main() -> None:
        one, two = (FakeReplica(n, behave=fakes.status(500)) for n in ("one", "two"))
        async with rig(one, two) as r:
            assert (await ask(r.port)).status == 500
            assert len(one.got) + len(two.got) == 1

    run(main())


def test_all_full_is_passed_on_with_the_least_wait() -> None:
    async def main() -> None:
        one = FakeReplica("one", behave=fakes.status(429, "retry-after: 7\r\n"))
        two = FakeReplica("two", behave=fakes.status(429, "retry-after: 3\r\n"))
        three = FakeReplica("three", behave=fakes.status(503, "retry-after: 1\r\n"))
        async with rig(one, two, three) as r:
            found = await ask(r.port)
            assert (found.status, found.headers["retry-after"]) == (429, "3")
            assert found.json["error"]["message"] == "two"
            assert all(len(fake.got) == 1 for fake in (one, two, three))

    run(main())


def test_a_killed_replica_is_out_and_comes_back() -> None:
    async def main() -> None:
        one, two = FakeReplica("one"), FakeReplica("two")
        async with rig(one, two, routing=TURNS) as r:
            port = int(one.url.rpartition(":")[2])
            one.kill()
            for _ in range(3):  # before any heartbeat: connections fail, others answer
                assert (await ask(r.port)).status == 200
            await r.heart.first()
            assert r.seen(one).state == "out"
            before = len(two.got)
            for _ in range(3):
                assert (await ask(r.port)).status == 200
            assert len(two.got) == before + 3
            await one.start(port)
            await r.heart.first()
            assert r.seen(one).state == "up"

    run(main())


def test_requests_of_a_silent_replica_go_elsewhere_with_its_heartbeat() -> None:
    async def main() -> None:
        one, two = FakeReplica("one", behave=fakes.hang), FakeReplica("two")
        async with rig(one, two, routing=TURNS) as r:
            asking = [asyncio.create_task(ask(r.port)) for _ in range(4)]
            await one.began.wait()
            while len(one.got) < 2:
                await asyncio.sleep(0.005)
            r.seen(one).went_out("no answer to /health within 1 s")
            found = await asyncio.gather(*asking)
            assert [each.status for each in found] == [200] * 4
            assert all(b"two" in each.body for each in found)
            assert (len(one.got), len(two.got)) == (2, 4)

    run(main())


def test_a_stream_that_breaks_off_ends_with_an_error_event_and_is_not_repeated() -> None:
    async def main() -> None:
        one, two = (FakeReplica(n, behave=fakes.die_half_way) for n in ("one", "two"))
        async with rig(one, two) as r:
            found = await ask(r.port)
            assert found.status == 200
            first, last, rest = found.body.split(b"\n\n")
            assert (first, rest) == (b"data: first", b"")
            error = json.loads(last.removeprefix(b"data: "))["error"]
            assert (error["status"], error["type"]) == (502, "server_error")
            assert len(one.got) + len(two.got) == 1
            assert r.router.counts.cut == 1

    run(main())


def test_after_a_stream_that_broke_off_its_connection_can_be_used() -> None:
    """Clients keep a connection whose answer had a proper end; their next request was reset."""

    async def main() -> None:
        one = FakeReplica("one", behave=fakes.die_half_way)
        async with rig(one) as r:
            reader, writer = await asyncio.open_connection("127.0.0.1", r.port)
            writer.write(request({"stream": True}, keep=True))
            assert b'"error"' in await reader.readuntil(b"0\r\n\r\n")
            one.behave = fakes.answer
            writer.write(request({}))
            assert (await reader.readline()).split()[1] == b"200"
            assert b"one" in await reader.readuntil(b"one")
            writer.close()

    run(main())


def test_another_answer_that_breaks_off_is_not_whole() -> None:
    async def main() -> None:
        half = b"HTTP/1.1 200 OK\r\ncontent-length: 100\r\n\r\n{"
        one, two = (FakeReplica(n, behave=fakes.raw(half)) for n in ("one", "two"))
        async with rig(one, two) as r:
            found = await ask(r.port)
            assert (found.status, found.is_whole, found.body) == (200, False, b"{")
            assert len(one.got) + len(two.got) == 1

    run(main())


@pytest.mark.parametrize(
    "data",
    [
        b"\x16\x03\x01 this is no http, and it goes on\r\n\r\n",
        b"HTTP/1.1 200 OK\r\ncontent-length: 2\r\n\r\n{}HTTP/1.1 200 OK\r\n\r\n",
        b"HTTP/1.1 200 OK\r\ncontent-length: x\r\n\r\n{}",
        b"HTTP/1.1 200 OK\r\nx: " + b"y" * 70_000,
    ],
)
def test_broken_answers_never_reach_the_client(data: bytes) -> None:
    async def main() -> None:
        async with rig(FakeReplica(behave=fakes.raw(data))) as r:
            found = await ask(r.port)
            assert found.status == 502
            assert "not HTTP" in found.json["error"]["message"]

    run(main())


def test_an_answer_until_the_end_of_the_connection() -> None:
    async def main() -> None:
        data = b"HTTP/1.1 100 Continue\r\n\r\nHTTP/1.0 200 OK\r\ncontent-type: a/b\r\n\r\nall of it"
        async with rig(FakeReplica(behave=fakes.raw(data))) as r:
            found = await ask(r.port)
            assert (found.status, found.body) == (200, b"all of it")

    run(main())


def test_deadlines() -> None:
    async def main() -> None:
        async with rig(FakeReplica(behave=fakes.hang), first_byte_s=0.1) as r:
            found = await ask(r.port)
            assert found.status == 504
            assert found.json["error"]["type"] == "server_error"

        async def begin(replica: FakeReplica, got: Any, writer: Any) -> None:
            writer.write(fakes.STREAM_HEAD + fakes.chunk(b"data: first\n\n"))
            await replica.go.wait()

        async with rig(FakeReplica(behave=begin), whole_s=0.1) as r:
            found = await ask(r.port)
            assert found.status == 200
            assert b"--deadline" in found.body

    run(main())


def test_failures_open_the_circuit_and_one_trial_closes_it() -> None:
    async def main() -> None:
        now = [0.0]
        one, two = FakeReplica("one", behave=fakes.close), FakeReplica("two")
        async with rig(one, two, routing=TURNS, clock=lambda: now[0]) as r:
            for _ in range(12):
                assert (await ask(r.port)).status == 200
            assert r.seen(one).breaker.state is Circuit.OPEN
            assert len(one.got) == 3
            one.behave = fakes.answer
            now[0] = 2.5
            for _ in range(4):
                assert (await ask(r.port)).status == 200
            assert r.seen(one).breaker.state is Circuit.CLOSED
            assert len(one.got) > 3

    run(main())


def test_open_circuits_everywhere_shut_nobody_out() -> None:
    async def main() -> None:
        one = FakeReplica("one", behave=fakes.status(500))
        async with rig(one) as r:
            for _ in range(4):
                assert (await ask(r.port)).status == 500
            assert r.seen(one).breaker.state is Circuit.OPEN
            one.behave = fakes.answer
            assert (await ask(r.port)).status == 200

    run(main())


def test_replicas_at_start() -> None:
    async def main() -> None:
        one, two = FakeReplica("one"), FakeReplica("two")
        async with rig(one, two, beats=False) as r:
            two.kill()
            await r.heart.first()
            check_start(r.fleet)
            assert any(two.url in line and "out: " in line for line in start_lines(r.fleet))
            one.kill()
            await r.heart.first()
            with pytest.raises(NoReplicaError, match=one.url):
                check_start(r.fleet)
        same = FakeReplica(model="small"), FakeReplica(model="large")
        async with rig(*same) as r:
            with pytest.raises(ConfigError, match=r"serves small, and .* serves large"):
                check_start(r.fleet)
        same = FakeReplica(fingerprint="hr-1"), FakeReplica(fingerprint="hr-2")
        async with rig(*same) as r:
            with pytest.raises(ConfigError, match=r"hr-1.*hr-2"):
                check_start(r.fleet)

    run(main())


def test_a_replica_that_comes_back_as_another_is_kept_out() -> None:
    async def main() -> None:
        one, two = FakeReplica("one", fingerprint="hr-1"), FakeReplica("two", fingerprint="hr-1")
        async with rig(one, two, routing=TURNS) as r:
            r.seen(two).went_out("restart")
            two.fingerprint = "hr-2"
            await r.heart.first()
            assert r.seen(two).state == "kept out"
            assert "hr-2" in r.seen(two).kept_out
            for _ in range(4):
                assert (await ask(r.port)).status == 200
            assert len(two.got) == 0
            # Nobody of the old kind is left: this is the version now.
            one.kill()
            await r.heart.first()
            await r.heart.first()
            assert r.seen(two).state == "up"

    run(main())


def test_a_refusal_without_an_end_is_no_answer() -> None:
    async def main() -> None:
        async def pour(replica: FakeReplica, got: Any, writer: asyncio.StreamWriter) -> None:
            writer.write(b"HTTP/1.1 503 X\r\ntransfer-encoding: chunked\r\n\r\n")
            while True:
                writer.write(fakes.chunk(b"x" * 65536))
                await writer.drain()

        one, two = FakeReplica("one", behave=pour), FakeReplica("two")
        async with rig(one, two, routing=TURNS) as r:
            for _ in range(3):
                assert (await ask(r.port)).status == 200
            assert len(one.got) > 0

    run(main())


def test_a_lost_kept_connection_is_no_failure() -> None:
    async def main() -> None:
        async def once(replica: FakeReplica, got: Any, writer: Any) -> None:
            await fakes.answer(replica, got, writer)
            replica.began.set()

        one = FakeReplica("one", behave=once)
        async with rig(one) as r:
            assert (await ask(r.port)).status == 200
            await r.settle()
            (kept,) = r.seen(one)._free
            # Closed by the replica, and not noticed yet.
            one.behave = fakes.answer
            for writer in list(one._writers):
                writer.transport.abort()
            kept.is_open = True
            assert (await ask(r.port)).status == 200
            assert r.seen(one).failures == 0

    run(main())
