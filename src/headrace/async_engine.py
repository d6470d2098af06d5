"""`AsyncEngine`: a model in this process for many callers at once.

    engine = AsyncEngine(assemble("smollm2"))
    async for event in engine.generate("Once upon a time", SamplingParams(max_tokens=20)):
        print(event.text, end="")

The engine's loop runs in a thread of its own; callers live in an asyncio loop. Leaving the `async
for` (or being cancelled) ends the request at the engine's next turn. Knows no HTTP.
"""

from __future__ import annotations

import asyncio
import itertools
import logging
import threading
from collections import deque
from collections.abc import AsyncIterator, Callable
from functools import partial
from types import TracebackType

from headrace.assemble import Assembled
from headrace.core.constraint import Constraint, GrammarSpec
from headrace.core.context import default_params
from headrace.core.errors import HeadraceError
from headrace.core.request import (
    BeamParams,
    GenerateRequest,
    SampledToken,
    SamplingParams,
    TokenEvent,
)
from headrace.engine.stats import EngineStats
from headrace.text import Prompt, RequestText, make_request

log = logging.getLogger(__name__)


class _Caller:
    """Where a request's tokens go: a queue of the asyncio loop that asked."""

    def __init__(self) -> None:
        self._loop = asyncio.get_running_loop()
        self.queue: asyncio.Queue[list[SampledToken] | HeadraceError] = asyncio.Queue()

    def send(self, item: list[SampledToken] | HeadraceError) -> None:
        try:
            self._loop.call_soon_threadsafe(self.queue.put_nowait, item)
        except RuntimeError:  # that loop is closed: nobody listens any more
            log.debug("a caller's event loop was closed before its request ended")


class AsyncEngine:
    """Wraps an assembled model; `close()` (or `with`) ends its thread and fails what is running."""

    def __init__(self, assembled: Assembled) -> None:
        self._assembled = assembled
        self._engine = assembled.engine
        self._numbers = itertools.count()
        self._callers: dict[str, _Caller] = {}
        # What callers want done to the engine; only the loop's thread touches it.
        self._inbox: deque[Callable[[], None]] = deque()
        self._wake = threading.Condition()
        self._closing = False
        self._thread = threading.Thread(target=self._run, name="headrace-engine", daemon=True)
        self._thread.start()

    @property
    def stats(self) -> EngineStats:
        return self._engine.stats

    async def generate(
        self,
        prompt: Prompt,
        params: SamplingParams | None = None,
        *,
        request_id: str | None = None,
        beam: BeamParams | None = None,
        priority: int = 0,
        cache_salt: str = "",
        timeout_s: float | None = None,
        grammar: GrammarSpec | None = None,
    ) -> AsyncIterator[TokenEvent]:
        """Continue a prompt; events of all its continuations, as they come. With a `grammar` each
        of them matches it, unless max_tokens cuts it off."""
        request = make_request(
            self._assembled.tokenizer,
            self._assembled.spec.vocab_size,
            request_id if request_id is not None else f"request-{next(self._numbers)}",
            prompt,
            (params or SamplingParams()).settled(self._assembled.habits),
            beam=beam,
            priority=priority,
            cache_salt=cache_salt,
            timeout_s=timeout_s,
            grammar=grammar,
        )
        if params is None:
            request.params = default_params(
                prompt_tokens=len(request.prompt_token_ids),
                context_tokens=self._assembled.runner.limits.context_tokens,
            )
        constraint: Constraint | None = None
        if grammar is not None:
            constraint = await asyncio.to_thread(self._assembled.grammars.compile, grammar)
        caller = _Caller()
        text = RequestText(self._assembled.tokenizer, request)
        self._post(lambda: self._add(request, caller, constraint))
        try:
            while not text.is_complete:
                item = await caller.queue.get()
                if isinstance(item, HeadraceError):
                    raise item
                for token in item:
                    event = text.push(token)
                    if event is None:
                        continue
                    if event.finish_reason is not None and token.finish_reason is None:
                        self._post(partial(self._engine.stop, request.request_id, token.index))
                    yield event
        finally:
            self._post(lambda: self._forget(request.request_id, caller))

    def close(self) -> None:
        with self._wake:
            self._closing = True
            self._wake.notify()
        self._thread.join()
        self._assembled.close()

    def __enter__(self) -> AsyncEngine:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    # -- the loop's thread -----------------------------------------------------------------------

    def _post(self, action: Callable[[], None]) -> None:
        with self._wake:
            self._inbox.append(action)
            self._wake.notify()

    def _run(self) -> None:
        while True:
            with self._wake:
                while not (self._inbox or self._engine.has_work or self._closing):
                    self._wake.wait()
                if self._closing:
                    break
                actions = list(self._inbox)
                self._inbox.clear()
            for action in actions:
                action()
            if self._engine.has_work:
                self._publish(self._engine.step())
        closed = HeadraceError("The engine was closed.", "Start another one.")
        for caller in self._callers.values():
            caller.send(closed)

    def _publish(self, tokens: list[SampledToken]) -> None:
        """One hand-over a request and step, however many of its continuations moved."""
        by_request: dict[str, list[SampledToken]] = {}
        for token in tokens:
            by_request.setdefault(token.request_id, []).append(token)
        for request_id, some in by_request.items():
            if caller := self._callers.get(request_id):
                caller.send(some)

    def _add(
        self, request: GenerateRequest, caller: _Caller, constraint: Constraint | None
    ) -> None:
        try:
            self._engine.add(request, constraint)
        except HeadraceError as error:
            caller.send(error)
        else:
            self._callers[request.request_id] = caller

    def _forget(self, request_id: str, caller: _Caller) -> None:
        # A request that was refused for its id must not take down the one that has it.
        if self._callers.get(request_id) is caller:
            del self._callers[request_id]
            self._engine.cancel(request_id)
