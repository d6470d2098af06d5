"""Ranks that are threads of one process and meet at a barrier: for tests of what ranks compute."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from queue import SimpleQueue
from typing import Any, TypeVar

import numpy as np
import torch

T = TypeVar("T")


class _Meeting:
    def __init__(self, count: int) -> None:
        self.barrier = threading.Barrier(count, timeout=60)
        self.given: list[Any] = [None] * count
        self.boxes: list[SimpleQueue[Any]] = [SimpleQueue() for _ in range(count)]
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

    def send(self, values: Any) -> None:
        raise AssertionError("there is one stage")

    def receive(self, values: Any) -> Any:
        raise AssertionError("there is one stage")

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


class ThreadStages(ThreadRanks):
    """Stages of one rank each. The leading one is the last."""

    def __init__(self, number: int, meeting: _Meeting) -> None:
        super().__init__(number, meeting)
        self.number, self.stages = number, self.count
        self.rank, self.count = 0, 1

    def sum(self, values: Any) -> Any:
        return values

    def send(self, values: Any) -> None:
        self._meeting.boxes[self.number - 1].put(_copy(values))

    def receive(self, values: Any) -> Any:
        self._meeting.turn.release()
        try:
            found = self._meeting.boxes[self.number].get(timeout=60)
        finally:
            self._meeting.turn.acquire()
        assert found.shape == values.shape
        return found

    def first(self, values: Any) -> Any:
        return self._meeting.exchange(self.number, _copy(values))[0]

    def share(self, value: Any) -> Any:
        return self._meeting.exchange(self.number, value)[0]


def _copy(values: Any) -> Any:
    if isinstance(values, torch.Tensor) and values.is_cuda:
        torch.cuda.synchronize(values.device)  # others read it on their own streams
    return values.clone() if isinstance(values, torch.Tensor) else values.copy()


def together(count: int, work: Callable[[ThreadRanks], T]) -> list[T]:
    """What each rank's work returns."""
    return _run(count, lambda number, meeting: work(ThreadRanks(number, meeting)))


def in_stages(count: int, work: Callable[[ThreadStages], T]) -> list[T]:
    """What each stage's work returns, the last stage's first."""
    return _run(count, lambda number, meeting: work(ThreadStages(number, meeting)))


def _run(count: int, work: Callable[[int, _Meeting], T]) -> list[T]:
    meeting = _Meeting(count)

    def run(number: int) -> T:
        try:
            with meeting.turn:
                return work(number, meeting)
        except BaseException:
            meeting.barrier.abort()  # nobody waits for this one
            raise

    with ThreadPoolExecutor(count) as pool:
        return list(pool.map(run, range(count)))
