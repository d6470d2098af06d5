"""A client that says exactly the bytes it is told to, and hears them through the standard library.

Well-behaved clients can't be made to misbehave; this one behaves as a test wants.
"""

from __future__ import annotations

import http.client
import io
import json
import socket
from dataclasses import dataclass
from types import TracebackType
from typing import Any, cast

PATIENCE_S = 60.0  # generous: nothing is asserted about it


@dataclass(slots=True)
class Answer:
    status: int
    headers: dict[str, str]  # names in lower case
    body: bytes

    @property
    def error(self) -> dict[str, Any]:
        """The error, which must be in OpenAI's shape, with an id to ask about."""
        payload = json.loads(self.body)
        assert payload.keys() == {"error"}
        assert {"message", "type", "param", "code"} <= payload["error"].keys()
        assert self.headers["content-type"] == "application/json"
        assert self.headers["x-request-id"]
        found: dict[str, Any] = payload["error"]
        return found


class _Reader(io.BufferedReader):
    """Outlives each answer that is read from it."""

    def close(self) -> None:
        pass

    def really_close(self) -> None:
        super().close()


class RawClient:
    def __init__(self, port: int, *, receive_bytes: int | None = None) -> None:
        self.socket = socket.socket()
        if receive_bytes is not None:  # before connecting: it decides the window
            self.socket.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, receive_bytes)
        self.socket.settimeout(PATIENCE_S)
        self.socket.connect(("127.0.0.1", port))

        self._reader = _Reader(self.socket.makefile("rb", 0))

    def makefile(self, mode: str) -> _Reader:
        """As HTTPResponse asks for it: one reader for all answers, for it may read ahead."""
        return self._reader

    def fileno(self) -> int:
        return self.socket.fileno()

    def send(self, *parts: bytes | str) -> RawClient:
        for part in parts:
            self.socket.sendall(part.encode() if isinstance(part, str) else part)
        return self

    def answer(self, method: str = "GET") -> Answer:
        """The next answer on this connection."""
        response = http.client.HTTPResponse(cast("socket.socket", self), method=method)
        response.begin()
        body = response.read()
        headers = {name.lower(): value for name, value in response.getheaders()}
        return Answer(response.status, headers, body)

    def is_closed(self) -> bool:
        """Waits until the server has closed; False if it says something instead."""
        try:
            return self._reader.read(1) == b""
        except ConnectionError:
            return True

    def close(self) -> None:
        self._reader.really_close()
        self.socket.close()

    def __enter__(self) -> RawClient:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()


def post(path: str, body: bytes | str, *headers: str) -> bytes:
    data = body.encode() if isinstance(body, str) else body
    lines = [f"POST {path} HTTP/1.1", "host: localhost", f"content-length: {len(data)}", *headers]
    if not any(header.lower().startswith("content-type:") for header in headers):
        lines.append("content-type: application/json")
    return "\r\n".join(lines).encode("latin-1") + b"\r\n\r\n" + data


CHAT = "/v1/chat/completions"
GOOD = json.dumps({"messages": [{"role": "user", "content": "Hi"}], "max_tokens": 1})


def check_good(port: int) -> None:
    """The next good request works."""
    with RawClient(port) as client:
        answer = client.send(post(CHAT, GOOD)).answer()
        assert answer.status == 200, answer.body
        assert json.loads(answer.body)["usage"]["completion_tokens"] == 1
