"""Ranks that are threads of one process and meet at a barrier: for tests of what ranks compute."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, TypeVar

import numpy as np

T = TypeVar("T")


class _Meeting:
    def __init__(self, count: int) -> None:
        self.barrier = threading.Barrier(count, timeout=60)
        self.given: list[Any] = [None] * count

    def exchange(self, rank: int, value: Any) -> list[Any]:
        self.given[rank] = value
        self.barrier.wait()
        found = list(self.given)
        self.barrier.wait()  # nobody writes before all have read
        return found


class ThreadRanks:
    def __init__(self, rank: int, meeting: _Meeting) -> None:
        self.rank, self.count = rank, len(meeting.given)
        self._meeting = meeting
        self.sums = 0

    def sum(self, values: Any) -> Any:
        self.sums += 1
        found = self._meeting.exchange(self.rank, values)
        total = found[0].copy()
        for other in found[1:]:
            total += other
        return total

    def gather(self, values: Any, widths: Sequence[int]) -> Any:
        assert values.shape[1] == widths[self.rank]
        found = self._meeting.exchange(self.rank, values)
        return np.concatenate(found, axis=1) if self.rank == 0 else None

    def share(self, value: Any) -> Any:
        return self._meeting.exchange(self.rank, value)[0]


def together(count: int, work: Callable[[ThreadRanks], T]) -> list[T]:
    """What each rank's work returns."""
    meeting = _Meeting(count)

    def run(rank: int) -> T:
        try:
            return work(ThreadRanks(rank, meeting))
        except BaseException:
            meeting.barrier.abort()  # nobody waits for this one
            raise

    with ThreadPoolExecutor(count) as pool:
        return list(pool.map(run, range(count)))
