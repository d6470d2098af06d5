"""Whether a request may wait for its turn: bounds of the queue, and how long the wait would be.

Decides over a clock that is handed in. "Waiting" is from arrival until the engine has begun with a
request. Knows counts and times; neither HTTP nor the engine.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from types import TracebackType

from headrace.core.errors import (
    ContextLengthError,
    InvalidRequestError,
    QueueTimeoutError,
    TooManyRequestsError,
)
from headrace.core.request import GenerateRequest
from headrace.core.server_config import ServerConfig

MEMORY_S = 30.0  # how far back the rate looks, in seconds in which somebody waited
FEWEST_STARTS = 8  # before that many were seen nothing is known of the rate
UNKNOWN_RETRY_S = 1.0
LONGEST_RETRY_S = 600.0
# Requests of one step start together. A request that saw one step go by may have come too late for
# it; one that saw two was passed over, and so will be those behind it.
SAME_STEP_S = 0.002
PASSED_OVER_STEPS = 2


class Rate:
    """How fast requests, and their prompt tokens, leave the queue.

    All sums fade together, by the time that is counted: a pause in which nobody came says nothing
    about how fast the engine is.
    """

    def __init__(self) -> None:
        self._seen = 0
        self._starts = 0.0
        self._tokens = 0.0
        self._busy_s = 0.0

    def pass_time(self, busy_s: float) -> None:
        fade = math.exp(-busy_s / MEMORY_S)
        self._starts *= fade
        self._tokens *= fade
        # What is added fades too while it passes.
        self._busy_s = self._busy_s * fade + MEMORY_S * (1 - fade)

    def count(self, prompt_tokens: int) -> None:
        self._seen += 1
        self._starts += 1
        self._tokens += prompt_tokens

    def wait_s(self, requests: float, tokens: float) -> float | None:
        """How long until so many requests and so many tokens have left; None: not known."""
        if self._seen < FEWEST_STARTS:
            return None
        # In a queue that stands still both fade to nothing, and the wait grows beyond all bounds.
        starts, seen_tokens = max(self._starts, 1e-6), max(self._tokens, 1e-6)
        return self._busy_s * max(requests / starts, tokens / seen_tokens)


class Ticket:
    """A request's place. Leaving the `with` gives it up, wherever the request is."""

    def __init__(self, admission: Admission, prompt_tokens: int, steps: int) -> None:
        self._admission = admission
        self.prompt_tokens = prompt_tokens
        self.steps = steps  # that had begun with somebody when it came
        self.is_waiting = True

    def started(self) -> None:
        """The engine has begun with it. May be said twice."""
        if self.is_waiting:
            self.is_waiting = False
            self._admission.leave(self, has_started=True)

    def __enter__(self) -> Ticket:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if self.is_waiting:
            self.is_waiting = False
            self._admission.leave(self, has_started=False)


class Admission:
    def __init__(
        self,
        *,
        max_waiting_requests: int,
        max_waiting_tokens: int,
        max_prompt_tokens: int | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._max_requests = max_waiting_requests
        self._max_tokens = max_waiting_tokens
        self._max_prompt_tokens = max_prompt_tokens
        self._clock = clock
        self._at_s = clock()
        self._any_rate = Rate()  # while anybody waits: less than the engine could, if few do
        self._full_rate = Rate()  # while the engine takes nobody for lack of room
        self._waiting: dict[Ticket, None] = {}  # in order of arrival
        self._steps = 0
        self._step_s = -math.inf
        self._step_was_full = False  # up to the step whose starts are being told
        self.waiting_tokens = 0

    @classmethod
    def from_config(cls, config: ServerConfig) -> Admission:
        return cls(
            max_waiting_requests=config.max_waiting_requests,
            max_waiting_tokens=config.max_waiting_tokens,
            max_prompt_tokens=config.max_prompt_tokens,
        )

    def enter(self, request: GenerateRequest) -> Ticket:
        """A place in the queue, or the reason why there is none."""
        tokens = len(request.prompt_token_ids)
        self._pass_time()
        self._check_prompt(tokens)
        self._check_room(tokens)
        self._check_timeout(request.timeout_s)
        ticket = Ticket(self, tokens, self._steps)
        self._waiting[ticket] = None
        self.waiting_tokens += tokens
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
        del self._waiting[ticket]
        self.waiting_tokens -= ticket.prompt_tokens

    @property
    def waiting_requests(self) -> int:
        return len(self._waiting)

    @property
    def is_full(self) -> bool:
        """Whether whoever comes now will have to wait for others."""
        oldest = next(iter(self._waiting), None)
        return oldest is not None and self._steps - oldest.steps >= PASSED_OVER_STEPS

    def estimated_wait_s(self) -> float:
        """Of a request that came now; 0 as long as nothing is known."""
        self._pass_time()
        if not self.is_full:
            return 0.0
        return self._full_rate.wait_s(self.waiting_requests, self.waiting_tokens) or 0.0

    def _pass_time(self) -> None:
        now_s = self._clock()
        passed_s = now_s - self._at_s
        if passed_s <= 0:
            return
        self._at_s = now_s
        if self._waiting:
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

    def _check_room(self, tokens: int) -> None:
        # Alone, a prompt may be longer than the bound: it would never get in otherwise.
        if self.waiting_requests >= self._max_requests:
            reason, found = "waiting_requests", f"{self.waiting_requests} requests"
        elif self.waiting_requests and self.waiting_tokens + tokens > self._max_tokens:
            reason, found = "waiting_tokens", f"{self.waiting_tokens} prompt tokens"
        else:
            return
        first = self._first_to_leave(tokens)
        wait_s = self._full_rate.wait_s(first, 0)
        if wait_s is None:
            wait_s = self._any_rate.wait_s(first, 0)
        raise TooManyRequestsError(
            f"{found} are waiting already, which is as many as this server lets wait.",
            "Try again later, send less at a time, or start the server with a higher "
            f"--max-{reason.replace('_', '-')}.",
            retry_after_s=UNKNOWN_RETRY_S if wait_s is None else min(wait_s, LONGEST_RETRY_S),
        )

    def _first_to_leave(self, tokens: int) -> int:
        """How many of those who wait must leave before a prompt of so many tokens gets in."""
        requests, left = self.waiting_requests, self.waiting_tokens
        for count, ticket in enumerate(self._waiting):
            if requests < self._max_requests and left + tokens <= self._max_tokens:
                return count
            requests -= 1
            left -= ticket.prompt_tokens
        return self.waiting_requests

    def _check_timeout(self, timeout_s: float | None) -> None:
        if timeout_s is None:
            return
        if timeout_s <= 0:
            raise InvalidRequestError(
                f"timeout_s is {timeout_s:g}; expected a number of seconds above 0.",
                "Use timeout_s above 0, or leave it out.",
                param="timeout_s",
            )
        if (wait_s := self.estimated_wait_s()) <= timeout_s:
            return
        raise QueueTimeoutError(
            f"The wait is about {wait_s:.1f} s, and the request's timeout_s is {timeout_s:g}.",
            "Try again later, or with a longer timeout_s.",
            retry_after_s=min(wait_s - timeout_s, LONGEST_RETRY_S),
        )
