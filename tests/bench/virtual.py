"""An event loop whose clock only moves when everything waits: exact times, and no waiting."""

from __future__ import annotations

import asyncio
import selectors
from collections.abc import Callable, Coroutine
from typing import Any, TypeVar

from headrace.bench.record import Record
from headrace.workload.ask import Ask

T = TypeVar("T")


class _Selector(selectors.DefaultSelector):
    """Waits by moving the clock."""

    now_s = 0.0

    def select(self, timeout: float | None = None) -> list[Any]:
        if timeout is None:
            raise AssertionError("everything waits for nothing: the run would hang")
        self.now_s += max(0.0, timeout)
        return super().select(0)


class VirtualLoop(asyncio.SelectorEventLoop):
    def __init__(self) -> None:
        self._virtual = _Selector()
        super().__init__(self._virtual)

    def time(self) -> float:
        return self._virtual.now_s

    def compute(self, seconds: float) -> None:
        """Time that passes while nothing else can happen."""
        self._virtual.now_s += seconds


def run_virtually(work: Callable[[Callable[[], float]], Coroutine[Any, Any, T]]) -> T:
    """`work` gets the clock."""
    loop = VirtualLoop()
    try:
        return loop.run_until_complete(work(loop.time))
    finally:
        loop.close()


class Scripted:
    """Answers each request after `first_s`, with `tokens` tokens `gap_s` apart; one place or more.

    With `places`, requests beyond them wait in the server's queue.
    """

    is_idle = True

    def __init__(
        self,
        clock: Callable[[], float],
        *,
        first_s: float = 0.1,
        gap_s: float = 0.01,
        tokens: int = 3,
        places: int | None = None,
    ) -> None:
        self._clock = clock
        self._first_s, self._gap_s, self._tokens = first_s, gap_s, tokens
        self._places = asyncio.Semaphore(places) if places else None
        self.at_once = self.most_at_once = 0
        self.sent: list[Ask] = []

    def prepare(self, ask: Ask, number: int) -> bytes:
        return b""

    async def send(self, record: Record, request: bytes, began_s: float) -> None:
        record.sent_s = self._clock() - began_s
        self.sent.append(record.ask)
        self.at_once += 1
        self.most_at_once = max(self.most_at_once, self.at_once)
        if self._places is not None:
            async with self._places:
                await self._answer(record, began_s)
        else:
            await self._answer(record, began_s)
        self.at_once -= 1

    async def _answer(self, record: Record, began_s: float) -> None:
        answer = record.answer
        for number in range(self._tokens):
            await asyncio.sleep(self._gap_s if number else self._first_s)
            answer.times_s.append(self._clock() - began_s)
            answer.chars.append(1)
            answer.counts.append(0)
        answer.output_tokens, answer.finish = self._tokens, "length"
