"""Errors in Anthropic's shape, for the endpoints that speak it. Knows errors; no endpoint."""

from __future__ import annotations

from typing import Literal

import msgspec

from headrace.core.errors import ContextLengthError, HeadraceError
from headrace.server.request.call import ErrorShape, encode_json

_KINDS = {
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    413: "request_too_large",
    429: "rate_limit_error",
    503: "overloaded_error",
}


class MessagesErrorDetail(msgspec.Struct):
    type: str
    message: str


class MessagesErrorReply(msgspec.Struct):
    """Every error of these endpoints, in Anthropic's shape."""

    error: MessagesErrorDetail
    request_id: str
    type: Literal["error"] = "error"


def messages_error(error: HeadraceError, request_id: str) -> MessagesErrorReply:
    kind = _KINDS.get(error.status, "api_error" if error.status >= 500 else "invalid_request_error")
    return MessagesErrorReply(MessagesErrorDetail(kind, _words(error)), request_id)


def messages_error_event(error: HeadraceError, request_id: str) -> bytes:
    return b"event: error\ndata: %b\n\n" % encode_json(messages_error(error, request_id))


def _words(error: HeadraceError) -> str:
    """Anthropic's own wording, which Claude Code looks for to compact its conversation."""
    if not isinstance(error, ContextLengthError):
        return str(error)
    if error.prompt_tokens is None or error.most_tokens is None:
        return f"prompt is too long: {error}"
    return f"prompt is too long: {error.prompt_tokens} tokens > {error.most_tokens} maximum"


MESSAGES_ERRORS = ErrorShape(
    payload=messages_error,
    event=messages_error_event,
    reply_type=MessagesErrorReply,
    id_header="request-id",
)
