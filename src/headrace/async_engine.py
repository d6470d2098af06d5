"""`AsyncEngine`: a model in this process for many callers at once.

    async with AsyncEngine("smollm2") as engine:
        async for event in engine.generate("Once upon a time", SamplingParams(max_tokens=20)):
            print(event.text, end="")

The engine's loop runs in a thread of its own; callers live in an asyncio loop. Leaving the `async
for` (or being cancelled) ends the request at the engine's next turn. An engine that was not
closed closes itself when it is garbage collected or the interpreter exits. Knows no HTTP.
"""

from __future__ import annotations

import asyncio
import itertools
import logging
import threading
import weakref
from collections import deque
from collections.abc import AsyncIterator, Callable
from functools import partial
from pathlib import Path
from typing import Any

from headrace.assemble import Assembled, assemble
from headrace.core.closes import Closes
from headrace.core.config import EngineConfig
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
from headrace.fetch.catalog import Progress, silent
from headrace.text import Prompt, RequestText, make_request

log = logging.getLogger(__name__)


class _Caller:
    """Where a request's tokens go: a queue in the caller's asyncio loop."""

    def __init__(self) -> None:
        self._loop = asyncio.get_running_loop()
        self.queue: asyncio.Queue[list[SampledToken] | HeadraceError] = asyncio.Queue()

    def send(self, item: list[SampledToken] | HeadraceError) -> None:
        try:
            self._loop.call_soon_threadsafe(self.queue.put_nowait, item)
        except RuntimeError:  # the caller's loop is closed
            log.debug("a caller's event loop was closed before its request ended")


class AsyncEngine(Closes):
    """A model that answers many at once; made as `LLM` is. `model` is a catalog name, a GGUF file,
    a folder or a hub id; `settings` are the fields of EngineConfig. `close()`, `with` or `async
    with` ends its thread, fails what is running and frees the memory."""

    def __init__(
        self,
        model: str | Path | None = None,
        *,
        config: EngineConfig | None = None,
        offline: bool = False,
        progress: Progress = silent,
        **settings: Any,
    ) -> None:
        self._assembled = assemble(
            None if model is None else str(model),
            config=config,
            offline=offline,
            progress=progress,
            **settings,
        )
        self._numbers = itertools.count()
        self._loop = _Loop(self._assembled)
        # The thread holds no reference to this object, so it can be garbage collected meanwhile.
        # Callers that still wait when the interpreter exits get no error: they won't run any more.
        self._unclosed = weakref.finalize(self, self._loop.end)

    @property
    def stats(self) -> EngineStats:
        return self._loop.engine.stats

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
        speculate: str | None = None,
    ) -> AsyncIterator[TokenEvent]:
        """Continue a prompt; yields the events of all its continuations as they arrive. With a
        `grammar` each of them matches it, unless max_tokens cuts it off. `speculate` as in
        LLM.generate."""
        request = make_request(
            self._assembled.tokenizer,
            self._assembled.spec.vocab_size,
            request_id if request_id is not None else f"request-{next(self._numbers)}",
            prompt,
            (params or SamplingParams()).settled(self._assembled.sampling_defaults),
            beam=beam,
            priority=priority,
            cache_salt=cache_salt,
            timeout_s=timeout_s,
            grammar=grammar,
            speculate=speculate,
        )
        if params is None:
            request.params = default_params(
                request.params,
                prompt_tokens=len(request.prompt_token_ids),
                context_tokens=self._assembled.runner.limits.context_tokens,
            )
        constraint: Constraint | None = None
        if grammar is not None:
            constraint = await asyncio.to_thread(self._assembled.grammars.compile, grammar)
        caller = _Caller()
        text = RequestText(self._assembled.tokenizer, request)
        loop = self._loop
        if not loop.post(lambda: loop.add(request, caller, constraint)):
            raise loop.closing
        try:
            while not text.is_complete:
                item = await caller.queue.get()
                if isinstance(item, HeadraceError):
                    raise item
                for token in item:
                    event = text.push(*token.row)
                    if event is None:
                        continue
                    if event.finish_reason is not None and token.finish_reason is None:
                        loop.post(partial(loop.engine.stop, request.request_id, token.index))
                    yield event
        finally:
            loop.post(lambda: loop.forget(request.request_id, caller))

    def close(self) -> None:
        self._unclosed.detach()
        self._loop.close()

    async def __aenter__(self) -> AsyncEngine:
        return self

    async def __aexit__(self, *error: object) -> None:
        await asyncio.to_thread(self.close)  # waits for a running step


def _closed() -> HeadraceError:
    return HeadraceError("The engine was closed.", "Create a new one.")


class _Loop:
    """The engine's loop, in a thread. Only that thread touches the engine and the callers; others
    post actions to it. It owns the model, and closes it at its end."""

    def __init__(self, assembled: Assembled) -> None:
        self.engine = assembled.engine
        self.callers: dict[str, _Caller] = {}
        self.inbox: deque[Callable[[], None]] = deque()
        self._assembled = assembled
        self._wake = threading.Condition()
        self._closing: HeadraceError | None = None  # the error for callers
        self._tells = False  # whether callers get that error when it ends
        self._ended = False  # the loop has ended
        # A daemon thread: the interpreter does not wait for it, but closes it on exit.
        self._thread = threading.Thread(target=self._run, name="headrace-engine", daemon=True)
        self._thread.start()

    def post(self, action: Callable[[], None]) -> bool:
        """Queues an action for the next turn of the loop; False if the loop has ended."""
        with self._wake:
            if not self._ended:
                self.inbox.append(action)
                self._wake.notify()
            return not self._ended

    @property
    def closing(self) -> HeadraceError:
        return self._closing or _closed()

    def close(self) -> None:
        """Fail what is running, and end."""
        self._tells = True
        self.end()

    def end(self) -> None:
        with self._wake:
            self._closing = self._closing or _closed()
            self._wake.notify()
        if threading.current_thread() is not self._thread:  # the garbage collector may run in it
            self._thread.join()

    # -- the loop's thread -----------------------------------------------------------------------

    def add(self, request: GenerateRequest, caller: _Caller, constraint: Constraint | None) -> None:
        if self._closing is not None:
            caller.send(self._closing)
            return
        try:
            self.engine.add(request, constraint)
        except HeadraceError as error:
            caller.send(error)
        else:
            self.callers[request.request_id] = caller

    def forget(self, request_id: str, caller: _Caller) -> None:
        # A request that was refused for a duplicate id must not end the one with that id.
        if self.callers.get(request_id) is caller:
            del self.callers[request_id]
            self.engine.cancel(request_id)

    def _run(self) -> None:
        try:
            while self._closing is None:
                self._turn()
        except Exception as error:
            log.exception("the engine's loop failed")
            self._tells = True
            self._closing = HeadraceError(
                f"The engine failed: {type(error).__name__}.",
                "This is a mistake in Headrace: please report it, and start another engine.",
            )
        self._end()

    def _turn(self) -> None:
        with self._wake:
            while not (self.inbox or self.engine.has_work or self._closing):
                self._wake.wait()
            actions = list(self.inbox)
            self.inbox.clear()
        for action in actions:
            action()
        if self.engine.has_work and self._closing is None:
            self._publish(self.engine.step())

    def _end(self) -> None:
        if self._tells:
            for caller in self.callers.values():
                caller.send(self.closing)
        self.callers.clear()
        self._assembled.close()
        with self._wake:
            self._ended = True
            if self._tells:
                for action in self.inbox:  # those that came too late get the error
                    action()
            self.inbox.clear()

    def _publish(self, tokens: list[SampledToken]) -> None:
        """One hand-over per request and step, for all its continuations together."""
        by_request: dict[str, list[SampledToken]] = {}
        for token in tokens:
            by_request.setdefault(token.request_id, []).append(token)
        for request_id, some in by_request.items():
            if caller := self.callers.get(request_id):
                caller.send(some)
