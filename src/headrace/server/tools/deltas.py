"""Tool calls in OpenAI's chat shapes: whole in a message, in pieces in a stream's deltas.

Knows OpenAI's shapes; parser.py finds the calls.
"""

from __future__ import annotations

from typing import Literal

import msgspec

from headrace.server.request.call import encode_json
from headrace.server.tools.parser import Arguments, CallStart, Content, FoundCall, Piece


class CalledFunction(msgspec.Struct):
    name: str
    arguments: str


class ToolCall(msgspec.Struct):
    id: str
    function: CalledFunction
    type: Literal["function"] = "function"


def whole_call(found: FoundCall) -> ToolCall:
    return ToolCall(found.call_id, CalledFunction(found.name, found.arguments))


def encode_deltas(pieces: list[Piece]) -> list[bytes]:
    """The entries of a stream's `delta`, one by one."""
    return [encode_json(delta) for piece in pieces if (delta := _delta(piece)) is not None]


def _delta(piece: Piece) -> dict[str, object] | None:
    if isinstance(piece, Content):
        return {"content": piece.text}
    if isinstance(piece, CallStart):
        function = {"name": piece.name, "arguments": ""}
        call = {"index": piece.index, "id": piece.call_id, "type": "function", "function": function}
        return {"tool_calls": [call]}
    if isinstance(piece, Arguments):
        return {"tool_calls": [{"index": piece.index, "function": {"arguments": piece.text}}]}
    return None  # the end of a call has no delta of its own
