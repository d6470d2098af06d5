"""What is known about one request from its arrival to its end; watchers read it.

Metrics, logs and traces are watchers. Times are of time.monotonic(). Knows no text but what
`prompt` and `answer` hold, which stay empty unless content is to be logged.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Protocol

from headrace.core.errors import HeadraceError


@dataclass(slots=True, kw_only=True)
class RequestRecord:
    request_id: str  # the HTTP request's
    endpoint: str  # such as /v1/chat/completions
    arrived_s: float
    prompt_tokens: int
    n: int = 1
    max_tokens: int | None = None
    key_name: str | None = None
    traceparent: str | None = None  # the header, if the client sent one
    started_s: float | None = None  # left the queue
    waited_s: float | None = None  # in the engine's queue, by the engine's clock
    cached_tokens: int = 0
    first_token_s: float | None = None
    last_token_s: float | None = None
    output_tokens: int = 0
    reserved_tokens: int = 0  # reserved of its key's limit for tokens yet to be generated
    right_guesses: int = 0  # tokens that were guessed and checked in a step (speculate/)
    wrong_guesses: int = 0
    continuation_tokens: dict[int, int] = field(default_factory=dict)  # of each, where n > 1
    ended_s: float | None = None
    finish_reason: str | None = None  # of the last continuation; "error", "abort" too
    error: str | None = None
    is_cut_by_context: bool = False  # no max_tokens was given, and the context was full
    prompt: str = ""
    answer: str = ""

    @property
    def longest_tokens(self) -> int:
        """Of the longest continuation."""
        return max(self.continuation_tokens.values(), default=self.output_tokens)


@dataclass(slots=True, kw_only=True)
class HttpRecord:
    """One HTTP request and its answer, when that is over."""

    request_id: str
    method: str
    # The path in server/api/routes.py; "other" for unknown ones, so that clients can't add values.
    route: str
    status: int  # 499: the client disconnected before there was one
    arrived_s: float
    ended_s: float
    key_name: str | None = None
    traceparent: str | None = None
    tracestate: str | None = None
    error: HeadraceError | None = None  # sent as the answer, or at the end of a stream
    requests: list[RequestRecord] = field(default_factory=list)  # its engine requests
    ignored_fields: list[str] = field(default_factory=list)  # of its body, as the client wrote them


class HttpWatcher(Protocol):
    """Called in the event loop: must be quick, and must not raise."""

    def on_http(self, record: HttpRecord) -> None: ...


class Watcher(Protocol):
    """Called in the event loop: must be quick, and must not raise."""

    def on_arrival(self, record: RequestRecord) -> None: ...

    def on_start(self, record: RequestRecord) -> None:
        """It left the queue: started_s, waited_s, cached_tokens are known."""
        ...

    def on_tokens(self, record: RequestRecord, count: int, gap_s: float | None) -> None:
        """`count` tokens arrived at record.last_token_s, `gap_s` after the previous ones (None:
        they are the first)."""
        ...

    def on_end(self, record: RequestRecord) -> None: ...
