"""Sends requests to an engine as virtual time passes, and records what came of each and when.

Checks the engine: each continuation ends once and returns nothing afterwards, and an engine that
never finishes raises an error. Knows no runner: the runner moves the clock.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field

from headrace.core.clock import VirtualClock
from headrace.core.constraint import Constraint
from headrace.core.errors import HeadraceError, InvalidRequestError
from headrace.core.request import FinishReason, GenerateRequest, SampledToken
from headrace.engine.loop import Engine


@dataclass(frozen=True, slots=True, kw_only=True)
class Arrival:
    request: GenerateRequest
    at_s: float = 0.0
    cancel_at_s: float | None = None
    constraint: Callable[[], Constraint] | None = None  # started anew; for a request's grammar


@dataclass(slots=True, kw_only=True)
class Continuation:
    tokens: list[SampledToken] = field(default_factory=list)  # those with a token
    times_s: list[float] = field(default_factory=list)  # when each became known
    finish_reason: FinishReason | None = None
    error: str | None = None
    embedding: list[float] | None = None


@dataclass(slots=True, kw_only=True)
class Outcome:
    """The outcome of a request. A refused one has no continuations."""

    arrival: Arrival
    continuations: dict[int, Continuation] = field(default_factory=dict)
    refused: InvalidRequestError | None = None
    cancelled: bool = False

    @property
    def request_id(self) -> str:
        return self.arrival.request.request_id


def drive(
    engine: Engine,
    clock: VirtualClock,
    arrivals: Iterable[Arrival],
    *,
    max_idle_steps: int = 10_000,
    after_step: Callable[[], None] = lambda: None,
) -> Iterator[Outcome]:
    """Outcomes in the order in which they became known. Arrivals must be in order of time. An
    engine that makes `max_idle_steps` steps in a row without ending a request counts as stuck."""
    return _Drive(engine, clock, iter(arrivals), max_idle_steps, after_step).outcomes()


class _Drive:
    def __init__(
        self,
        engine: Engine,
        clock: VirtualClock,
        arrivals: Iterator[Arrival],
        max_idle_steps: int,
        after_step: Callable[[], None],
    ) -> None:
        self._engine = engine
        self._clock = clock
        self._arrivals = arrivals
        self._next = next(arrivals, None)
        self._max_idle_steps = max_idle_steps
        self._after_step = after_step
        self._live: dict[str, Outcome] = {}
        self._cancels: list[tuple[float, str]] = []  # a heap

    def outcomes(self) -> Iterator[Outcome]:
        idle = 0
        while self._next is not None or self._engine.has_work:
            ended = [*self._arrive(), *self._cancel()]
            if self._engine.has_work:
                ended += self._step()
            elif self._next is not None and self._next.at_s > self._clock.now_s():
                self._clock.advance(self._next.at_s - self._clock.now_s())
            yield from ended
            idle = 0 if ended else idle + 1
            if idle > self._max_idle_steps:
                raise HeadraceError(
                    f"{idle} steps ended no request, with {len(self._live)} not ended; expected "
                    f"at most {self._max_idle_steps}.",
                    "This is a mistake in Headrace: please report it.",
                )
        if self._live:
            raise self._broken(f"is idle while requests {sorted(self._live)} have not ended")

    def _arrive(self) -> Iterator[Outcome]:
        while self._next is not None and self._next.at_s <= self._clock.now_s():
            arrival, self._next = self._next, next(self._arrivals, None)
            outcome = Outcome(arrival=arrival)
            try:
                make = arrival.constraint
                self._engine.add(arrival.request, None if make is None else make())
            except InvalidRequestError as error:
                outcome.refused = error
                yield outcome
                continue
            self._live[outcome.request_id] = outcome
            if arrival.cancel_at_s is not None:
                heapq.heappush(self._cancels, (arrival.cancel_at_s, outcome.request_id))

    def _cancel(self) -> Iterator[Outcome]:
        while self._cancels and self._cancels[0][0] <= self._clock.now_s():
            _, request_id = heapq.heappop(self._cancels)
            self._engine.cancel(request_id)
            if request_id in self._live:
                outcome = self._live.pop(request_id)
                outcome.cancelled = True
                yield outcome

    def _step(self) -> list[Outcome]:
        ended: dict[str, Outcome] = {}
        for token in self._engine.step():
            outcome = self._live.get(token.request_id) or ended.get(token.request_id)
            if outcome is None:
                raise self._broken(f"says {token} of a request that is not there")
            self._take(outcome, token)
            if self._has_ended(outcome):
                ended[token.request_id] = outcome
                self._live.pop(token.request_id, None)
        self._after_step()
        return list(ended.values())

    def _take(self, outcome: Outcome, token: SampledToken) -> None:
        one = outcome.continuations.setdefault(token.index, Continuation())
        if one.finish_reason is not None:
            raise self._broken(f"says {token} of a continuation that ended")
        if token.token_id >= 0:
            one.tokens.append(token)
            one.times_s.append(self._clock.now_s())
        one.finish_reason, one.error = token.finish_reason, token.error
        one.embedding = token.embedding

    def _has_ended(self, outcome: Outcome) -> bool:
        ended = sum(1 for c in outcome.continuations.values() if c.finish_reason is not None)
        request = outcome.arrival.request
        if request.beam is not None:  # all beams come at once, and there may be fewer than asked
            return ended > 0
        return ended == (request.params.best_of or request.params.n)

    def _broken(self, what: str) -> HeadraceError:
        return HeadraceError(
            f"The engine {what}; expected each continuation to end once, with its last token.",
            "This is a mistake in Headrace: please report it.",
        )
