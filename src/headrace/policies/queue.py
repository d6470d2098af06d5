"""Whether a request may enter the queue: the queue's bounds, and the expected wait.

Takes the clock as an argument. A request waits from its arrival until the engine starts it. The
bounds hold for all keys together; beyond them each key keeps its share, so that one key that fills
the queue does not keep others out. Knows counts and times; neither HTTP nor the engine.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Mapping

from headrace.core.errors import (
    ContextLengthError,
    QueueTimeoutError,
    TooManyRequestsError,
)
from headrace.core.request import GenerateRequest
from headrace.core.server_config import ServerConfig
from headrace.policies.rate import Rate

UNKNOWN_RETRY_S = 1.0
LONGEST_RETRY_S = 600.0
# Requests of one step start together. A request that missed one step may have arrived too late for
# it; one that missed two did not fit, and neither will those behind it.
SAME_STEP_S = 0.002
PASSED_OVER_STEPS = 2


class Ticket:
    """A request's place in the queue. Leaving the `with` gives it up in any state."""

    def __init__(self, queue: QueueBounds, tenant: str, prompt_tokens: int, steps: int) -> None:
        self._queue = queue
        self.tenant = tenant
        self.prompt_tokens = prompt_tokens
        self.steps = steps  # steps that had started requests before it arrived
        self.is_waiting = True

    def started(self) -> None:
        """The engine has started it. May be called twice."""
        if self.is_waiting:
            self.is_waiting = False
            self._queue.leave(self, has_started=True)

    def __enter__(self) -> Ticket:
        return self

    def __exit__(self, *error: object) -> None:
        if self.is_waiting:
            self.is_waiting = False
            self._queue.leave(self, has_started=False)


class _Line:
    """The waiting requests of one tenant."""

    def __init__(self) -> None:
        self.tickets: dict[Ticket, None] = {}  # in order of arrival
        self.tokens = 0

    def add(self, ticket: Ticket) -> None:
        self.tickets[ticket] = None
        self.tokens += ticket.prompt_tokens

    def remove(self, ticket: Ticket) -> None:
        del self.tickets[ticket]
        self.tokens -= ticket.prompt_tokens

    def first_to_leave(self, tokens: int, most_requests: int, most_tokens: int) -> int:
        """How many of them must leave before a prompt of `tokens` tokens may enter."""
        requests, left = len(self.tickets), self.tokens
        for count, ticket in enumerate(self.tickets):
            if requests < most_requests and left + tokens <= most_tokens:
                return count
            requests -= 1
            left -= ticket.prompt_tokens
        return len(self.tickets)


_NOBODY = _Line()


class QueueBounds:
    def __init__(
        self,
        *,
        max_waiting_requests: int,
        max_waiting_tokens: int,
        max_prompt_tokens: int | None = None,
        weights: Mapping[str, int] | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._weights = weights or {}  # by key; with fewer than two keys nothing is shared
        self._max_requests = max_waiting_requests
        self._max_tokens = max_waiting_tokens
        self._max_prompt_tokens = max_prompt_tokens
        self._clock = clock
        self._at_s = clock()
        self._any_rate = Rate()  # whenever requests wait; an underestimate if only a few do
        self._full_rate = Rate()  # while the engine has no room for more
        self._all = _Line()
        self._lines: dict[str, _Line] = {}  # by tenant; only lines that are not empty
        self._steps = 0
        self._step_s = -math.inf
        self._step_was_full = False  # of the step whose starts are being reported

    @classmethod
    def from_config(
        cls, config: ServerConfig, weights: Mapping[str, int] | None = None
    ) -> QueueBounds:
        return cls(
            max_waiting_requests=config.max_waiting_requests,
            max_waiting_tokens=config.max_waiting_tokens,
            max_prompt_tokens=config.max_prompt_tokens,
            weights=weights,
        )

    def enter(self, request: GenerateRequest) -> Ticket:
        """A place in the queue; raises if there is none."""
        tokens = len(request.prompt_token_ids)
        self._pass_time()
        self._check_prompt(tokens)
        self._check_room(tokens, request.tenant)
        self._check_timeout(request.timeout_s, request.tenant)
        ticket = Ticket(self, request.tenant, tokens, self._steps)
        self._all.add(ticket)
        self._lines.setdefault(request.tenant, _Line()).add(ticket)
        return ticket

    def leave(self, ticket: Ticket, *, has_started: bool) -> None:
        self._pass_time()
        if has_started:
            if self._at_s - self._step_s > SAME_STEP_S:
                self._step_was_full = self.is_full
                self._steps += 1
                self._step_s = self._at_s
            self._any_rate.count(ticket.prompt_tokens)
            if self._step_was_full:
                self._full_rate.count(ticket.prompt_tokens)
        self._all.remove(ticket)
        line = self._lines[ticket.tenant]
        line.remove(ticket)
        if not line.tickets:
            del self._lines[ticket.tenant]

    @property
    def waiting_requests(self) -> int:
        return len(self._all.tickets)

    @property
    def waiting_tokens(self) -> int:
        return self._all.tokens

    @property
    def is_full(self) -> bool:
        """Whether a request that arrives now will have to wait for others."""
        return self._passes_over(self._all)

    def _passes_over(self, line: _Line) -> bool:
        oldest = next(iter(line.tickets), None)
        return oldest is not None and self._steps - oldest.steps >= PASSED_OVER_STEPS

    def estimated_wait_s(self, tenant: str = "") -> float:
        """The expected wait of a request of this tenant that arrives now; 0 while nothing is known.
        Keys take turns: it waits for its own tenant's requests, and for those of others that have
        their turns in between."""
        self._pass_time()
        line = self._lines.get(tenant, _NOBODY)
        if not self._passes_over(line):
            return 0.0
        turns = self._turns_of_all(tenant)
        requests = min(self.waiting_requests, len(line.tickets) * turns)
        tokens = min(self.waiting_tokens, line.tokens * turns)
        return self._full_rate.wait_s(requests, tokens) or 0.0

    def _turns_of_all(self, tenant: str) -> float:
        """How many turns all waiting tenants have for each turn of this tenant."""
        own = self._weights.get(tenant, 1)
        others = sum(self._weights.get(each, 1) for each in self._lines if each != tenant)
        return (own + others) / own

    def _pass_time(self) -> None:
        now_s = self._clock()
        passed_s = now_s - self._at_s
        if passed_s <= 0:
            return
        self._at_s = now_s
        if self._all.tickets:
            self._any_rate.pass_time(passed_s)
        if self.is_full:
            self._full_rate.pass_time(passed_s)

    def _check_prompt(self, tokens: int) -> None:
        most = self._max_prompt_tokens
        if most is not None and tokens > most:
            raise ContextLengthError(
                f"The prompt has {tokens} tokens; this server takes at most {most}.",
                "Shorten the prompt, or start the server with a higher --max-prompt-tokens.",
                prompt_tokens=tokens,
                most_tokens=most,
            )

    def _check_room(self, tokens: int, tenant: str) -> None:
        # In an empty queue a prompt may be longer than the bound: it could never enter otherwise.
        if self.waiting_requests >= self._max_requests:
            reason, found = "waiting_requests", f"{self.waiting_requests} requests"
        elif self.waiting_requests and self.waiting_tokens + tokens > self._max_tokens:
            reason, found = "waiting_tokens", f"{self.waiting_tokens} prompt tokens"
        else:
            return
        line, most_requests, most_tokens = self._all, self._max_requests, self._max_tokens
        what = f"{found} are waiting already, and the queue is full."
        turns = 1.0
        if len(self._weights) > 1:
            line = self._lines.get(tenant, _NOBODY)
            most_requests, most_tokens = (
                self._share(tenant, each) for each in (most_requests, most_tokens)
            )
            if not line.tickets or (
                len(line.tickets) < most_requests and line.tokens + tokens <= most_tokens
            ):
                return
            # Says of other keys' requests only that there are some.
            what = (
                f"The queue is full, and this key has {len(line.tickets)} requests and "
                f"{line.tokens} prompt tokens in it; its share is {most_requests} requests and "
                f"{most_tokens} tokens."
            )
            turns = self._turns_of_all(tenant)
        first = line.first_to_leave(tokens, most_requests, most_tokens) * turns
        wait_s = self._full_rate.wait_s(first, 0)
        if wait_s is None:
            wait_s = self._any_rate.wait_s(first, 0)
        raise TooManyRequestsError(
            what,
            "Try again later, send less at a time, or start the server with a higher "
            f"--max-{reason.replace('_', '-')}.",
            retry_after_s=UNKNOWN_RETRY_S if wait_s is None else min(wait_s, LONGEST_RETRY_S),
        )

    def _share(self, tenant: str, whole: int) -> int:
        """A key's share of places beyond a full queue; all shares together are one more queue."""
        return max(1, whole * self._weights.get(tenant, 1) // sum(self._weights.values()))

    def _check_timeout(self, timeout_s: float | None, tenant: str) -> None:
        if timeout_s is None or (wait_s := self.estimated_wait_s(tenant)) <= timeout_s:
            return
        raise QueueTimeoutError(
            f"The wait is about {wait_s:.1f} s, and the request's timeout_s is {timeout_s:g}.",
            "Try again later, or with a longer timeout_s.",
            retry_after_s=min(wait_s - timeout_s, LONGEST_RETRY_S),
        )
