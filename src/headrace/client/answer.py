"""One answer as it arrives: server-sent events of OpenAI's endpoints, each with its time.

Bytes and times go in, and what a person would see comes out: when tokens came, what they said, and
how many they were. An error within a stream is an error. Knows no sockets and no clock, so that
tests give both.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any

import msgspec

_SHOWN = 200
_HIDDEN = ("reasoning_content", "reasoning")  # text that is no part of the visible answer


class Failure(StrEnum):
    """Why a request has no whole answer."""

    CONNECT = "connection refused"
    RESET = "connection lost"
    TIMEOUT = "timeout"
    RATE_LIMITED = "rate limited (429)"
    HTTP = "HTTP status"
    REDIRECT = "redirect"
    NOT_HTTP = "not HTTP"
    NO_STREAM = "did not stream"
    IN_STREAM = "error in the stream"
    CUT = "stream ended early"
    EMPTY = "no token"
    STOPPED = "cut off by the user"


@dataclass(slots=True)
class Answer:
    """Times are the caller's clock. A chunk may carry several tokens, or none that is text."""

    times_s: list[float] = field(default_factory=list)  # of every chunk with text
    chars: list[int] = field(default_factory=list)  # of each of these chunks
    counts: list[int] = field(default_factory=list)  # its tokens; 0: the chunk does not say
    text: list[str] = field(default_factory=list)  # visible
    hidden: list[str] = field(default_factory=list)  # reasoning
    visible_s: float | None = None  # the first visible text
    ended_s: float | None = None  # its last bytes, or those by which it failed
    token_ids: list[int] = field(default_factory=list)
    prompt_tokens: int | None = None
    cached_tokens: int | None = None
    output_tokens: int | None = None
    reasoning_tokens: int | None = None  # they are part of output_tokens
    finish: str | None = None
    is_done: bool = False  # [DONE] came
    failure: Failure | None = None
    detail: str = ""
    _rest: bytes = b""
    _data: list[bytes] = field(default_factory=list)
    _event: bytes = b""

    def feed(self, data: bytes, at_s: float) -> None:
        """Bytes of the body that arrived at this time."""
        lines = (self._rest + data if self._rest else data).split(b"\n")
        self._rest = lines.pop()
        for line in lines:
            if line.endswith(b"\r"):
                line = line[:-1]
            if line.startswith(b"data:"):
                self._data.append(line[5:].lstrip(b" "))
            elif not line:
                self._dispatch(at_s)
            elif line.startswith(b"event:"):
                self._event = line[6:].strip()

    def end(self, at_s: float) -> None:
        """No more bytes: what an endpoint did not end by an empty line still counts."""
        if self._rest:
            self.feed(b"\n", at_s)
        self._dispatch(at_s)
        if self.failure is not None:
            return
        if not self.is_done and self.finish is None:
            self.fail(Failure.CUT, "the stream ended without a finish_reason and without [DONE]")
        elif not self.times_s:
            self.fail(Failure.EMPTY, "the answer has no token")

    def fail(self, failure: Failure, detail: str) -> None:
        """The first failure is the cause; what came before it is kept."""
        if self.failure is None:
            self.failure, self.detail = failure, " ".join(detail.split())[:_SHOWN]

    def _dispatch(self, at_s: float) -> None:
        if not self._data:
            self._event = b""
            return
        data, event = b"\n".join(self._data), self._event
        self._data, self._event = [], b""
        if data == b"[DONE]":
            self.is_done = True
            return
        try:
            chunk = msgspec.json.decode(data)
        except msgspec.DecodeError:
            self.fail(Failure.IN_STREAM, f"a chunk is not JSON: {data[:_SHOWN]!r}")
            return
        if event == b"error" or not isinstance(chunk, dict) or chunk.get("error"):
            self.fail(Failure.IN_STREAM, message_of(chunk))
            return
        try:
            self._take(chunk, at_s)
        except (AttributeError, TypeError):
            self.fail(
                Failure.IN_STREAM, f"a chunk has another form than OpenAI's: {data[:_SHOWN]!r}"
            )

    def _take(self, chunk: Mapping[str, Any], at_s: float) -> None:
        for choice in chunk.get("choices") or ():
            delta = choice.get("delta")
            if delta is None:
                text, hidden, other = choice.get("text") or "", "", 0
            else:
                text = delta.get("content") or ""
                hidden = next((found for key in _HIDDEN if (found := delta.get(key))), "")
                other = _tool_chars(delta.get("tool_calls"))
            if text:
                self.text.append(text)
                if self.visible_s is None:
                    self.visible_s = at_s
            if hidden:
                self.hidden.append(hidden)
            ids = choice.get("token_ids") or ()
            self.token_ids += ids
            if text or hidden or other:
                self.times_s.append(at_s)
                self.chars.append(len(text) + len(hidden) + other)
                self.counts.append(len(ids))
            self.finish = choice.get("finish_reason") or self.finish
        if usage := chunk.get("usage"):
            self._count(usage)

    def _count(self, usage: Mapping[str, Any]) -> None:
        self.prompt_tokens = _whole(usage.get("prompt_tokens"), self.prompt_tokens)
        self.output_tokens = _whole(usage.get("completion_tokens"), self.output_tokens)
        details = usage.get("prompt_tokens_details")
        if isinstance(details, Mapping):
            self.cached_tokens = _whole(details.get("cached_tokens"), self.cached_tokens)
        details = usage.get("completion_tokens_details")
        if isinstance(details, Mapping):
            self.reasoning_tokens = _whole(details.get("reasoning_tokens"), self.reasoning_tokens)


def message_of(body: Any) -> str:
    """What an error says, whatever form it has."""
    if isinstance(body, bytes):
        try:
            body = msgspec.json.decode(body)
        except msgspec.DecodeError:
            return " ".join(body.decode("utf-8", "replace").split())[:_SHOWN]
    if isinstance(body, Mapping):
        body = body.get("error") or body.get("detail") or body.get("message") or body
        if isinstance(body, Mapping):
            body = body.get("message") or body
    return " ".join(str(body).split())[:_SHOWN]


def _tool_chars(calls: Any) -> int:
    """A call's name and arguments are tokens of the answer too."""
    if not calls:
        return 0
    functions = [call.get("function") or {} for call in calls]
    return sum(len(one.get("name") or "") + len(one.get("arguments") or "") for one in functions)


def _whole(value: Any, otherwise: int | None) -> int | None:
    is_count = isinstance(value, int) and not isinstance(value, bool) and value >= 0
    return value if is_count else otherwise
