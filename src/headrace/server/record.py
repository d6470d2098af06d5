"""What is known about one request from its arrival to its end; whoever watches reads it.

Metrics, logs and traces are watchers. Times are of time.monotonic(). Knows no text but what
`prompt` and `answer` hold, which stay empty unless content is to be logged.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol


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
    ended_s: float | None = None
    finish_reason: str | None = None  # of the last continuation; "error", "abort" too
    error: str | None = None
    prompt: str = ""
    answer: str = ""


class Watcher(Protocol):
    """Called in the event loop: must be quick, and must not raise."""

    def on_arrival(self, record: RequestRecord) -> None: ...

    def on_start(self, record: RequestRecord) -> None:
        """It left the queue: started_s, waited_s, cached_tokens are known."""
        ...

    def on_tokens(self, record: RequestRecord, count: int, gap_s: float | None) -> None:
        """`count` tokens came at record.last_token_s, `gap_s` after those before them (None: they
        are the first)."""
        ...

    def on_end(self, record: RequestRecord) -> None: ...
