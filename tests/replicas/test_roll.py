"""Rolls over slots without processes: the order, what comes back after a failure, who waits."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from dataclasses import replace
from typing import Any

import pytest

from headrace.core.config import EngineConfig
from headrace.core.server_config import ServerConfig
from headrace.fetch.verify import Checked
from headrace.replicas import messages, roll
from headrace.replicas.messages import StartError
from headrace.replicas.release import Release
from headrace.replicas.roll import Roller, RollError
from headrace.replicas.slot import Common

OLD = Release(number=1, path="/old", typed="old", server=ServerConfig(), engine=EngineConfig())
NEW = replace(OLD, number=2, typed="new")


class FakeSlot:
    """Starts whatever is not in `broken`."""

    def __init__(self, number: int, events: list[str], broken: set[str]) -> None:
        self.number, self._events, self._broken = number, events, broken
        self.release: Release | None = OLD
        self.facts = messages.Ready("name", "hr-1", 1, 1, has_chat=True)
        self.takes_requests = self.is_kept = True
        self.hold: asyncio.Event | None = None

    async def take_out(self) -> None:
        self.takes_requests = False
        self._events.append(f"{self.number} out")
        if self.hold is not None:
            await self.hold.wait()

    async def start(self, release: Release) -> messages.Ready:
        if f"{self.number} {release.path}" in self._broken:
            raise StartError(f"{release.path} does not start on {self.number}.", "Try another.")
        self.release, self.takes_requests = release, True
        self._events.append(f"{self.number} {release.path}")
        return self.facts

    def keep(self) -> None:
        self.is_kept = True


class Rolling:
    def __init__(self, count: int, broken: set[str] | None = None) -> None:
        self.events: list[str] = []
        self.slots = [FakeSlot(n + 1, self.events, broken or set()) for n in range(count)]
        common = Common(internal=b"", weights={}, origins={})
        self.roller = Roller(self.slots, common, OLD)  # type: ignore[arg-type]

    async def end(self) -> roll.Progress:
        while self.roller.is_rolling:
            await asyncio.sleep(0.001)
        assert self.roller.progress is not None
        return self.roller.progress


@pytest.fixture(autouse=True)
def _looked(monkeypatch: pytest.MonkeyPatch) -> None:
    async def look(wanted: Release, slot: object, common: object) -> messages.Fits:
        if wanted.typed == "bad":
            raise StartError("There is no such model.", "Try another.")
        return messages.Fits(f"/{wanted.typed}", str(wanted.typed), "", Checked())

    monkeypatch.setattr(roll, "look", look)


def play(coroutine: Coroutine[Any, Any, None]) -> None:
    asyncio.run(asyncio.wait_for(coroutine, 30))


def test_one_after_the_other() -> None:
    async def main() -> None:
        rolling = Rolling(3)
        await rolling.roller.begin(NEW)
        progress = await rolling.end()
        assert (progress.state, progress.done, progress.error) == ("done", 3, None)
        assert rolling.events == ["1 out", "1 /new", "2 out", "2 /new", "3 out", "3 /new"]
        assert rolling.roller.release.path == "/new"
        assert rolling.roller.release.keeps_names == ("name",)

    play(main())


def test_those_that_do_not_answer_come_first() -> None:
    async def main() -> None:
        rolling = Rolling(3)
        rolling.slots[1].takes_requests = False
        await rolling.roller.begin()
        assert (await rolling.end()).state == "done"
        assert rolling.events[0] == "2 out"

    play(main())


def test_what_is_bad_stops_nothing() -> None:
    async def main() -> None:
        rolling = Rolling(2)
        with pytest.raises(StartError, match="no such model"):
            await rolling.roller.begin(replace(NEW, typed="bad"))
        progress = await rolling.end()
        assert (progress.state, progress.error) == ("failed", "There is no such model.")
        assert rolling.events == []
        await rolling.roller.begin()  # the next one may begin
        assert (await rolling.end()).state == "done"

    play(main())


@pytest.mark.parametrize("fails", [1, 2, 3])
def test_whichever_fails_all_are_as_before(fails: int) -> None:
    async def main() -> None:
        rolling = Rolling(3, {f"{fails} /new"})
        await rolling.roller.begin(NEW)
        progress = await rolling.end()
        assert progress.state == "failed"
        assert f"does not start on {fails}" in str(progress.error)
        assert all(slot.release is OLD and slot.takes_requests for slot in rolling.slots)
        assert rolling.roller.release is OLD

    play(main())


def test_the_last_one_that_answers_stays() -> None:
    async def main() -> None:
        rolling = Rolling(2, {"2 /old"})
        rolling.slots[1].takes_requests = False
        await rolling.roller.begin()
        assert (await rolling.end()).state == "failed"
        assert rolling.slots[0].takes_requests
        assert "1 out" not in rolling.events

    play(main())


def test_one_roll_at_a_time_and_not_with_one_replica() -> None:
    async def main() -> None:
        rolling = Rolling(2)
        rolling.slots[0].hold = asyncio.Event()
        await rolling.roller.begin()
        await asyncio.sleep(0)
        with pytest.raises(RollError, match="under way: 0 of 2"):
            await rolling.roller.begin()
        rolling.slots[0].hold.set()
        assert (await rolling.end()).state == "done"
        with pytest.raises(RollError, match="one replica"):
            Rolling(1).roller.check()
        rolling.slots[1].is_kept = False
        with pytest.raises(RollError, match="Replica 2 is still starting"):
            rolling.roller.check()

    play(main())
