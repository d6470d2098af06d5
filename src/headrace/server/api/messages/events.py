"""An answer as Anthropic's message, and as the events that build it up in a stream.

One code path for both: without streaming the events are dropped and the message is taken at the
end. Knows pieces of answers and Anthropic's shapes; neither engine nor HTTP.
"""

from __future__ import annotations

import secrets
from typing import Any, Literal

import msgspec

from headrace.server.request.call import encode_json
from headrace.server.request.usage import Usage
from headrace.server.tools.parser import Arguments, CallEnd, CallStart, Content, Piece

JsonObject = dict[str, Any]

_PING = b'event: ping\ndata: {"type":"ping"}\n\n'


class MessageUsage(msgspec.Struct):
    """As Anthropic counts: cached tokens are not among input_tokens."""

    input_tokens: int = 0
    output_tokens: int = 0
    cache_read_input_tokens: int = 0
    cache_creation_input_tokens: int = 0

    @classmethod
    def of(cls, usage: Usage) -> MessageUsage:
        cached = usage.prompt_tokens_details.cached_tokens
        return cls(
            input_tokens=usage.prompt_tokens - cached,
            output_tokens=usage.completion_tokens,
            cache_read_input_tokens=cached,
        )


class Message(msgspec.Struct):
    id: str
    model: str
    type: Literal["message"] = "message"
    role: Literal["assistant"] = "assistant"
    content: list[JsonObject] = msgspec.field(default_factory=list)
    stop_reason: str | None = None
    stop_sequence: str | None = None
    usage: MessageUsage = msgspec.field(default_factory=MessageUsage)


class MessageBuilder:
    """Each method returns the encoded events for what happened."""

    def __init__(self, model: str) -> None:
        self.message = Message(id=f"msg_{secrets.token_hex(12)}", model=model)
        self.whole_calls = 0
        self._index = -1  # of the last block, even if it was dropped
        self._block: JsonObject | None = None  # being written
        self._written: list[str] = []  # its text or JSON so far

    def begin(self, usage: MessageUsage) -> bytes:
        self.message.usage = usage
        return _event("message_start", message=self.message)

    def add(self, pieces: list[Piece]) -> bytes:
        return b"".join(self._add(piece) for piece in pieces)

    def end(self, usage: MessageUsage, stop_reason: str, stop_sequence: str | None) -> bytes:
        out = self._close(is_whole=False)
        message = self.message
        message.usage = usage
        message.stop_reason, message.stop_sequence = stop_reason, stop_sequence
        delta = {"stop_reason": stop_reason, "stop_sequence": stop_sequence}
        return out + _event("message_delta", delta=delta, usage=usage) + _event("message_stop")

    def _add(self, piece: Piece) -> bytes:
        if isinstance(piece, Content):
            out = b""
            if self._block is None or self._block["type"] != "text":
                out = self._close(is_whole=False) + self._open({"type": "text", "text": ""})
            return out + self._delta(piece.text, {"type": "text_delta", "text": piece.text})
        if isinstance(piece, CallStart):
            block = {"type": "tool_use", "id": piece.call_id, "name": piece.name, "input": {}}
            return self._close(is_whole=False) + self._open(block)
        if isinstance(piece, Arguments):
            delta = {"type": "input_json_delta", "partial_json": piece.text}
            return self._delta(piece.text, delta)
        assert isinstance(piece, CallEnd)
        self.whole_calls += 1
        return self._close(is_whole=True)

    def _open(self, block: JsonObject) -> bytes:
        self._block, self._written = block, []
        self._index += 1
        out = _event("content_block_start", index=self._index, content_block=block)
        return out if self._index else out + _PING

    def _delta(self, text: str, delta: JsonObject) -> bytes:
        self._written.append(text)
        return _event("content_block_delta", index=self._index, delta=delta)

    def _close(self, *, is_whole: bool) -> bytes:
        block, written = self._block, "".join(self._written)
        if block is None:
            return b""
        self._block = None
        if block["type"] == "text":
            self.message.content.append({**block, "text": written})
        elif is_whole:  # an incomplete call is dropped
            self.message.content.append({**block, "input": msgspec.json.decode(written)})
        return _event("content_block_stop", index=self._index)


def _event(kind: str, **fields: object) -> bytes:
    return b"event: %b\ndata: %b\n\n" % (kind.encode(), encode_json({"type": kind, **fields}))
