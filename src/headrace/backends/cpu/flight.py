"""Steps in flight: submitted in order, computed in order, collected in order.

With room for one step it is computed when it is submitted; with room for two, by one thread, so
that whoever plans can write a plan while the one before it is computed. Knows what each step drew,
as the next one may ask for it (core.step.PREVIOUS); knows no arrays and no model.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable, Collection, Mapping, Sequence
from concurrent.futures import Future
from functools import partial
from queue import SimpleQueue
from typing import NamedTuple, Protocol
from weakref import finalize

from headrace.core.errors import HeadraceError
from headrace.core.step import (
    PREVIOUS,
    Drawn,
    EntryResult,
    RunnerLimits,
    StepEntry,
    StepPlan,
    StepResult,
)

# By sequence: the token that it drew in a step, or None if it should have and failed.
DrawnTokens = Mapping[int, int | None]


class ReadStep(Protocol):
    """A plan that has been read: nothing that its author does to it matters any more."""

    @property
    def drawing(self) -> Collection[int]:
        """The sequences that draw a token."""
        ...

    def compute(self, previous: DrawnTokens) -> Drawn | list[EntryResult]:
        """Few words where they say it all."""
        ...

    @property
    def sample_s(self) -> float:
        """What drawing took, once it is computed."""
        ...


class Flight:
    def __init__(self, steps_in_flight: int) -> None:
        self._steps_in_flight = steps_in_flight
        self._results: deque[Future[StepResult] | StepResult] = deque()  # to come, or there
        self._drawn: DrawnTokens = {}  # by the last step; only whoever computes touches it
        self._closed = False
        self._worker = _Worker() if steps_in_flight > 1 else None
        if self._worker is not None:
            # The thread ends on close(), when this is garbage, and when the interpreter ends.
            self._end = finalize(self, self._worker.end)

    def check_open(self) -> None:
        if self._closed:
            raise HeadraceError("The runner is closed; expected an open one.", "Make a new runner.")

    def submit(self, step: ReadStep) -> None:
        self.check_open()
        if len(self._results) >= self._steps_in_flight:
            raise HeadraceError(
                f"A plan was submitted with {len(self._results)} in flight; expected fewer than "
                f"{self._steps_in_flight}.",
                "Collect one first.",
            )
        if self._worker is not None:
            self._results.append(self._worker.submit(partial(self._compute, step)))
        else:
            self._results.append(self._compute(step))  # what it raises is raised here

    def collect(self) -> StepResult:
        if not self._results:
            raise HeadraceError(
                "collect() was called with no plan submitted; expected a submit() before it.",
                "Submit a plan first.",
            )
        first = self._results[0]
        if isinstance(first, StepResult):
            self._results.popleft()
            return first
        first.exception()  # waits; Ctrl-C in here leaves the step in flight
        self._results.popleft()
        return first.result()

    def close(self) -> None:
        self._closed = True
        for result in self._results:
            if isinstance(result, Future):
                result.cancel()
        if self._worker is not None:
            self._end()
        self._results.clear()

    def _compute(self, step: ReadStep) -> StepResult:
        began = time.perf_counter()
        previous, self._drawn = self._drawn, dict.fromkeys(step.drawing)  # if this step raises
        found = step.compute(previous)
        took_s = time.perf_counter() - began
        if isinstance(found, Drawn):
            self._drawn = dict(zip(found.sequence_ids, found.token_ids, strict=True))
            return StepResult(drawn=found, compute_s=took_s, sample_s=step.sample_s)
        drawing = step.drawing
        self._drawn = {r.sequence_id: r.token_id for r in found if r.sequence_id in drawing}
        return StepResult(entries=found, compute_s=took_s, sample_s=step.sample_s)


class _Worker:
    """A thread that computes one step after the other. Not an executor's: those take nothing more
    once the interpreter begins to end, which is before an engine that still runs is told to."""

    def __init__(self) -> None:
        self._queue: SimpleQueue[tuple[Future[StepResult], Callable[[], StepResult]] | None] = (
            SimpleQueue()
        )
        self._thread = threading.Thread(target=self._run, name="headrace-steps", daemon=True)
        self._thread.start()

    def submit(self, work: Callable[[], StepResult]) -> Future[StepResult]:
        future: Future[StepResult] = Future()
        self._queue.put((future, work))
        return future

    def end(self) -> None:
        """After what was submitted, but for what was cancelled since."""
        self._queue.put(None)
        if threading.current_thread() is not self._thread:  # which may be the one to find garbage
            self._thread.join()

    def _run(self) -> None:
        while (item := self._queue.get()) is not None:
            future, work = item
            if not future.set_running_or_notify_cancel():
                continue
            try:
                future.set_result(work())
            except BaseException as error:  # for whoever collects it
                future.set_exception(error)
            del item, future, work  # while it waits it must hold no step, nor what that holds


class Unknown(NamedTuple):
    """A token that the step before will have drawn."""

    row: int  # of the step
    number: int  # of the entry
    sequence_id: int


def check_previous(plan: StepPlan, limits: RunnerLimits) -> None:
    """PREVIOUS stands only where it can: as an entry's single token, with steps in flight."""
    for entry in plan.entries:
        if PREVIOUS not in entry.token_ids:
            continue
        if limits.steps_in_flight == 1:
            raise _mistaken(
                f"PREVIOUS for sequence {entry.sequence_id}",
                "token ids, as only one step is in flight",
            )
        if len(entry.token_ids) != 1:
            raise _mistaken(
                f"PREVIOUS among {len(entry.token_ids)} tokens of sequence {entry.sequence_id}",
                "it as the only one",
            )


def previous_rows(entries: Sequence[StepEntry]) -> list[Unknown]:
    unknown: list[Unknown] = []
    row = 0
    for number, entry in enumerate(entries):
        if entry.token_ids == [PREVIOUS]:
            unknown.append(Unknown(row, number, entry.sequence_id))
        row += len(entry.token_ids)
    return unknown


def continue_from(
    previous: DrawnTokens, unknown: Sequence[Unknown]
) -> tuple[list[tuple[int, int]], list[tuple[int, str]]]:
    """(row, token) for each unknown token, and (entry, error) for those whose sequence failed in
    the step before. Such an entry is computed from token 0: nobody else can see its blocks."""
    tokens: list[tuple[int, int]] = []
    failed: list[tuple[int, str]] = []
    for row, number, sequence_id in unknown:
        if sequence_id not in previous:
            raise _mistaken(
                f"PREVIOUS for sequence {sequence_id}",
                "a token id, as the step before drew none for it",
            )
        token = previous[sequence_id]
        if token is None:
            failed.append((number, "the step before, which this one continues, failed"))
        tokens.append((row, token or 0))
    return tokens, failed


def _mistaken(found: str, expected: str) -> HeadraceError:
    return HeadraceError(
        f"The step plan has {found}; expected {expected}.",
        "This is a mistake in Headrace: please report it.",
    )
