"""A small endpoint on a real socket whose answers a test scripts. It waits for nothing."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable
from typing import Any

Reply = Callable[[dict[str, Any]], bytes | None]


def event(value: Any) -> bytes:
    return b"data: " + json.dumps(value).encode() + b"\n\n"


def response(status: str, body: bytes, kind: str = "application/json", more: str = "") -> bytes:
    head = f"HTTP/1.1 {status}\r\nContent-Type: {kind}\r\n{more}Content-Length: {len(body)}\r\n\r\n"
    return head.encode() + body


def refusal(status: str, message: str) -> bytes:
    return response(status, json.dumps({"error": {"message": message}}).encode())


def words_of(body: dict[str, Any]) -> int:
    if "prompt" in body:
        return len(body["prompt"].split())
    return sum(len(message["content"].split()) for message in body["messages"])


def answered(body: dict[str, Any], *, tokens: int | None = None, has_usage: bool = True) -> bytes:
    """A whole stream: two tokens a word, and twelve for the template."""
    count = body.get("max_tokens", body.get("max_completion_tokens")) if tokens is None else tokens
    assert count is not None
    key = "delta" if "messages" in body else "text"
    pieces = [{"content": " a"} if key == "delta" else " a" for _ in range(count)]
    parts = [event({"choices": [{"index": 0, key: piece}]}) for piece in pieces]
    last: Any = {} if key == "delta" else ""
    parts.append(event({"choices": [{"index": 0, key: last, "finish_reason": "length"}]}))
    if has_usage:
        usage = {"prompt_tokens": 2 * words_of(body) + 12, "completion_tokens": count}
        parts.append(event({"choices": [], "usage": usage}))
    return response("200 OK", b"".join(parts) + b"data: [DONE]\n\n", "text/event-stream")


def changed(answer: bytes, old: bytes, new: bytes, count: int = -1) -> bytes:
    """Another body of a stream."""
    body = answer.split(b"\r\n\r\n", 1)[1]
    return response("200 OK", body.replace(old, new, count), "text/event-stream")


class FakeEndpoint:
    """`reply` makes the whole answer from a request's body; b"" closes the connection, and None
    never answers."""

    def __init__(self, reply: Reply = answered, models: bytes | None = None) -> None:
        self._reply = reply
        self._models = models or response("200 OK", b'{"data": [{"id": "fake"}]}')
        self.bodies: list[dict[str, Any]] = []
        self.keys: list[str | None] = []
        self.connections = 0
        self._writers: list[asyncio.StreamWriter] = []
        self._server: asyncio.Server | None = None

    async def __aenter__(self) -> FakeEndpoint:
        self._server = await asyncio.start_server(self._serve, "127.0.0.1", 0)
        self.port: int = self._server.sockets[0].getsockname()[1]
        return self

    async def __aexit__(self, *exc: object) -> None:
        assert self._server is not None
        self._server.close()

    async def die(self) -> None:
        """Nobody listens any more, and every connection is closed."""
        assert self._server is not None
        self._server.close()
        for writer in self._writers:
            writer.close()
            await writer.wait_closed()

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.connections += 1
        self._writers.append(writer)
        try:
            while True:
                head = (await reader.readuntil(b"\r\n\r\n")).decode()
                headers = dict(
                    line.split(": ", 1) for line in head.split("\r\n")[1:] if ": " in line
                )
                length = int(headers.get("Content-Length", 0))
                content = await reader.readexactly(length)
                self.keys.append(headers.get("Authorization"))
                if head.startswith("GET"):
                    writer.write(self._models)
                    continue
                body = json.loads(content)
                self.bodies.append(body)
                found = self._reply(body)
                if found is None:
                    await asyncio.Event().wait()
                if not found:
                    return
                writer.write(found)
        except (asyncio.IncompleteReadError, ConnectionError):
            pass
        finally:
            writer.close()
