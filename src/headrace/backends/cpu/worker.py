"""A thread that computes steps one after the other, while the engine writes the next plan.

Knows neither plans nor models.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import Future
from queue import SimpleQueue
from weakref import finalize

from headrace.core.step import StepResult


class Worker:
    """A thread that computes one step after the other. Not a ThreadPoolExecutor: that accepts no
    work once the interpreter begins to exit, which is before a running engine is stopped."""

    def __init__(self, owner: object) -> None:
        self._queue: SimpleQueue[tuple[Future[StepResult], Callable[[], StepResult]] | None] = (
            SimpleQueue()
        )
        self._thread = threading.Thread(target=self._run, name="headrace-steps", daemon=True)
        self._thread.start()
        # The thread ends when it is closed, when its owner is collected, or when Python exits.
        self.end = finalize(owner, self._end)

    def submit(self, work: Callable[[], StepResult]) -> Future[StepResult]:
        future: Future[StepResult] = Future()
        self._queue.put((future, work))
        return future

    def _end(self) -> None:
        """Ends after all submitted work, except work that was cancelled since."""
        self._queue.put(None)
        if threading.current_thread() is not self._thread:  # the collector may run on it
            self._thread.join()

    def _run(self) -> None:
        while (item := self._queue.get()) is not None:
            future, work = item
            if not future.set_running_or_notify_cancel():
                continue
            try:
                future.set_result(work())
            except BaseException as error:  # raised again in collect()
                future.set_exception(error)
            del item, future, work  # hold no reference to a step while waiting
