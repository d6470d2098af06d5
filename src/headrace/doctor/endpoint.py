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

from headrace.client.answer import Answer as Heard
from headrace.client.answer import message_of
from headrace.core.errors import ConfigError, HeadraceError
from headrace.doctor.mishaps import no_stream, unreachable
from headrace.doctor.observation import Answer

_SHOWN_BYTES = 200
_MAX_BODY_BYTES = 64 << 20
CHAT, TEXT = "/v1/chat/completions", "/v1/completions"


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
    """`url` is that of the server, with or without /v1 and what follows it."""

    def __init__(self, url: str, *, key: str | None = None, timeout_s: float = 20.0) -> None:
        text = url if "://" in url else f"http://{url}"
        try:
            parts = urlsplit(text.removesuffix("/"))
            port = parts.port
        except ValueError as error:
            raise ConfigError(f"{url!r} is not a URL: {error}.", "Give http://HOST:PORT.") from None
        if parts.scheme not in ("http", "https") or not parts.hostname:
            raise ConfigError(f"{url!r} is not a URL with http or https.", "Give http://HOST:PORT.")
        self.host = parts.hostname
        self.is_tls = parts.scheme == "https"
        self.port = port or (443 if self.is_tls else 80)
        self.path = f"{parts.path}/".partition("/v1/")[0].removesuffix("/")
        self.timeout_s = timeout_s
        self._key = key
        self.url = f"{parts.scheme}://{parts.netloc.rpartition('@')[2]}{self.path}"

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

    def ask(
        self, body: Mapping[str, Any], *, scheduled_s: float, timeout_s: float, path: str = CHAT
    ) -> Answer:
        """A request that streams, from its scheduled time (of time.perf_counter) on. Never raises:
        an answer that failed says why."""
        return _Asking(self, body, scheduled_s, timeout_s, path).run()

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
        return EndpointError(*unreachable(f"{self.host}:{self.port}", error))


class _Asking:
    """One streamed request. Time is taken when bytes arrive, before they are parsed."""

    def __init__(
        self,
        endpoint: Endpoint,
        body: Mapping[str, Any],
        scheduled_s: float,
        timeout_s: float,
        path: str,
    ) -> None:
        self._endpoint = endpoint
        self._path = path
        self._body = dict(body) | {"stream": True, "stream_options": {"include_usage": True}}
        self._scheduled_s = scheduled_s
        self._timeout_s = timeout_s
        self._heard = Heard()
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
        heard = self._heard
        arrivals, counted = heard.times_s, heard.output_tokens
        return Answer(
            scheduled_s=self._scheduled_s,
            sent_s=self._sent,
            connect_s=self._connect,
            ttft_s=arrivals[0] if arrivals else None,
            end_s=arrivals[-1] if arrivals else None,
            tokens=len(arrivals) if counted is None else counted,
            is_counted=counted is not None,
            prompt_tokens=heard.prompt_tokens,
            cached_tokens=heard.cached_tokens,
            arrivals_s=tuple(arrivals),
            finish_reason=heard.finish,
            error=self._error or self._missing(),
        )

    def _missing(self) -> str | None:
        heard = self._heard
        if heard.failure is not None:
            is_json = heard.detail.startswith("a chunk is not JSON")
            return heard.detail if is_json else f"an {heard.failure}: {heard.detail}"
        if not heard.times_s:
            return "the answer has no text"
        return None if heard.finish else "the stream ended without a finish_reason"

    def _exchange(self, connection: http.client.HTTPConnection) -> None:
        start = time.perf_counter()
        connection.connect()
        connected = time.perf_counter()
        self._connect = connected - start
        assert connection.sock is not None
        connection.sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        payload = json.dumps(self._body).encode()
        headers = self._endpoint.headers() | {"Content-Type": "application/json"}
        path = f"{self._endpoint.path}{self._path}"
        self._sent = time.perf_counter() - self._scheduled_s
        connection.request("POST", path, body=payload, headers=headers)
        response = connection.getresponse()
        if response.status != 200:
            self._error = f"HTTP {response.status}: {message_of(response.read(_MAX_BODY_BYTES))}"
            return
        self._error = no_stream(response.getheader("Content-Type") or "")
        if self._error is not None:
            return
        while line := response.readline():
            self._heard.feed(line, time.perf_counter() - self._scheduled_s)
            if self._heard.is_done or self._heard.failure is not None:
                return


def key_from(variable: str | None) -> str | None:
    """A key by the name of its variable, never on the command line. Without a name no variable is
    looked at: a key must not go to a server that nobody named it for."""
    if variable is None:
        return None
    key = os.environ.get(variable)
    if not key:
        raise ConfigError(f"${variable} is not set.", "Set it, or leave --key-variable out.")
    return key
