"""Runs jobs in this process or in two, in order: the same results either way.

Knows no job: a function of one argument, named at the top of a module, and its arguments. An
interrupt ends the other processes at once.
"""

from __future__ import annotations

import os
import signal
from collections.abc import Callable, Sequence
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from types import TracebackType
from typing import TypeVar

MOST_PROCESSES = 2

A = TypeVar("A")
B = TypeVar("B")


class Pool:
    """`processes` 1: everything happens here, as tests and libraries want it."""

    def __init__(self, processes: int = 1) -> None:
        self._count = max(1, min(processes, MOST_PROCESSES, os.cpu_count() or 1))
        self._others: ProcessPoolExecutor | None = None

    def __enter__(self) -> Pool:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if self._others is None:
            return
        if kind is not None:  # nobody waits for what still runs
            for process in list(self._others._processes.values()):
                process.terminate()
        self._others.shutdown(wait=kind is None, cancel_futures=True)

    def map(self, function: Callable[[A], B], arguments: Sequence[A]) -> list[B]:
        if self._count == 1 or len(arguments) < 2:
            return [function(argument) for argument in arguments]
        if self._others is None:
            # Started anew instead of forked: this process may have threads.
            self._others = ProcessPoolExecutor(
                self._count, mp_context=get_context("spawn"), initializer=_leave_interrupts
            )
        return list(self._others.map(function, arguments))


def _leave_interrupts() -> None:
    """Ctrl-C reaches every process of the terminal; only the first one decides what it means."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
