"""Heartbeats that are late or have no answer: who gets new requests, and from when on again."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from typing import Any

from tests.router.fakes import FakeReplica, ask, rig

from headrace.policies.routing import Routing
from headrace.router.heartbeat import LATE_BEATS, beat, getter
from headrace.router.replica import BEATS_IN_TIME

TURNS = Routing.ROUND_ROBIN


def run(work: Any) -> Any:
    return asyncio.run(asyncio.wait_for(work, 30))


def test_a_heartbeat_without_an_answer_takes_a_replica_out() -> None:
    async def main() -> None:
        one, two = FakeReplica("one"), FakeReplica("two")
        async with rig(one, two) as r:
            one.is_silent = True
            hasty = replace(r.router.settings, heartbeat_s=0.1)
            seen = r.seen(one)
            await beat(seen, r.fleet, getter(seen, hasty))
            assert seen.state == "out"
            assert "within 0.1 s" in seen.why_out
            assert r.seen(two).state == "up"

    run(main())


def test_a_late_heartbeat_keeps_new_requests_away() -> None:
    """Before the replica is out, so that nothing is lost if it was only busy."""

    async def main() -> None:
        one, two = FakeReplica("one"), FakeReplica("two")
        async with rig(one, two, heartbeat_s=1.0, routing=TURNS) as r:
            r.heart.follow()
            try:
                one.is_silent = True
                while r.seen(one).state == "up":
                    await asyncio.sleep(0.005)
                assert (r.seen(one).state, r.seen(one).is_up) == ("late", True)
                one.is_silent = two.is_silent = False
                before = len(one.got)
                for _ in range(4):
                    assert b"two" in (await ask(r.port)).body
                assert len(one.got) == before
                one.kill()
                await one.start(int(one.url.rpartition(":")[2]))
                while r.seen(one).state != "up":
                    await asyncio.sleep(0.005)
                assert {(await ask(r.port)).body[6:9] for _ in range(2)} == {b"one", b"two"}
            finally:
                r.heart.stop()

    run(main())


def test_where_all_are_late_they_are_asked_all_the_same() -> None:
    async def main() -> None:
        one, two = FakeReplica("one"), FakeReplica("two")
        async with rig(one, two, routing=TURNS) as r:
            for fake in (one, two):
                r.seen(fake).was_late()
            assert {(await ask(r.port)).body[6:9] for _ in range(2)} == {b"one", b"two"}

    run(main())


def test_one_heartbeat_in_time_does_not_make_up_for_a_late_one() -> None:
    """A process that runs for a moment every two seconds answers one of them in time, again and
    again; requests would go to it and stay there."""

    async def main() -> None:
        one, two = FakeReplica("one"), FakeReplica("two")
        async with rig(one, two) as r:
            seen = r.seen(one)
            states = []
            for _ in range(2):
                seen.was_late()
                for _ in range(BEATS_IN_TIME):
                    await r.heart.first()
                    states.append(seen.state)
            assert states == [*["late"] * (BEATS_IN_TIME - 1), "up"] * 2

    run(main())


def test_one_that_was_out_for_being_late_must_be_in_time_too() -> None:
    async def main() -> None:
        one, two = FakeReplica("one"), FakeReplica("two")
        async with rig(one, two) as r:
            one.is_silent = True
            hasty, seen = replace(r.router.settings, heartbeat_s=0.1), r.seen(one)
            await beat(seen, r.fleet, getter(seen, hasty))
            assert seen.state == "out"
            one.is_silent = False
            states = []
            for _ in range(BEATS_IN_TIME):
                await r.heart.first()
                states.append(seen.state)
            assert states == [*["late"] * (BEATS_IN_TIME - 1), "up"]

    run(main())


def test_the_last_replica_may_be_late_some_times() -> None:
    """On a machine with too much to do all of them are late: then nobody would be answered."""

    async def main() -> None:
        one, two = FakeReplica("one"), FakeReplica("two")
        async with rig(one, two) as r:
            one.is_silent = two.is_silent = True
            hasty = replace(r.router.settings, heartbeat_s=0.02)
            for fake in (one, two):
                seen = r.seen(fake)
                await beat(seen, r.fleet, getter(seen, hasty))
            assert (r.seen(one).state, r.seen(two).state) == ("out", "up")
            states = []
            for _ in range(LATE_BEATS):
                await beat(r.seen(two), r.fleet, getter(r.seen(two), hasty))
                states.append(r.seen(two).state)
            assert states == ["up"] * (LATE_BEATS - 1) + ["out"]

    run(main())
