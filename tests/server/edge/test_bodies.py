"""Bodies on their way in: how slow one may be, and what all of them may take together."""

from __future__ import annotations

import asyncio
import resource
import select
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
from tests.server.edge_server import EdgeServer
from tests.server.raw_client import RawClient, post

from headrace.core.errors import ClientTimeoutError
from headrace.server.edge.bodies import SLOWEST_BYTES_S, Bodies, BodiesFullError, read_body

LIMIT_S = 30.0


class VirtualLoop(asyncio.SelectorEventLoop):
    """Time passes when everybody sleeps, and at once."""

    now_s = 0.0

    def time(self) -> float:
        return self.now_s

    def _run_once(self) -> None:
        if not self._ready and self._scheduled:  # type: ignore[attr-defined]
            self.now_s = max(self.now_s, self._scheduled[0]._when)  # type: ignore[attr-defined]
        super()._run_once()  # type: ignore[misc]


class Client:
    """Sends pieces at given times, each (seconds after the one before, bytes)."""

    def __init__(self, *pieces: tuple[float, int], is_whole: bool = False) -> None:
        self._pieces = list(pieces)
        self._is_whole = is_whole

    async def receive(self) -> dict[str, Any]:
        if not self._pieces:
            await asyncio.sleep(10_000)
        wait_s, count = self._pieces.pop(0)
        await asyncio.sleep(wait_s)
        more = bool(self._pieces) or not self._is_whole
        return {"type": "http.request", "body": b"x" * count, "more_body": more}


async def read(bodies: Bodies, client: Client, owner: str = "a") -> tuple[float, object]:
    """When it ended, and how."""
    found: object
    try:
        found = await read_body(bodies, client.receive, owner=owner, most=1 << 30, limit_s=LIMIT_S)
    except (ClientTimeoutError, BodiesFullError) as error:
        found = type(error)
    return asyncio.get_running_loop().time(), found


def play(*reads: Any) -> list[tuple[float, object]]:
    async def together() -> list[tuple[float, object]]:
        results: list[tuple[float, object]] = await asyncio.gather(*reads)
        return results

    with asyncio.Runner(loop_factory=VirtualLoop) as runner:
        return runner.run(together())


def test_a_body_that_comes_at_the_slowest_rate_is_read_however_long_it_takes() -> None:
    pieces = [(1.0, SLOWEST_BYTES_S)] * 300
    ((ended_s, found),) = play(read(Bodies(1 << 30), Client(*pieces, is_whole=True)))
    assert (ended_s, found) == (300.0, b"x" * 300 * SLOWEST_BYTES_S)


def test_a_burst_buys_no_silence() -> None:
    """8 MB and then nothing: it was 288 s once."""
    ((ended_s, found),) = play(read(Bodies(1 << 30), Client((0.0, 8 << 20))))
    assert (ended_s, found) == (LIMIT_S, ClientTimeoutError)


def test_a_trickle_does_not_go_on() -> None:
    pieces = [(0.0, 8 << 20), *[(1.0, 1)] * 1000]
    ((ended_s, found),) = play(read(Bodies(1 << 30), Client(*pieces)))
    assert LIMIT_S <= ended_s < LIMIT_S + 1.5
    assert found is ClientTimeoutError


def test_a_slow_start_may_be_made_good() -> None:
    pieces = [(LIMIT_S - 1, 10), *[(1.0, 2 * SLOWEST_BYTES_S)] * 20]
    ((_, found),) = play(read(Bodies(1 << 30), Client(*pieces, is_whole=True)))
    assert isinstance(found, bytes)


def test_beyond_the_budget_the_one_furthest_behind_goes() -> None:
    bodies = Bodies(1000)
    results = play(
        read(bodies, Client((1.0, 400), (5.0, 1), is_whole=True)),  # first, and then silent
        read(bodies, Client((2.0, 400), (2.0, 1), is_whole=True)),
        read(bodies, Client((3.0, 400), (0.5, 1), is_whole=True)),  # one too many
    )
    assert results[0] == (3.0, BodiesFullError)
    assert [found for _, found in results[1:]] == [b"x" * 401, b"x" * 401]
    assert (bodies.bytes, len(bodies)) == (0, 0)


def test_whoever_holds_most_of_it_gives_back() -> None:
    """However far behind another's is."""
    bodies = Bodies(1000)
    results = play(
        read(bodies, Client((0.0, 300), (9.0, 1), is_whole=True), owner="honest"),
        *(read(bodies, Client((1.0, 200), (float(i), 1)), owner="greedy") for i in range(1, 6)),
    )
    assert results[0][1] == b"x" * 301
    assert [found for _, found in results[1:]].count(BodiesFullError) == 2
    assert (bodies.bytes, len(bodies)) == (0, 0)


def test_one_that_is_larger_than_the_budget_is_refused_itself() -> None:
    bodies = Bodies(1000)
    results = play(read(bodies, Client((0.0, 600), (1.0, 600))))
    assert results == [(1.0, BodiesFullError)]
    assert bodies.bytes == 0


# -- over sockets ----------------------------------------------------------------------------------


@pytest.fixture(params=["asyncio", "uvloop"])
def server(request: pytest.FixtureRequest) -> Iterator[EdgeServer]:
    with EdgeServer(request.param, max_body="1MiB", max_bodies="4MiB") as running:
        yield running


def test_many_unfinished_bodies_stay_within_the_budget(server: EdgeServer) -> None:
    unfinished = post("/echo", "x" * (1 << 20))[:-1]
    with ExitStack() as stack:
        clients = [stack.enter_context(RawClient(server.port)).send(unfinished) for _ in range(12)]
        told: list[RawClient] = []
        while len(told) < 8:
            told, _, _ = select.select(clients, [], [], 60)
        for client in told:
            answer = client.answer()
            assert answer.status == 503
            assert "--max-bodies" in answer.error["message"]
            assert int(answer.headers["retry-after"]) >= 1
        end_s = time.monotonic() + 60
        while server.service.bodies.bytes != 4 * ((1 << 20) - 1) and time.monotonic() < end_s:
            time.sleep(0.01)  # the last of them are on their way
        assert server.service.bodies.bytes == 4 * ((1 << 20) - 1)
        for client in set(clients) - set(told):
            assert client.send(b"x").answer().status == 200
        with RawClient(server.port) as other:
            assert other.send(post("/echo", "x" * 1000)).answer().status == 200


@pytest.mark.skipif(not Path("/proc/self/statm").exists(), reason="reads /proc")
def test_memory_is_given_back() -> None:
    """64 MB of unfinished bodies leave less than a quarter behind.

    In a process of its own: one that has run other tests holds free memory, where the
    bodies would go without its growing at all.
    """
    code = "from tests.server.edge.test_bodies import *; print(*memory_of_unfinished_bodies())"
    root = Path(__file__).parents[3]
    printed = subprocess.check_output([sys.executable, "-c", code], cwd=root, timeout=120)
    grown, left = map(int, printed.split())
    assert grown > 40 << 20
    assert left <= grown / 4


def memory_of_unfinished_bodies() -> tuple[int, int]:
    """How much this process grew while they arrived, and how much of it stayed: the second time,
    as the first time memory is taken for good by what every server needs."""
    with EdgeServer(max_body="8MiB", max_bodies="64MiB") as server:
        unfinished = post("/echo", "x" * (8 << 20))[:-1]
        for _ in range(2):
            before = resident_bytes()
            with ExitStack() as stack:
                for _ in range(7):
                    stack.enter_context(RawClient(server.port)).send(unfinished)
                while server.service.bodies.bytes < 7 * ((8 << 20) - 1):
                    time.sleep(0.01)
                grown = resident_bytes() - before
            end_s = time.monotonic() + 30
            while resident_bytes() - before > grown / 4 and time.monotonic() < end_s:
                time.sleep(0.05)
        return grown, resident_bytes() - before


def resident_bytes() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * resource.getpagesize()
