"""Several engine requests of one answer: all to their end, or none."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator
from contextlib import aclosing

import pytest

from headrace.core.errors import UnavailableError
from headrace.server.request.interleave import gather_all, interleave


class Source:
    """Counts to `count`, then ends or fails; knows what became of it."""

    def __init__(self, count: int, *, fails: bool = False) -> None:
        self.count = count
        self.fails = fails
        self.given = 0
        self.ended = False

    async def items(self) -> AsyncGenerator[int]:
        try:
            while self.given < self.count:
                await asyncio.sleep(0)
                self.given += 1
                yield self.given
            if self.fails:
                raise UnavailableError("The engine is gone.", retry_after_s=1)
        finally:
            await asyncio.sleep(0)  # an end that takes its time is waited for
            self.ended = True

    async def total(self) -> int:
        return sum([item async for item in self.items()])


def test_all_items_come_each_sources_in_order() -> None:
    async def run() -> list[tuple[int, int]]:
        sources = [Source(3), Source(0), Source(7)]
        found = [item async for item in interleave([s.items() for s in sources])]
        assert all(source.ended for source in sources)
        return found

    found = asyncio.run(run())
    assert [item for place, item in found if place == 0] == [1, 2, 3]
    assert [item for place, item in found if place == 2] == [1, 2, 3, 4, 5, 6, 7]
    assert len(found) == 10
    assert [place for place, _ in found] != sorted(place for place, _ in found)


def test_the_first_failure_ends_the_others() -> None:
    async def run() -> None:
        sources = [Source(10**9), Source(5, fails=True), Source(10**9)]
        with pytest.raises(UnavailableError):
            async for _ in interleave([s.items() for s in sources]):
                pass
        assert all(source.ended for source in sources)

        sources = [Source(10**9), Source(5, fails=True)]
        with pytest.raises(UnavailableError):
            await gather_all([source.total() for source in sources])
        assert all(source.ended for source in sources)

    asyncio.run(run())


def test_leaving_early_ends_them_all() -> None:
    async def run() -> None:
        sources = [Source(10**9), Source(10**9)]
        async with aclosing(interleave([s.items() for s in sources])) as found:
            async for _ in found:
                break
        assert all(source.ended for source in sources)

        sources = [Source(10**9), Source(10**9)]
        task = asyncio.create_task(gather_all([source.total() for source in sources]))
        while not all(source.given for source in sources):
            await asyncio.sleep(0)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        assert all(source.ended for source in sources)

    asyncio.run(run())


def test_one_alone_is_as_several() -> None:
    async def run() -> None:
        source = Source(3)
        assert [i async for i in interleave([source.items()])] == [(0, 1), (0, 2), (0, 3)]
        assert source.ended
        source = Source(2, fails=True)
        with pytest.raises(UnavailableError):
            [i async for i in interleave([source.items()])]
        source = Source(10**9)
        async with aclosing(interleave([source.items()])) as found:
            await anext(found)
        assert source.ended

    asyncio.run(run())


def test_a_slow_reader_slows_them_down() -> None:
    async def run() -> None:
        sources = [Source(10**9) for _ in range(3)]
        async with aclosing(interleave([s.items() for s in sources])) as found:
            async for _ in found:
                for _ in range(1000):
                    await asyncio.sleep(0)
                break
            assert sum(source.given for source in sources) <= 10

    asyncio.run(run())


def test_results_keep_their_order() -> None:
    async def run() -> list[int]:
        return await gather_all([Source(count).total() for count in (9, 1, 4)])

    assert asyncio.run(run()) == [45, 1, 10]
