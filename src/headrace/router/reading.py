"""Reads requests from a client's bytes, within all bounds: how much, how many, how slow.

A request's body is read to its end. Knows HTTP requests; front.py has the connection, and what
becomes of a request.
"""

from __future__ import annotations

import time
import uuid
from collections.abc import Callable
from typing import TYPE_CHECKING, Protocol

import httptools

from headrace.core.errors import HeadraceError, PayloadTooLargeError, UnavailableError
from headrace.router.request import Request
from headrace.server.edge.http_head import check_host

if TYPE_CHECKING:
    from headrace.router.front import Edge

MAX_HEADER_LINES = 256
FEW_CHUNKS, LEAST_CHUNK_BYTES = 4096, 64  # of a body: a chunk costs as much time as 200 bytes
LEAST_BYTES_S = 32 << 10  # a body that arrives faster than this is never too slow
_CONTINUE = b"HTTP/1.1 100 Continue\r\n\r\n"


class MalformedHttpError(HeadraceError):
    status = 400


class HeadersTooLargeError(HeadraceError):
    status = 431


class HttpVersionError(HeadraceError):
    status = 505


class Sender(Protocol):
    """Whose bytes are read."""

    write: Callable[[bytes], None]
    is_deaf: bool  # nothing more is read
    deadline_s: float
    host: str

    @property
    def is_answering(self) -> bool: ...

    @property
    def is_busy(self) -> bool:
        """Answers, or has more to answer."""
        ...

    def accept(self, request: Request) -> None: ...

    def reject(self, error: HeadraceError) -> None: ...


class RequestReader:
    def __init__(self, edge: Edge, client: Sender) -> None:
        self._edge, self._client = edge, client
        self._body_bytes = 0
        self._parser = httptools.HttpRequestParser(self)
        self.in_message = False
        self._messages = 0
        self._new_message()

    def feed(self, data: bytes) -> None:
        if self._client.is_deaf:
            return
        before = self._messages
        try:
            self._parser.feed_data(data)
        except httptools.HttpParserUpgrade:
            self._client.reject(MalformedHttpError("Upgrades are not supported.", "Send HTTP/1.1."))
            return
        except httptools.HttpParserError as error:
            self._client.reject(_malformed(error, data))
            return
        # What came together with the end of another request is not counted: it is short.
        if self.in_message and self._in_headers and (self._messages == before or before == 0):
            self._header_bytes += len(data)
            if self._header_bytes > self._edge.settings.max_headers_bytes:
                self._client.reject(
                    _headers_too_large(f"{self._edge.settings.max_headers_bytes} bytes")
                )

    def forget_body(self) -> None:
        """Of a request that is not whole."""
        self._edge.bodies_bytes -= self._body_bytes
        self._body.clear()
        self._body_bytes = 0

    # -- what llhttp calls -----------------------------------------------------------------------

    def _new_message(self) -> None:
        self._url = b""
        self._headers: list[tuple[bytes, bytes]] = []
        self._body: list[bytes] = []
        self._body_bytes = 0
        self._in_headers = True
        self._header_bytes = 0

    def on_message_begin(self) -> None:
        self._new_message()
        self._messages += 1
        self.in_message = True
        if not self._client.is_busy:
            self._client.deadline_s = time.monotonic() + self._edge.settings.client_timeout_s

    def on_url(self, url: bytes) -> None:
        self._url += url

    def on_header(self, name: bytes, value: bytes) -> None:
        if self._in_headers and not self._client.is_deaf:  # trailers are ignored
            self._headers.append((name.lower(), value))
            if len(self._headers) > MAX_HEADER_LINES:
                self._client.reject(_headers_too_large(f"{MAX_HEADER_LINES} lines"))

    def on_headers_complete(self) -> None:
        if self._client.is_deaf:
            return
        self._in_headers = False
        version = self._parser.get_http_version()
        check_host(version, self._headers)
        if version != "1.1":
            self._client.reject(
                HttpVersionError(f"This is HTTP/{version}.", "The router speaks HTTP/1.1: use it.")
            )
            return
        for name, value in self._headers:
            if name == b"content-length" and int(value) > self._edge.settings.max_body_bytes:
                self._client.reject(self._too_large())
            elif (
                name == b"expect"
                and value.lower() == b"100-continue"
                and not self._client.is_answering
            ):
                self._client.write(_CONTINUE)

    def on_body(self, body: bytes) -> None:
        if self._client.is_deaf:
            return
        edge = self._edge
        self._body.append(body)
        self._body_bytes += len(body)
        edge.bodies_bytes += len(body)
        if not self._client.is_answering:
            # A body may take as long as it keeps arriving.
            later_s = self._client.deadline_s + len(body) / LEAST_BYTES_S
            self._client.deadline_s = min(
                later_s, time.monotonic() + edge.settings.client_timeout_s
            )
        if self._body_bytes > edge.settings.max_body_bytes:
            self._client.reject(self._too_large())
        elif len(self._body) > FEW_CHUNKS + self._body_bytes // LEAST_CHUNK_BYTES:
            self._client.reject(
                MalformedHttpError(f"{len(self._body)} chunks of a few bytes.", "Send larger ones.")
            )
        elif edge.bodies_bytes > edge.settings.max_bodies_bytes:
            self._client.reject(
                UnavailableError(
                    "The bodies of all requests together have reached the router's limit of "
                    f"{edge.settings.max_bodies_bytes} bytes.",
                    "Try again shortly, or start it with a higher --max-bodies.",
                    retry_after_s=1.0,
                )
            )

    def on_message_complete(self) -> None:
        if self._client.is_deaf:
            return
        self.in_message = False
        self._in_headers = True
        self._header_bytes = 0
        try:
            path = httptools.parse_url(self._url).path
        except httptools.HttpParserInvalidURLError:
            path = None
        if path is None or not path.startswith(b"/") or not self._url.startswith(b"/"):
            self._client.reject(
                MalformedHttpError("The target is no path.", "Send a path such as /v1.")
            )
            return
        request = Request(
            method=self._parser.get_method(),
            target=self._url,
            path=path.decode("latin-1"),
            version="1.1",
            keep_alive=self._parser.should_keep_alive(),
            headers=self._headers,
            body=self._body[0] if len(self._body) == 1 else b"".join(self._body),
            arrived_s=time.perf_counter(),
            request_id=_request_id(self._headers),
            client_host=self._client.host,
        )
        self._body, self._body_bytes = [], 0  # counted with the request from here on
        self._client.accept(request)

    def _too_large(self) -> PayloadTooLargeError:
        most = self._edge.settings.max_body_bytes
        return PayloadTooLargeError(
            f"The body has more bytes than the router's limit of {most}.",
            "Send less, or start the router with a higher --max-body.",
        )


def _malformed(error: httptools.HttpParserError, data: bytes) -> MalformedHttpError:
    cause = str(error.__context__ or error).rstrip(".")
    text, remedy = f"This is not HTTP/1.1: {cause}.", "Send an HTTP/1.1 request."
    if data[:1] == b"\x16":
        text, remedy = "This port expects HTTP and received TLS.", "Use http:// here."
    return MalformedHttpError(text, remedy)


def _headers_too_large(bound: str) -> HeadersTooLargeError:
    return HeadersTooLargeError(f"The headers have more than {bound}.", "Send smaller ones.")


def _request_id(headers: list[tuple[bytes, bytes]]) -> str:
    """The client's id if it is safe in a header and a log line; else a new one."""
    for name, value in headers:
        if name == b"x-request-id":
            text = value.decode("latin-1")
            if 0 < len(text) <= 128 and text.isascii() and text.isprintable() and " " not in text:
                return text
    return f"req-{uuid.uuid4().hex}"
