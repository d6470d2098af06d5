"""Runs several engine requests of one answer at the same time: all of them finish, or none.

Knows coroutines and generators; nothing of what they yield.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Awaitable, Sequence
from contextlib import aclosing
from typing import TypeVar

T = TypeVar("T")


async def gather_all(work: Sequence[Awaitable[T]]) -> list[T]:
    """All results, in order. The first failure cancels the others and waits for their end."""
    tasks = [asyncio.ensure_future(each) for each in work]
    try:
        return await asyncio.gather(*tasks)
    finally:
        await _end(tasks)


async def interleave(sources: Sequence[AsyncGenerator[T]]) -> AsyncGenerator[tuple[int, T]]:
    """The items of all sources as they arrive, each with its source's index. The first failure ends
    the others; so does leaving early (use `contextlib.aclosing`)."""
    if len(sources) == 1:  # no task is needed
        async with aclosing(sources[0]) as only:
            async for each in only:
                yield 0, each
        return
    # Bounded: a slow reader slows the sources down instead of filling memory.
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
