"""Whether a request may wait for its turn: bounds of the queue, and how long the wait would be.

Decides over a clock that is handed in. "Waiting" is from arrival until the engine has begun with a
request. Knows counts and times; neither HTTP nor the engine.
"""

from __future__ import annotations

import math
import time
from collections import Counter
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
FEWEST_STARTS = 3  # before that many were seen nothing is known of the rate
UNKNOWN_RETRY_S = 1.0
LONGEST_RETRY_S = 600.0


class Rate:
    """How fast requests, and their prompt tokens, leave the queue while there is one.

    Both sums fade together, by the time in which somebody waited: a pause in which nobody came
    says nothing about how fast the engine is.
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

    def __init__(self, admission: Admission, prompt_tokens: int) -> None:
        self._admission = admission
        self.prompt_tokens = prompt_tokens
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
        self._rate = Rate()
        self._at_s = clock()
        self.waiting_requests = 0
        self.waiting_tokens = 0
        self.refused: Counter[str] = Counter()  # by reason, since the server began

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
        self.waiting_requests += 1
        self.waiting_tokens += tokens
        return Ticket(self, tokens)

    def leave(self, ticket: Ticket, *, has_started: bool) -> None:
        self._pass_time()
        if has_started:
            self._rate.count(ticket.prompt_tokens)
        self.waiting_requests -= 1
        self.waiting_tokens -= ticket.prompt_tokens

    def estimated_wait_s(self) -> float:
        """Of a request that came now; 0 as long as nothing is known."""
        self._pass_time()
        if not self.waiting_requests:
            return 0.0
        return self._rate.wait_s(self.waiting_requests, self.waiting_tokens) or 0.0

    def _pass_time(self) -> None:
        now_s = self._clock()
        if self.waiting_requests and now_s > self._at_s:
            self._rate.pass_time(now_s - self._at_s)
        self._at_s = max(self._at_s, now_s)

    def _check_prompt(self, tokens: int) -> None:
        most = self._max_prompt_tokens
        if most is not None and tokens > most:
            self.refused["prompt_tokens"] += 1
            raise ContextLengthError(
                f"The prompt has {tokens} tokens; this server takes at most {most}.",
                "Shorten the prompt, or start the server with a higher --max-prompt-tokens.",
            )

    def _check_room(self, tokens: int) -> None:
        # Alone, a prompt may be longer than the bound: it would never get in otherwise.
        over = self.waiting_tokens + tokens - self._max_tokens if self.waiting_requests else 0
        if self.waiting_requests >= self._max_requests:
            reason, found = "waiting_requests", f"{self.waiting_requests} requests"
        elif over > 0:
            reason, found = "waiting_tokens", f"{self.waiting_tokens} prompt tokens"
        else:
            return
        self.refused[reason] += 1
        excess = self.waiting_requests + 1 - self._max_requests
        wait_s = self._rate.wait_s(max(excess, 0), max(over, 0))
        raise TooManyRequestsError(
            f"{found} are waiting already, which is as many as this server lets wait.",
            "Try again later, send less at a time, or start the server with a higher "
            f"--max-{reason.replace('_', '-')}.",
            retry_after_s=UNKNOWN_RETRY_S if wait_s is None else min(wait_s, LONGEST_RETRY_S),
        )

    def _check_timeout(self, timeout_s: float | None) -> None:
        if timeout_s is None:
            return
        if timeout_s <= 0:
            raise InvalidRequestError(
                f"timeout_s is {timeout_s:g}; expected a number of seconds above 0.",
                "Set timeout_s accordingly.",
                param="timeout_s",
            )
        if (wait_s := self.estimated_wait_s()) <= timeout_s:
            return
        self.refused["timeout"] += 1
        raise QueueTimeoutError(
            f"The wait is about {wait_s:.1f} s, and the request's timeout_s is {timeout_s:g}.",
            "Try again later, or with a longer timeout_s.",
            retry_after_s=min(wait_s - timeout_s, LONGEST_RETRY_S),
        )
