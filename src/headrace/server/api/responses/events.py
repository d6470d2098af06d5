"""An answer as OpenAI's response object, and as the events that build it up in a stream.

One code path for both: without streaming the events are dropped and the object is taken at the end.
Knows pieces of answers and OpenAI's shapes; neither engine nor HTTP.
"""

from __future__ import annotations

import secrets
import time
from typing import Any

import msgspec

from headrace.core.errors import HeadraceError
from headrace.server.api.responses.schema import ResponsesRequest
from headrace.server.request.call import encode_json
from headrace.server.request.logprobs import TokenLogprob
from headrace.server.request.usage import Usage
from headrace.server.tools.kinds import names_in_namespaces
from headrace.server.tools.parser import Arguments, CallEnd, CallStart, Content, Piece

JsonObject = dict[str, Any]


class ResponseBuilder:
    """Each method returns the encoded events for what happened."""

    def __init__(
        self,
        sent: ResponsesRequest,
        model: str,
        temperature: float,
        top_p: float,
        *,
        is_stored: bool,
        tag: str = "",
    ) -> None:
        text = {"format": {"type": "text"}}
        if sent.text is not None and sent.text.format is not None:
            text = {"format": sent.text.format}
        self._output: list[JsonObject] = []
        self._index = -1  # of the last item, even if it was dropped
        self._item: JsonObject | None = None  # being written
        self._logprobs: list[TokenLogprob] = []  # of tokens whose text is not complete yet
        self._sequence_number = 0
        self._namespaces = names_in_namespaces(sent.tools)
        self.response: JsonObject = {
            "id": _new_id(f"resp{tag}"),
            "object": "response",
            "created_at": int(time.time()),
            "status": "in_progress",
            "background": False,
            "error": None,
            "incomplete_details": None,
            "instructions": sent.instructions,
            "max_output_tokens": sent.max_output_tokens,
            "metadata": sent.metadata or {},
            "model": model,
            "output": self._output,
            "parallel_tool_calls": sent.parallel_tool_calls is not False,
            "previous_response_id": sent.previous_response_id,
            "store": is_stored,
            "temperature": temperature,
            "text": text,
            "tool_choice": sent.tool_choice or "auto",
            "tools": sent.tools or [],
            "top_logprobs": sent.top_logprobs or 0,
            "top_p": top_p,
            "truncation": "disabled",
            "usage": None,
            "user": sent.user,
        }

    def begin(self) -> bytes:
        return self._state("response.created") + self._state("response.in_progress")

    def add(self, pieces: list[Piece], logprobs: list[TokenLogprob]) -> bytes:
        """The text that a token completed, and its logprobs if asked for."""
        self._logprobs += logprobs
        return b"".join(self._add(piece) for piece in pieces)

    def end(self, usage: Usage, *, was_cut: bool) -> bytes:
        """The answer's last events; `was_cut` if a limit ended it and not the model."""
        out = b""
        if not self._output and self._item is None:  # an empty answer is an empty message
            out += self._open_message()
        if self._logprobs and self._item is not None and self._item["type"] == "message":
            out += self._text("")  # for the token that ended it
        out += self._close("incomplete" if was_cut else "completed")
        self.response["usage"] = _usage(usage)
        if was_cut:
            self.response["status"] = "incomplete"
            self.response["incomplete_details"] = {"reason": "max_output_tokens"}
            return out + self._state("response.incomplete")
        self.response["status"] = "completed"
        return out + self._state("response.completed")

    def fail(self, error: HeadraceError) -> bytes:
        self.response["status"] = "failed"
        code = "rate_limit_exceeded" if error.status == 429 else "server_error"
        self.response["error"] = {"code": code, "message": str(error)}
        return self._close("incomplete") + self._state("response.failed")

    def _add(self, piece: Piece) -> bytes:
        if isinstance(piece, Content):
            out = b""
            if self._item is None or self._item["type"] != "message":
                out = self._close("completed") + self._open_message()
            return out + self._text(piece.text)
        self._logprobs = []  # calls have no logprobs
        if isinstance(piece, CallStart):
            return self._close("completed") + self._open_call(piece)
        assert self._item is not None
        if isinstance(piece, Arguments):
            self._item["arguments"] += piece.text
            return self._of_item("function_call_arguments.delta", delta=piece.text)
        assert isinstance(piece, CallEnd)
        return self._close("completed")

    def _text(self, text: str) -> bytes:
        assert self._item is not None
        logprobs, self._logprobs = self._logprobs, []
        [part] = self._item["content"]
        part["text"] += text
        part["logprobs"] += logprobs
        return self._part("output_text.delta", delta=text, logprobs=logprobs)

    def _open_message(self) -> bytes:
        item = {"type": "message", "id": _new_id("msg"), "status": "in_progress"}
        out = self._open({**item, "role": "assistant", "content": []})
        assert self._item is not None
        part = {"type": "output_text", "text": "", "annotations": [], "logprobs": []}
        self._item["content"].append(part)
        return out + self._part("content_part.added", part=part)

    def _open_call(self, piece: CallStart) -> bytes:
        item = {"type": "function_call", "id": _new_id("fc"), "status": "in_progress"}
        space, name = self._namespaces.get(piece.name, (None, piece.name))
        named = {"name": name} if space is None else {"name": name, "namespace": space}
        return self._open({**item, "call_id": piece.call_id, **named, "arguments": ""})

    def _open(self, item: JsonObject) -> bytes:
        self._item = item
        self._index += 1
        return self._event("output_item.added", output_index=self._index, item=item)

    def _close(self, status: str) -> bytes:
        item = self._item
        if item is None:
            return b""
        if item["type"] == "message":
            part = item["content"][0]
            out = self._part("output_text.done", text=part["text"], logprobs=part["logprobs"])
            out += self._part("content_part.done", part=part)
        elif status == "completed":
            out = self._of_item("function_call_arguments.done", arguments=item["arguments"])
        else:
            out = b""
        item["status"] = status
        if item["type"] == "message" or status == "completed":
            self._output.append(item)  # an incomplete call is dropped
        self._item = None
        return out + self._event("output_item.done", output_index=self._index, item=item)

    def _part(self, name: str, **fields: object) -> bytes:
        return self._of_item(name, content_index=0, **fields)

    def _of_item(self, name: str, **fields: object) -> bytes:
        assert self._item is not None
        return self._event(name, item_id=self._item["id"], output_index=self._index, **fields)

    def _state(self, name: str) -> bytes:
        return self._event(name.removeprefix("response."), response=self.response)

    def _event(self, name: str, **fields: object) -> bytes:
        kind = f"response.{name}"
        event = {"type": kind, "sequence_number": self._sequence_number, **fields}
        self._sequence_number += 1
        return b"event: %b\ndata: %b\n\n" % (kind.encode(), encode_json(event))


class _InputDetails(msgspec.Struct):
    cached_tokens: int
    cache_write_tokens: int = 0


class _OutputDetails(msgspec.Struct):
    reasoning_tokens: int = 0


class ResponseUsage(msgspec.Struct):
    input_tokens: int
    input_tokens_details: _InputDetails
    output_tokens: int
    output_tokens_details: _OutputDetails
    total_tokens: int


def _usage(usage: Usage) -> ResponseUsage:
    return ResponseUsage(
        input_tokens=usage.prompt_tokens,
        input_tokens_details=_InputDetails(usage.prompt_tokens_details.cached_tokens),
        output_tokens=usage.completion_tokens,
        output_tokens_details=_OutputDetails(),
        total_tokens=usage.total_tokens,
    )


def _new_id(prefix: str) -> str:
    return f"{prefix}_{secrets.token_hex(16)}"
