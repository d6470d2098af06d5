"""One endpoint over HTTP: plain requests, and answers that stream, each timed as bytes arrive.

Blocking, from the standard library: the probes use a thread per request. Redirects are not
followed, and every failure becomes an error of one line. Knows OpenAI's paths; no engine.
"""

from __future__ import annotations

import contextlib
import http.client
import ipaddress
import json
import os
import socket
import ssl
import time
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any
from urllib.parse import urlsplit

from headrace.core.errors import ConfigError, HeadraceError
from headrace.doctor.observation import Answer

_SHOWN_BYTES = 200
_MAX_BODY_BYTES = 64 << 20


class EndpointError(HeadraceError):
    """The endpoint could not be reached, or answered something else than what was asked for."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Reply:
    status: int
    headers: Mapping[str, str]
    text: str

    def json(self) -> Any:
        try:
            return json.loads(self.text)
        except ValueError:
            raise EndpointError(
                f"The answer is not JSON: {self.text[:_SHOWN_BYTES]!r}.",
                "Give the URL of the server itself, without a path.",
            ) from None


@dataclass(frozen=True, slots=True, kw_only=True)
class ConnectTimes:
    dns_s: float
    connect_s: float
    tls_s: float | None


class Endpoint:
    """`url` is that of the server, with or without /v1 at its end."""

    def __init__(self, url: str, *, key: str | None = None, timeout_s: float = 20.0) -> None:
        text = url if "://" in url else f"http://{url}"
        try:
            parts = urlsplit(text.removesuffix("/").removesuffix("/v1"))
            port = parts.port
        except ValueError as error:
            raise ConfigError(f"{url!r} is not a URL: {error}.", "Give http://HOST:PORT.") from None
        if parts.scheme not in ("http", "https") or not parts.hostname:
            raise ConfigError(f"{url!r} is not a URL with http or https.", "Give http://HOST:PORT.")
        self.host = parts.hostname
        self.is_tls = parts.scheme == "https"
        self.port = port or (443 if self.is_tls else 80)
        self.path = parts.path
        self.timeout_s = timeout_s
        self._key = key
        self.url = f"{parts.scheme}://{parts.netloc.rpartition('@')[2]}{parts.path}"

    @property
    def is_loopback(self) -> bool:
        if self.host == "localhost":
            return True
        with contextlib.suppress(ValueError):
            return ipaddress.ip_address(self.host).is_loopback
        return False

    def get(self, path: str, *, timeout_s: float | None = None) -> Reply:
        """Any status is a reply, except a redirect."""
        connection = self.connection(timeout_s)
        try:
            connection.request("GET", f"{self.path}{path}", headers=self.headers())
            response = connection.getresponse()
            body = response.read(_MAX_BODY_BYTES)
        except (OSError, http.client.HTTPException) as error:
            raise self._unreachable(error) from error
        finally:
            connection.close()
        headers = {name.lower(): value for name, value in response.getheaders()}
        if 300 <= response.status < 400:
            raise EndpointError(
                f"{self.url}{path} redirects to {headers.get('location', 'somewhere')!r}.",
                "Give that URL: redirects are not followed, so that keys stay where they belong.",
            )
        text = body.decode("utf-8", "replace")
        return Reply(status=response.status, headers=headers, text=text)

    def found(self, path: str, *, timeout_s: float = 5.0) -> Any | None:
        """JSON of an endpoint that may not exist, else None."""
        try:
            reply = self.get(path, timeout_s=timeout_s)
            return reply.json() if reply.status == 200 else None
        except EndpointError:
            return None

    def connect_times(self) -> ConnectTimes:
        """One connection, without a request: names, TCP (about a round trip), TLS."""
        try:
            start = time.perf_counter()
            found = socket.getaddrinfo(self.host, self.port, type=socket.SOCK_STREAM)
            resolved = time.perf_counter()
            address = (str(found[0][4][0]), self.port)
            with socket.create_connection(address, timeout=self.timeout_s) as plain:
                connected = time.perf_counter()
                tls_s = None
                if self.is_tls:
                    context = ssl.create_default_context()
                    with context.wrap_socket(plain, server_hostname=self.host):
                        tls_s = time.perf_counter() - connected
        except OSError as error:
            raise self._unreachable(error) from error
        return ConnectTimes(dns_s=resolved - start, connect_s=connected - resolved, tls_s=tls_s)

    def ask(self, body: Mapping[str, Any], *, scheduled_s: float, timeout_s: float) -> Answer:
        """A chat that streams, from its scheduled time (of time.perf_counter) on. Never raises:
        an answer that failed says why."""
        return _Asking(self, body, scheduled_s, timeout_s).run()

    def connection(self, timeout_s: float | None) -> http.client.HTTPConnection:
        limit = self.timeout_s if timeout_s is None else timeout_s
        if self.is_tls:
            return http.client.HTTPSConnection(self.host, self.port, timeout=limit)
        return http.client.HTTPConnection(self.host, self.port, timeout=limit)

    def headers(self) -> dict[str, str]:
        headers = {"Accept": "*/*", "User-Agent": "headrace-doctor"}
        if self._key:
            headers["Authorization"] = f"Bearer {self._key}"
        return headers

    def _unreachable(self, error: BaseException) -> EndpointError:
        what = str(error) or type(error).__name__
        if isinstance(error, ssl.SSLError):
            return EndpointError(f"TLS with {self.host} failed: {what}.", "Check the certificate.")
        return EndpointError(
            f"{self.host}:{self.port} can't be reached: {what}.", "Is the server running?"
        )


class _Asking:
    """One streamed request. Time is taken when bytes arrive, before they are parsed."""

    def __init__(
        self, endpoint: Endpoint, body: Mapping[str, Any], scheduled_s: float, timeout_s: float
    ) -> None:
        self._endpoint = endpoint
        self._body = dict(body) | {"stream": True, "stream_options": {"include_usage": True}}
        self._scheduled_s = scheduled_s
        self._timeout_s = timeout_s
        self._arrivals: list[float] = []
        self._usage: dict[str, Any] = {}
        self._finish: str | None = None
        self._error: str | None = None
        self._sent: float | None = None
        self._connect: float | None = None

    def run(self) -> Answer:
        connection = self._endpoint.connection(self._timeout_s)
        try:
            self._exchange(connection)
        except (OSError, http.client.HTTPException) as error:
            self._error = f"{type(error).__name__}: {error}".rstrip(": ")
        finally:
            connection.close()
        usage = self._usage
        details = usage.get("prompt_tokens_details")
        cached = details.get("cached_tokens") if isinstance(details, dict) else None
        counted = usage.get("completion_tokens")
        return Answer(
            scheduled_s=self._scheduled_s,
            sent_s=self._sent,
            connect_s=self._connect,
            ttft_s=self._arrivals[0] if self._arrivals else None,
            end_s=self._arrivals[-1] if self._arrivals else None,
            tokens=counted if isinstance(counted, int) else len(self._arrivals),
            is_counted=isinstance(counted, int),
            prompt_tokens=_whole(usage.get("prompt_tokens")),
            cached_tokens=_whole(cached),
            arrivals_s=tuple(self._arrivals),
            finish_reason=self._finish,
            error=self._error or self._missing(),
        )

    def _missing(self) -> str | None:
        if not self._arrivals:
            return "the answer has no text"
        return None if self._finish else "the stream ended without a finish_reason"

    def _exchange(self, connection: http.client.HTTPConnection) -> None:
        start = time.perf_counter()
        connection.connect()
        connected = time.perf_counter()
        self._connect = connected - start
        assert connection.sock is not None
        connection.sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        payload = json.dumps(self._body).encode()
        headers = self._endpoint.headers() | {"Content-Type": "application/json"}
        path = f"{self._endpoint.path}/v1/chat/completions"
        self._sent = time.perf_counter() - self._scheduled_s
        connection.request("POST", path, body=payload, headers=headers)
        response = connection.getresponse()
        if response.status != 200:
            self._error = f"HTTP {response.status}: {_message(response.read(_MAX_BODY_BYTES))}"
            return
        while line := response.readline():
            at = time.perf_counter() - self._scheduled_s
            if line.startswith(b"event:") and b"error" in line:
                self._error = "an error event in the stream"
            if line.startswith(b"data:") and not self._take(line[5:].strip(), at):
                return

    def _take(self, data: bytes, at: float) -> bool:
        """False: this was the end."""
        if data == b"[DONE]":
            return False
        try:
            chunk = json.loads(data)
        except ValueError:
            self._error = f"a chunk is not JSON: {data[:_SHOWN_BYTES]!r}"
            return False
        if not isinstance(chunk, dict) or chunk.get("error"):
            self._error = f"an error in the stream: {_message(data)}"
            return False
        self._usage = chunk.get("usage") or self._usage
        for choice in chunk.get("choices") or ():
            delta = choice.get("delta") or {}
            if any(delta.get(key) for key in ("content", "reasoning_content", "reasoning")):
                self._arrivals.append(at)
            self._finish = choice.get("finish_reason") or self._finish
        return True


def _whole(value: object) -> int | None:
    return value if isinstance(value, int) else None


def _message(body: bytes) -> str:
    """What an error says, whatever form it has."""
    text = body.decode("utf-8", "replace")
    with contextlib.suppress(ValueError):
        found = json.loads(text)
        if isinstance(found, dict):
            inner = found.get("error", found)
            text = str(inner.get("message") or inner) if isinstance(inner, dict) else str(inner)
    return " ".join(text.split())[:_SHOWN_BYTES]


def key_from(variable: str | None) -> str | None:
    """A key by the name of its variable, never on the command line. Without a name no variable is
    looked at: a key must not go to a server that nobody named it for."""
    if variable is None:
        return None
    key = os.environ.get(variable)
    if not key:
        raise ConfigError(f"${variable} is not set.", "Set it, or leave --key-variable out.")
    return key
