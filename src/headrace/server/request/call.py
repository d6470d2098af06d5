"""One HTTP request being answered, and the kinds of answers. The endpoints' view of HTTP.

An endpoint is `async (service, call) -> Reply`. It reads `call`, and raises HeadraceError for
what it can't do; server/edge/app.py reads and writes the bytes.
"""

from __future__ import annotations

import asyncio
import re
import time
import uuid
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field

import msgspec

from headrace.core.errors import AuthenticationError, HeadraceError, RetryLaterError
from headrace.server.access.limits import Reservation
from headrace.server.observe.record import RequestRecord
from headrace.server.request.error_payload import error_payload, retry_after
from headrace.server.request.service import Service

SANE_ID = re.compile(r"[A-Za-z0-9][A-Za-z0-9._:/+=@-]{0,127}")

MAX_WARNING_CHARACTERS = 1000  # in the header: proxies allow a few thousand for all headers
LIST_PART = 256  # entries per part of a list that is encoded in parts: a few milliseconds at most
_UNSAFE = re.compile(r"[^\x20-\x7e]")

Headers = Mapping[str, str]
encode_json = msgspec.json.encode


class NotFoundError(HeadraceError):
    status = 404


class MethodError(HeadraceError):
    """The path exists; `allowed` are the methods that it supports."""

    status = 405

    def __init__(self, cause: str, remedy: str, allowed: Sequence[str]) -> None:
        super().__init__(cause, remedy)
        self.allowed = allowed


@dataclass(frozen=True, slots=True, kw_only=True)
class ErrorShape:
    """How errors look to the clients of an endpoint."""

    payload: Callable[[HeadraceError, str], object]  # from an error and the request's id
    event: Callable[[HeadraceError, str], bytes]  # the same, in a stream that has begun
    reply_type: type[msgspec.Struct] | None = None  # of the payload; None: server/api/openapi.py's
    id_header: str | None = None  # carries the request's id too, besides x-request-id


def _openai_event(error: HeadraceError, request_id: str) -> bytes:
    return error_event(error)


def _openai_payload(error: HeadraceError, request_id: str) -> object:
    return error_payload(error)


OPENAI_ERRORS = ErrorShape(payload=_openai_payload, event=_openai_event)


@dataclass(slots=True, kw_only=True)
class Call:
    method: str
    path: str
    headers: Headers  # names in lower case
    request_id: str
    arrived_s: float = field(default_factory=time.monotonic)
    query: str = ""
    body: bytes = b""  # empty once it was decoded
    body_bytes: int = 0  # its size
    key_name: str | None = None
    is_operators: bool = False  # the caller may see data about everybody's requests
    route: str = "other"  # the path as in server/api/routes.py, once it was found
    error_shape: ErrorShape = OPENAI_ERRORS
    error: HeadraceError | None = None  # sent as the answer, or at the end of a stream
    records: list[RequestRecord] = field(default_factory=list)  # its engine requests
    reply_headers: dict[str, str] = field(default_factory=dict)  # sent with any answer
    warnings: list[str] = field(default_factory=list)  # sent as a header
    warned_characters: int = 0
    refuses_unknown: bool = False  # whether unknown fields are refused (--unknown-fields)
    ignored_fields: list[str] = field(default_factory=list)  # unknown ones, for the log
    reservation: Reservation | None = None  # of its key's limits
    # Held while a large body is decoded: pieces of several at once would delay other requests.
    large_turn: asyncio.Lock | None = None

    def warn(self, text: str) -> None:
        """Warnings that no longer fit into the header are dropped."""
        if self.warned_characters <= MAX_WARNING_CHARACTERS:
            self.warnings.append(text)
            self.warned_characters += len(text) + 2

    def warning_header(self) -> str:
        """All warnings in one line, valid as a header."""
        text = "; ".join(self.warnings)
        if len(text) > MAX_WARNING_CHARACTERS:
            text = text[:MAX_WARNING_CHARACTERS] + " ... and more"
        return _UNSAFE.sub("?", text)


@dataclass(slots=True, kw_only=True)
class Reply:
    body: bytes
    status: int = 200
    content_type: str = "application/json"
    headers: dict[str, str] = field(default_factory=dict)


@dataclass(slots=True, kw_only=True)
class StreamReply:
    """Server-sent events: each item holds complete events."""

    chunks: AsyncIterator[bytes]
    headers: dict[str, str] = field(default_factory=dict)


AnyReply = Reply | StreamReply
Endpoint = Callable[[Service, Call], Awaitable[AnyReply]]


def json_reply(payload: object, status: int = 200) -> Reply:
    return Reply(body=encode_json(payload), status=status)


def encode_list(values: Sequence[object]) -> bytes:
    """A list of any length as JSON, without its brackets; encoded in parts, so that other threads
    can run in between."""
    parts = [values[at : at + LIST_PART] for at in range(0, len(values), LIST_PART)]
    return b",".join([encode_json(part)[1:-1] for part in parts])


def new_id(prefix: str) -> str:
    return f"{prefix}-{uuid.uuid4().hex}"


def request_id_of(headers: Headers) -> str:
    """The client's id if it is safe in a header and a log line; else a new one."""
    sent = headers.get("x-request-id", "")
    return sent if SANE_ID.fullmatch(sent) else new_id("req")


def take_request_id(call: Call, sent: str | None) -> None:
    """vLLM's field for the request's id; the x-request-id header wins over it."""
    if sent is None or "x-request-id" in call.headers:
        return
    if SANE_ID.fullmatch(sent):
        call.request_id = sent
    else:
        call.warn("request_id is not valid in a header and was ignored")


def error_reply(
    error: HeadraceError, shape: ErrorShape = OPENAI_ERRORS, request_id: str = ""
) -> Reply:
    reply = json_reply(shape.payload(error, request_id), error.status)
    if isinstance(error, RetryLaterError):
        reply.headers["retry-after"] = retry_after(error)
    if isinstance(error, AuthenticationError):
        reply.headers["www-authenticate"] = "Bearer"
    if isinstance(error, MethodError):
        reply.headers["allow"] = ", ".join(error.allowed)
    return reply


def error_event(error: HeadraceError) -> bytes:
    """The last event of a stream that fails: its status line was sent long before."""
    return b"data: " + encode_json(error_payload(error, status=error.status)) + b"\n\n"
