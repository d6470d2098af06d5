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
from typing import Any, Generic, TypeVar

MOST_PROCESSES = 2

S = TypeVar("S")
A = TypeVar("A")
B = TypeVar("B")

_shared: Any = None  # in another process: what its jobs have in common


class Pool(Generic[S]):
    """`shared` is sent once to each process, and given to every job. With one process everything
    happens here, as tests and libraries want it."""

    def __init__(self, shared: S, processes: int = 1) -> None:
        self._given = shared
        self._count = max(1, min(processes, MOST_PROCESSES, os.cpu_count() or 1))
        self._others: ProcessPoolExecutor | None = None

    def __enter__(self) -> Pool[S]:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close(at_once=kind is not None)

    def close(self, *, at_once: bool = False) -> None:
        if self._others is None:
            return
        if at_once:  # nobody waits for what still runs
            for process in list((self._others._processes or {}).values()):
                process.terminate()
        self._others.shutdown(wait=not at_once, cancel_futures=True)
        self._others = None

    def map(self, function: Callable[[S, A], B], arguments: Sequence[A]) -> list[B]:
        """`function` has a name at the top of its module."""
        if self._count == 1 or len(arguments) < 2:
            return [function(self._given, argument) for argument in arguments]
        if self._others is None:
            # Started anew instead of forked: this process may have threads.
            self._others = ProcessPoolExecutor(
                self._count,
                mp_context=get_context("spawn"),
                initializer=_begin,
                initargs=(self._given,),
            )
        calls = [(function, argument) for argument in arguments]
        return list(self._others.map(_call, calls))


def _begin(shared: Any) -> None:
    """Ctrl-C reaches every process of the terminal; only the first one decides what it means."""
    global _shared
    _shared = shared
    signal.signal(signal.SIGINT, signal.SIG_IGN)


def _call(call: tuple[Callable[[Any, A], B], A]) -> B:
    function, argument = call
    return function(_shared, argument)
