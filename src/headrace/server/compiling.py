"""Grammars compiled by threads of their own, so that no step waits for one.

How much work and time a grammar may take is its compiler's affair (grammar.py). Knows requests that
wait for one; not what compiling is.
"""

from __future__ import annotations

import contextlib
import os
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial

from headrace.core.constraint import Constraint, GrammarSpec
from headrace.core.errors import HeadraceError, InvalidRequestError
from headrace.core.request import GenerateRequest

THREADS = 2


@dataclass(slots=True, kw_only=True)
class Compiled:
    """A request whose grammar is done with: a constraint, or why there is none."""

    request: GenerateRequest
    result: Constraint | HeadraceError


class Compiling:
    """Used by the loop's thread alone."""

    def __init__(self, compile_grammar: Callable[[GrammarSpec], Constraint]) -> None:
        self._compile = compile_grammar
        self._executor = ThreadPoolExecutor(THREADS, thread_name_prefix="headrace-grammars")
        self._waiting: dict[str, Future[Constraint]] = {}
        self._finished: deque[Compiled] = deque()  # threads append, the loop takes
        # A pipe, so that a loop that sleeps on descriptors wakes up. Never blocks: one byte in it
        # is as good as many.
        self._readable, self._writable = os.pipe()
        os.set_blocking(self._readable, False)
        os.set_blocking(self._writable, False)

    def fileno(self) -> int:
        """Readable when something has finished."""
        return self._readable

    @property
    def is_idle(self) -> bool:
        return not self._waiting

    def submit(self, request: GenerateRequest) -> None:
        assert request.grammar is not None
        future = self._executor.submit(self._compile, request.grammar)
        self._waiting[request.request_id] = future
        future.add_done_callback(partial(self._done, request))

    def forget(self, request_id: str) -> None:
        """Its caller went away."""
        if (future := self._waiting.pop(request_id, None)) is not None:
            future.cancel()

    def take(self) -> list[Compiled]:
        """Those that have finished since the last call and that somebody waits for."""
        with contextlib.suppress(BlockingIOError):
            os.read(self._readable, 4096)
        found: list[Compiled] = []
        while self._finished:
            compiled = self._finished.popleft()
            if self._waiting.pop(compiled.request.request_id, None) is not None:
                found.append(compiled)
        return found

    def close(self) -> None:
        self._executor.shutdown(wait=False, cancel_futures=True)

    def _done(self, request: GenerateRequest, future: Future[Constraint]) -> None:
        if future.cancelled():
            return
        self._finished.append(Compiled(request=request, result=_result(future)))
        with contextlib.suppress(BlockingIOError):
            os.write(self._writable, b"x")


def _result(future: Future[Constraint]) -> Constraint | HeadraceError:
    error = future.exception()
    if error is None:
        return future.result()
    if isinstance(error, HeadraceError):
        return error
    return InvalidRequestError(
        f"The grammar can't be compiled: {error}.", "Correct it.", param="response_format"
    )
