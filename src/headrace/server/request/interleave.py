"""Several engine requests of one answer at the same time: all to their end, or none.

Knows coroutines and generators; nothing of what they give.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Awaitable, Sequence
from contextlib import aclosing
from typing import TypeVar

T = TypeVar("T")


async def gather_all(work: Sequence[Awaitable[T]]) -> list[T]:
    """Every result, in order. The first failure ends the others, and waits for their ends."""
    tasks = [asyncio.ensure_future(each) for each in work]
    try:
        return await asyncio.gather(*tasks)
    finally:
        await _end(tasks)


async def interleave(sources: Sequence[AsyncGenerator[T]]) -> AsyncGenerator[tuple[int, T]]:
    """What all of them give, as it comes, each item with its source's place. The first failure
    ends the others; so does leaving early (use `contextlib.aclosing`)."""
    if len(sources) == 1:  # needs no task of its own
        async with aclosing(sources[0]) as only:
            async for each in only:
                yield 0, each
        return
    # Bounded: who reads slowly slows all of them down, rather than filling memory.
    queue: asyncio.Queue[tuple[int, T] | Exception | None] = asyncio.Queue(len(sources))
    tasks = [
        asyncio.create_task(_pump(place, source, queue)) for place, source in enumerate(sources)
    ]
    left = len(tasks)
    try:
        while left:
            item = await queue.get()
            if item is None:
                left -= 1
            elif isinstance(item, Exception):
                raise item
            else:
                yield item
    finally:
        await _end(tasks)


async def _pump(
    place: int,
    source: AsyncGenerator[T],
    queue: asyncio.Queue[tuple[int, T] | Exception | None],
) -> None:
    try:
        async with aclosing(source):
            async for item in source:
                await queue.put((place, item))
        await queue.put(None)
    except Exception as error:
        await queue.put(error)  # raised where the items are read


async def _end(tasks: Sequence[asyncio.Future[T]]) -> None:
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
