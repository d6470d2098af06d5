"""One HTTP request to a server of OpenAI's shapes, and its answer in one form, whole or streamed.

Standard library only, and slow: to look at answers with, never to measure. Knows neither what was
asked for nor what a right answer is.
"""

from __future__ import annotations

import http.client
import json
from dataclasses import dataclass, field
from typing import Any

PATIENCE_S = 120.0

Body = dict[str, Any]


class Refused(Exception):
    """The server answered with an error, at once or in the middle of a stream."""

    def __init__(self, status: int, said: str) -> None:
        super().__init__(f"status {status}: {said[:300]}")
        self.status = status


@dataclass(frozen=True, slots=True)
class Token:
    """Of logprobs: what was drawn, and the likeliest in its place, likeliest first."""

    text: str
    logprob: float
    top: list[tuple[str, float]]


@dataclass(slots=True)
class Choice:
    text: str = ""
    finish_reason: str | None = None
    pieces: list[str] = field(default_factory=list)  # as they were streamed
    tokens: list[Token] = field(default_factory=list)


@dataclass(slots=True)
class Reply:
    choices: dict[int, Choice] = field(default_factory=dict)
    completion_tokens: int = 0

    @property
    def first(self) -> Choice:
        return self.choices[0]

    def add(self, payload: dict[str, Any]) -> None:
        """A whole answer, or a chunk of one."""
        if "error" in payload:
            raise Refused(200, json.dumps(payload["error"]))
        for found in payload["choices"]:
            choice = self.choices.setdefault(found["index"], Choice())
            said = found.get("message") or found.get("delta") or found
            piece = said.get("content") or said.get("text") or ""
            choice.text += piece
            if piece:
                choice.pieces.append(piece)
            choice.finish_reason = found.get("finish_reason") or choice.finish_reason
            choice.tokens += _tokens(found.get("logprobs"))
        if usage := payload.get("usage"):
            self.completion_tokens = usage["completion_tokens"]


def _tokens(logprobs: dict[str, Any] | None) -> list[Token]:
    """Of a chat's list or of a completion's parallel ones; an echoed first token has none."""
    if logprobs is None:
        return []
    if "content" in logprobs:
        return [
            Token(t["token"], t["logprob"], [(o["token"], o["logprob"]) for o in t["top_logprobs"]])
            for t in logprobs["content"]
        ]
    columns = (logprobs["tokens"], logprobs["token_logprobs"], logprobs["top_logprobs"])
    return [
        Token(text, logprob, sorted((top or {}).items(), key=lambda item: -item[1]))
        for text, logprob, top in zip(*columns, strict=True)
        if logprob is not None
    ]


def fetch(port: int, path: str, body: Body | None = None) -> Any:
    """JSON of a GET, or of a POST where there is a body."""
    answer, connection = _send(port, path, body)
    try:
        return json.loads(answer.read())
    finally:
        connection.close()


def ask(port: int, path: str, body: Body, *, stream: bool = False) -> Reply:
    """A completion or a chat."""
    reply = Reply()
    if not stream:
        reply.add(fetch(port, path, body))
        return reply
    answer, connection = _send(
        port, path, {**body, "stream": True, "stream_options": {"include_usage": True}}
    )
    try:
        ended = False
        for line in answer:
            if line.startswith(b"data: [DONE]"):
                ended = True
            elif line.startswith(b"data: "):
                reply.add(json.loads(line[6:]))
        if not ended:
            raise Refused(200, "the stream broke off")
    finally:
        connection.close()
    return reply


def _send(
    port: int, path: str, body: Body | None
) -> tuple[http.client.HTTPResponse, http.client.HTTPConnection]:
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=PATIENCE_S)
    try:
        if body is None:
            connection.request("GET", path)
        else:
            headers = {"Content-Type": "application/json"}
            connection.request("POST", path, json.dumps(body).encode(), headers)
        answer = connection.getresponse()
        if answer.status != 200:
            raise Refused(answer.status, answer.read().decode(errors="replace"))
    except BaseException:
        connection.close()
        raise
    return answer, connection
