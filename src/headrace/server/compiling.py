"""Grammars compiled by a thread of their own, so that no step waits for one.

Compiling is bounded by size and work (grammar.py); should one take too long all the same, its
request is refused and another thread takes over. Knows requests that wait; not what compiling is.
"""

from __future__ import annotations

import contextlib
import os
import threading
import time
from collections import deque
from collections.abc import Callable

from headrace.core.constraint import Constraint, GrammarSpec
from headrace.core.errors import HeadraceError, InvalidRequestError
from headrace.core.request import GenerateRequest

Compile = Callable[[GrammarSpec], Constraint]
TIME_LIMIT_S = 10.0  # for one grammar, on a machine that is busy with steps
MOST_STUCK = 2  # threads that were given up; after that, requests with a grammar are refused


class Compiled:
    """A request whose grammar is done with: a constraint, or why there is none."""

    def __init__(self, request: GenerateRequest, result: Constraint | HeadraceError) -> None:
        self.request = request
        self.result = result


class Compiling:
    def __init__(self, compile_grammar: Compile) -> None:
        self._compile = compile_grammar
        self._lock = threading.Condition()
        self._waiting: deque[GenerateRequest] = deque()
        self._finished: deque[Compiled] = deque()
        self._current: tuple[GenerateRequest, float] | None = None  # and when it began
        self._generation = 0  # of the thread that may take work: one that is stuck may not
        self._stuck = 0
        self._running = False
        self._closed = False
        # A pipe, so that a loop that sleeps on file descriptors wakes up.
        self._readable, self._writable = os.pipe()
        os.set_blocking(self._readable, False)

    def fileno(self) -> int:
        """Readable when something has finished."""
        return self._readable

    @property
    def is_idle(self) -> bool:
        with self._lock:
            return not (self._waiting or self._current or self._finished)

    def submit(self, request: GenerateRequest) -> None:
        assert request.grammar is not None
        with self._lock:
            if self._stuck > MOST_STUCK:
                self._finished.append(Compiled(request, _none_is_taken()))
                self._wake()
                return
            self._waiting.append(request)
            if not self._running:
                self._start_thread()
            self._lock.notify()

    def forget(self, request_id: str) -> None:
        """Its caller went away."""
        with self._lock:
            self._waiting = deque(r for r in self._waiting if r.request_id != request_id)
            self._finished = deque(c for c in self._finished if c.request.request_id != request_id)
            if self._current and self._current[0].request_id == request_id:
                self._current[0].request_id = ""  # nobody's: dropped when it is done

    def take(self) -> list[Compiled]:
        """Those that have finished, or were given up, since the last call."""
        with contextlib.suppress(BlockingIOError):
            os.read(self._readable, 4096)
        with self._lock:
            self._give_up_slow()
            finished, self._finished = self._finished, deque()
        return [each for each in finished if each.request.request_id]

    def close(self) -> None:
        with self._lock:
            self._closed = True
            self._lock.notify_all()

    def _give_up_slow(self) -> None:
        if self._current is None or time.monotonic() - self._current[1] < TIME_LIMIT_S:
            return
        request, _ = self._current
        error = _too_slow(f"The grammar was not compiled within {TIME_LIMIT_S:g} s.")
        self._finished.append(Compiled(request, error))
        self._current = None
        self._stuck += 1
        self._generation += 1  # the stuck thread may no longer take work
        if self._stuck <= MOST_STUCK:
            self._start_thread()
            return
        self._finished += (Compiled(request, _none_is_taken()) for request in self._waiting)
        self._waiting.clear()

    def _start_thread(self) -> None:
        self._generation += 1
        self._running = True
        threading.Thread(
            target=self._work, args=(self._generation,), name="headrace-grammar", daemon=True
        ).start()

    def _work(self, generation: int) -> None:
        while True:
            with self._lock:
                while not (self._waiting or self._closed):
                    self._lock.wait()
                if self._closed:
                    return
                request = self._waiting.popleft()
                self._current = (request, time.monotonic())
            result = self._compiled(request)
            with self._lock:
                if generation != self._generation:  # given up meanwhile; another may work now
                    self._stuck -= 1
                    if self._stuck == MOST_STUCK:  # none does
                        self._start_thread()
                    return
                self._current = None
                self._finished.append(Compiled(request, result))
                self._wake()

    def _compiled(self, request: GenerateRequest) -> Constraint | HeadraceError:
        assert request.grammar is not None
        try:
            return self._compile(request.grammar)
        except HeadraceError as error:
            return error
        except Exception as error:
            return InvalidRequestError(
                f"The grammar can't be compiled: {error}.", "Correct it.", param="response_format"
            )

    def _wake(self) -> None:
        os.write(self._writable, b"x")


def _none_is_taken() -> InvalidRequestError:
    return _too_slow("Earlier grammars took too long to compile; none is taken now.")


def _too_slow(cause: str) -> InvalidRequestError:
    return InvalidRequestError(cause, "Simplify the grammar.", param="response_format")
