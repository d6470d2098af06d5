"""One log line per HTTP request, at its end: what it asked for, its times, and the result.

Has the route instead of the path and counts instead of texts: a prompt can't get into it unless
--log-content is set. Knows records; logs.py writes the lines.
"""

from __future__ import annotations

import functools
import logging
import re
from typing import Any

import msgspec

from headrace.core.errors import HeadraceError
from headrace.server.observe.metrics import is_refusal, refusal_reason, time_per_output_token_s
from headrace.server.observe.record import HttpRecord, RequestRecord
from headrace.server.observe.sparing_log import SparingLog
from headrace.server.request.inert import OTHERS
from headrace.server.request.schema import (
    IGNORED,
    DetokenizeRequest,
    EmbeddingRequest,
    StreamOptions,
    TokenizeRequest,
)

# Requested so often, by machines, that they would flood the log.
QUIET_ROUTES = frozenset({"/health", "/ready", "/load", "/metrics", "/history", "/diagnosis"})

log = logging.getLogger("headrace.server.requests")

REFUSALS_PER_S = 20  # lines per status, for refused requests without a key
MAX_IGNORED = 16  # names of unknown fields in a line

_WORD = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")
_OTHER_KINDS = (EmbeddingRequest, TokenizeRequest, DetokenizeRequest, StreamOptions)
# Field names of what has no struct: messages, their parts, tools and response formats.
_NESTED = frozenset(
    {
        *("role", "content", "type", "text", "name", "refusal", "tool_calls", "tool_call_id"),
        *("function", "arguments", "parameters", "description", "strict", "allowed_tools", "mode"),
        *("format", "schema", "json", "json_object", "regex", "choice", "call_id", "output", "id"),
        *("input_schema", "tool_use_id", "disable_parallel_tool_use", "stream", "limit", "order"),
        *("after",),
    }
)
_FIELD_NAME = re.compile(r"[A-Za-z0-9_.\[\]]{1,64}")


class RequestLog:
    """One line for each HTTP request at its end."""

    def __init__(self, show_content: bool = False) -> None:
        self._show_content = show_content
        self._sparing = SparingLog(log, REFUSALS_PER_S)

    def on_http(self, record: HttpRecord) -> None:
        quiet = record.route in QUIET_ROUTES and record.status != 500
        level = logging.DEBUG if quiet else logging.INFO
        if not log.isEnabledFor(level):
            return
        left_out = self._sparing.allow(str(record.status)) if _is_strangers(record) else 0
        if left_out is None:
            return
        took_s = record.ended_s - record.arrived_s
        # The route, since the path is text from the client.
        log.log(
            level,
            "%s %s %d in %.3f s",
            record.method if record.method.isalpha() else "?",
            record.route,
            record.status,
            took_s,
            extra={
                "event": "request",
                "request_id": record.request_id,
                "endpoint": record.route,
                "status": record.status,
                "key": record.key_name,
                "e2e_s": round(took_s, 6),
                **({"left_out": left_out} if left_out else {}),
                **_error_fields(record.error, show_names=self._show_content),
                **_ignored_fields(record.ignored_fields, show_names=self._show_content),
                **_work_fields(record.requests),
                **(_content_fields(record.requests) if self._show_content else {}),
            },
        )


def _is_strangers(record: HttpRecord) -> bool:
    """Refused early and without a valid key: there may be very many of these."""
    refused = record.error is not None and is_refusal(record.error)
    return refused and record.key_name is None and not record.requests


def _error_fields(error: HeadraceError | None, *, show_names: bool) -> dict[str, Any]:
    if error is None:
        return {}
    fields: dict[str, Any] = {"error": refusal_reason(error)}
    if error.param and _FIELD_NAME.fullmatch(error.param):
        fields["param"] = error.param if show_names else _known_words(error.param)
    # The message of such an error quotes the wrong value: it goes to the client, not into the log.
    if not is_refusal(error) or error.status >= 429:
        fields["cause"] = error.cause
    return fields


def _ignored_fields(names: list[str], *, show_names: bool) -> dict[str, Any]:
    """Names are text from the client: their number, or, with --log-content, those that could be
    field names."""
    if not names:
        return {}
    if not show_names:
        return {"ignored_fields": len(names)}
    shown = [name if _FIELD_NAME.fullmatch(name) else "?" for name in names[:MAX_IGNORED]]
    return {"ignored_fields": ",".join(shown) + (",..." if len(names) > MAX_IGNORED else "")}


def _known_words(param: str) -> str:
    """The path without names that the client chose, such as those of a schema's fields."""
    return _WORD.sub(lambda word: word[0] if word[0] in _known_names() else "?", param)


@functools.cache
def _known_names() -> frozenset[str]:
    kinds: list[type[msgspec.Struct]] = [
        *IGNORED,
        *_OTHER_KINDS,
    ]  # all subclasses are imported by now
    return frozenset(
        {*_NESTED, *(name for kind in kinds for name in kind.__struct_fields__), *OTHERS}
    )


def _work_fields(requests: list[RequestRecord]) -> dict[str, Any]:
    """Sums over the engine requests of one HTTP request; for times, the longest."""
    if not requests:
        return {}
    times = {
        "queue_s": [_between(r.arrived_s, r.started_s, r.waited_s) for r in requests],
        "ttft_s": [_between(r.arrived_s, r.first_token_s) for r in requests],
        "tpot_s": [time_per_output_token_s(r) for r in requests],
    }
    return {
        "finish_reason": ",".join(sorted({r.finish_reason or "none" for r in requests})),
        **({"cut_by": "context"} if any(r.is_cut_by_context for r in requests) else {}),
        "prompt_tokens": sum(r.prompt_tokens for r in requests),
        "cached_tokens": sum(r.cached_tokens for r in requests),
        "output_tokens": sum(r.output_tokens for r in requests),
        **{
            name: round(max(s for s in found if s is not None), 6)
            for name, found in times.items()
            if any(s is not None for s in found)
        },
    }


def _content_fields(requests: list[RequestRecord]) -> dict[str, Any]:
    return {
        "prompt": [r.prompt for r in requests],
        "answer": [r.answer for r in requests],
    }


def _between(start_s: float, end_s: float | None, known_s: float | None = None) -> float | None:
    if known_s is not None or end_s is None:
        return known_s
    return max(0.0, end_s - start_s)
