"""Ranks that are threads of one process and meet at a barrier: for tests of what ranks compute."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, TypeVar

import numpy as np
import torch

T = TypeVar("T")


class _Meeting:
    def __init__(self, count: int) -> None:
        self.barrier = threading.Barrier(count, timeout=60)
        self.given: list[Any] = [None] * count
        self.turn = threading.Lock()  # Triton's interpreter is not for several threads at once

    def exchange(self, rank: int, value: Any) -> list[Any]:
        self.given[rank] = value
        self._wait()
        found = list(self.given)
        self._wait()  # nobody writes before all have read
        return found

    def _wait(self) -> None:
        self.turn.release()
        try:
            self.barrier.wait()
        finally:
            self.turn.acquire()


class ThreadRanks:
    """One of them computes at a time."""

    def __init__(self, rank: int, meeting: _Meeting) -> None:
        self.rank, self.count = rank, len(meeting.given)
        self._meeting = meeting
        self.sums = 0

    def sum(self, values: Any) -> Any:
        self.sums += 1
        total, *others = self._meeting.exchange(self.rank, _copy(values))
        for other in others:
            total = total + other
        return total

    def gather(self, values: Any, widths: Sequence[int]) -> Any:
        assert values.shape[1] == widths[self.rank]
        found = self._meeting.exchange(self.rank, _copy(values))
        if self.rank:
            return None
        is_tensor = isinstance(values, torch.Tensor)
        return torch.cat(found, dim=1) if is_tensor else np.concatenate(found, axis=1)

    def first(self, values: Any) -> Any:
        return self._meeting.exchange(self.rank, _copy(values))[0]

    def share(self, value: Any) -> Any:
        return self._meeting.exchange(self.rank, value)[0]

    def close(self) -> None:
        """Threads end by themselves."""


def _copy(values: Any) -> Any:
    if isinstance(values, torch.Tensor) and values.is_cuda:
        torch.cuda.synchronize(values.device)  # others read it on their own streams
    return values.clone() if isinstance(values, torch.Tensor) else values.copy()


def together(count: int, work: Callable[[ThreadRanks], T]) -> list[T]:
    """What each rank's work returns."""
    meeting = _Meeting(count)

    def run(rank: int) -> T:
        try:
            with meeting.turn:
                return work(ThreadRanks(rank, meeting))
        except BaseException:
            meeting.barrier.abort()  # nobody waits for this one
            raise

    with ThreadPoolExecutor(count) as pool:
        return list(pool.map(run, range(count)))
