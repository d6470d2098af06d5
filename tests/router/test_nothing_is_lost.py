"""Whatever replicas do: every request gets one answer, and one that began is never repeated."""

from __future__ import annotations

import asyncio
from typing import Any

from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from tests.router import fakes
from tests.router.fakes import FakeReplica, Got, ask, rig

WAYS = ("answer", "close", "503", "429", "half", "broken")
plans = st.lists(
    st.lists(st.sampled_from(WAYS), min_size=1, max_size=4), min_size=1, max_size=4
)  # of each replica: what it does with its first, second … request, over and over


def behaviour(plan: list[str], begun: list[bytes], whole: list[bytes]) -> fakes.Behave:
    asked = 0

    async def behave(replica: FakeReplica, got: Got, writer: asyncio.StreamWriter) -> None:
        nonlocal asked
        what = plan[asked % len(plan)]
        asked += 1
        if what == "answer":
            begun.append(got.body)
            await fakes.answer(replica, got, writer)
            whole.append(got.body)
        elif what == "close":
            await fakes.close(replica, got, writer)
        elif what == "half":
            begun.append(got.body)
            await fakes.die_half_way(replica, got, writer)
        elif what == "broken":
            await fakes.raw(b"this is no http\r\n\r\n")(replica, got, writer)
        else:
            await fakes.status(int(what), "retry-after: 2\r\n")(replica, got, writer)

    return behave


@settings(max_examples=40, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(plans, st.integers(1, 12), st.booleans())
def test_every_request_has_one_answer(plans: list[list[str]], count: int, drains_one: bool) -> None:
    async def main() -> None:
        begun: list[bytes] = []
        whole: list[bytes] = []
        replicas = [
            FakeReplica(f"r{n}", behave=behaviour(plan, begun, whole))
            for n, plan in enumerate(plans)
        ]
        async with rig(*replicas) as r:
            asking = [ask(r.port, {"messages": [], "id": n}) for n in range(count)]
            gathered = asyncio.gather(*asking)
            if drains_one:
                r.seen(replicas[0]).is_draining = True
            found = await gathered
            check(found, begun, whole)
            # Nothing is left behind.
            await r.settle()
            counts = r.router.counts
            assert r.edge.bodies_bytes == 0
            assert sum(counts.answers.values()) == count
            for replica in r.fleet.replicas:
                assert (replica.pending_tokens, replica.running) == (0, 0)

    def check(found: list[Any], begun: list[bytes], whole: list[bytes]) -> None:
        assert len(begun) == len(set(begun))  # a begun answer is never asked for again
        assert len(whole) == len(set(whole))
        good = [each for each in found if each.status == 200 and b"error" not in each.body]
        assert len(good) == len(whole)
        for each in found:
            assert each.status in (200, 429, 502, 503)
            if each.status == 200 and each not in good:
                assert each.body.startswith(b"data: first\n\n")
        assert len(begun) == sum(each.status == 200 for each in found)

    asyncio.run(asyncio.wait_for(main(), 60))
