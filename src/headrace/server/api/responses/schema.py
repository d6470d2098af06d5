"""The fields of /v1/responses, and their conversion into a chat.

OpenAI's newer shape is a chat's with other names: items instead of messages, flat tools, the
response format under `text`. Earlier answers are passed in; stored.py has them.
"""

from __future__ import annotations

from typing import Any

import msgspec

from headrace.core.bounds import MESSAGES, METADATA_CHARACTERS, METADATA_PAIRS
from headrace.core.checks import check_value
from headrace.core.errors import InvalidRequestError
from headrace.core.request import SamplingParams
from headrace.core.sampling import Taken
from headrace.server.request.call import Call
from headrace.server.request.prompts import check_messages
from headrace.server.request.sampling_fields import sampling_fields, takes_sampling
from headrace.server.request.schema import IGNORED, ChatRequest, StreamOptions
from headrace.server.request.structured import wrong_value
from headrace.server.tools.kinds import flat_name, flatten_namespaces

JsonObject = dict[str, Any]


class TextOptions(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    format: JsonObject | None = None
    verbosity: str | None = None


@takes_sampling(Taken.RESPONSES)
class ResponsesRequest(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    input: str | list[JsonObject]
    model: str | None = None
    instructions: str | None = None
    max_output_tokens: int | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    text: TextOptions | None = None
    tools: list[JsonObject] | None = None
    tool_choice: str | JsonObject | None = None
    parallel_tool_calls: bool | None = None
    metadata: dict[str, str] | None = None
    user: str | None = None
    include: list[str] | None = None
    top_logprobs: int | None = None
    previous_response_id: str | None = None
    store: bool | None = None
    # For servers that store more than this one: refused, or ignored with a warning.
    background: bool | None = None
    conversation: str | JsonObject | None = None
    prompt: JsonObject | None = None
    truncation: str | None = None
    # Not OpenAI's: named as vLLM's.
    cache_salt: str | None = None
    priority: int | None = None
    timeout_s: float | None = None
    speculate: str | None = None
    chat_template_kwargs: JsonObject | None = None


IGNORED[ResponsesRequest] = frozenset(
    {
        *("max_tool_calls", "prompt_cache_key", "prompt_cache_retention", "reasoning"),
        *("safety_identifier", "service_tier", "moderation", "image"),
        *("prompt_cache_options", "context_management", "access_programs", "client_metadata"),
    }
)

_SAME = (
    *("model", "parallel_tool_calls", "cache_salt", "priority", "timeout_s", "user"),
    *("chat_template_kwargs", "stream", "speculate"),
)
LOGPROBS = "message.output_text.logprobs"
_TEXT_PARTS = {"input_text": "text", "output_text": "text", "text": "text", "refusal": "refusal"}


def as_chat(call: Call, sent: ResponsesRequest, before: list[JsonObject]) -> ChatRequest:
    """The same request as a chat. `before` are the items of the conversation that it continues,
    without its instructions."""
    _check_supported(call, sent)
    _check_sizes(sent, before)
    logprobs, top_logprobs = _logprobs(call, sent)
    check_value(SamplingParams, "max_tokens", sent.max_output_tokens, param="max_output_tokens")
    messages: list[JsonObject] = []
    if sent.instructions is not None:
        messages.append({"role": "system", "content": sent.instructions})
    for place, item in enumerate(before):
        _add_item(call, messages, item, f"previous_response_id[{place}]")
    if isinstance(sent.input, str):
        messages.append({"role": "user", "content": sent.input})
    else:
        for place, item in enumerate(sent.input):
            _add_item(call, messages, item, f"input[{place}]")
    return ChatRequest(
        messages=messages,
        max_completion_tokens=sent.max_output_tokens,
        logprobs=logprobs,
        top_logprobs=top_logprobs,
        response_format=_response_format(call, sent.text),
        tools=[
            _nested(tool, f"tools[{i}]")
            for i, tool in enumerate(flatten_namespaces(call, sent.tools))
        ]
        or None,
        tool_choice=_nested_choice(sent.tool_choice),
        **{name: getattr(sent, name) for name in _SAME},
        **sampling_fields(sent, Taken.RESPONSES),
    )


def _check_sizes(sent: ResponsesRequest, before: list[JsonObject]) -> None:
    items = sent.input if isinstance(sent.input, list) else []
    check_messages(items, "input")
    MESSAGES.check("previous_response_id", len(before) + len(items))
    METADATA_PAIRS.check("metadata", len(sent.metadata or ()))
    characters = sum(len(key) + len(value) for key, value in (sent.metadata or {}).items())
    METADATA_CHARACTERS.check("metadata", characters)


def _check_supported(call: Call, sent: ResponsesRequest) -> None:
    for name in ("conversation", "prompt"):
        if getattr(sent, name) is not None:
            raise InvalidRequestError(
                f"{name} refers to a stored object; this server stores only responses.",
                "Send the whole conversation as input items, or a previous_response_id.",
                param=name,
            )
    if sent.background:
        raise InvalidRequestError(
            "background is true, which this server does not support.",
            "Leave it out and wait for the answer, or stream.",
            param="background",
        )
    if sent.truncation not in (None, "disabled", "auto"):
        raise wrong_value("truncation", sent.truncation, "'disabled' or 'auto'")
    if sent.truncation == "auto":
        call.warn("truncation is not supported and was ignored: a prompt is never cut")


def _logprobs(call: Call, sent: ResponsesRequest) -> tuple[bool, int | None]:
    """A chat's logprobs and top_logprobs. Giving top_logprobs implies logprobs."""
    for name in sent.include or ():
        if name != LOGPROBS:  # warnings that do not fit are dropped
            call.warn(f"include has {name[:60]}, which is not supported and was ignored")
    if LOGPROBS in (sent.include or ()) or sent.top_logprobs:
        return True, sent.top_logprobs or 0
    return False, None


def _add_item(call: Call, messages: list[JsonObject], item: JsonObject, param: str) -> None:
    kind = item.get("type", "message")
    if kind == "message":
        role = item.get("role")
        if role not in ("user", "assistant", "system", "developer"):
            raise wrong_value(f"{param}.role", role, "'user', 'assistant', 'system' or 'developer'")
        messages.append({"role": role, "content": _text(item.get("content"), f"{param}.content")})
    elif kind == "function_call":
        _add_call(messages, item, param)
    elif kind == "function_call_output":
        call_id = _string(item, "call_id", param)
        content = _text(item.get("output"), f"{param}.output")
        messages.append({"role": "tool", "tool_call_id": call_id, "content": content})
    elif kind == "reasoning":
        call.warn(f"{param} is reasoning, which is not supported, and was ignored")
    else:
        expected = "'message', 'function_call' or 'function_call_output'"
        raise wrong_value(f"{param}.type", kind, expected)


def _add_call(messages: list[JsonObject], item: JsonObject, param: str) -> None:
    call = {
        "id": _string(item, "call_id", param),
        "type": "function",
        "function": {
            "name": flat_name(item.get("namespace"), _string(item, "name", param)),
            "arguments": _string(item, "arguments", param),
        },
    }
    # Calls of one turn are one message, together with the text before them.
    if messages and messages[-1]["role"] == "assistant":
        messages[-1].setdefault("tool_calls", []).append(call)
    else:
        messages.append({"role": "assistant", "content": None, "tool_calls": [call]})


def _text(content: object, param: str) -> str:
    if isinstance(content, str):
        return content
    if not isinstance(content, list):
        raise wrong_value(param, content, "text, or a list of text parts")
    texts = []
    for place, part in enumerate(content):
        kind = part.get("type") if isinstance(part, dict) else None
        field = _TEXT_PARTS.get(kind) if isinstance(kind, str) else None
        if field is None:
            raise wrong_value(f"{param}[{place}].type", kind, "'input_text' or 'output_text'")
        text = part.get(field)
        if not isinstance(text, str):
            raise wrong_value(f"{param}[{place}].{field}", text, "text")
        texts.append(text)
    return "\n".join(texts)


def _string(item: JsonObject, name: str, param: str) -> str:
    value = item.get(name)
    if not isinstance(value, str):
        raise wrong_value(f"{param}.{name}", value, "text")
    return value


def _response_format(call: Call, sent: TextOptions | None) -> JsonObject | None:
    if sent is None:
        return None
    if sent.verbosity is not None:
        call.warn("text.verbosity is not supported and was ignored")
    if sent.format is None or sent.format.get("type") != "json_schema":
        return sent.format
    rest = {name: value for name, value in sent.format.items() if name != "type"}
    return {"type": "json_schema", "json_schema": rest}


def _nested(tool: JsonObject, param: str) -> JsonObject:
    if not isinstance(tool, dict) or tool.get("type") != "function":
        found = tool.get("type") if isinstance(tool, dict) else tool
        raise wrong_value(f"{param}.type", found, "'function': the server has no tools of its own")
    rest = {name: value for name, value in tool.items() if name != "type"}
    return {"type": "function", "function": rest}


def _nested_choice(sent: str | JsonObject | None) -> str | JsonObject | None:
    if not isinstance(sent, dict):
        return sent
    rest = {name: value for name, value in sent.items() if name != "type"}
    if sent.get("type") == "function":
        return {"type": "function", "function": rest}
    if sent.get("type") == "allowed_tools":
        tools = sent.get("tools")
        if not isinstance(tools, list):
            raise wrong_value("tool_choice.tools", tools, "a list of tools")
        nested = [_nested(tool, f"tool_choice.tools[{i}]") for i, tool in enumerate(tools)]
        return {"type": "allowed_tools", "allowed_tools": {**rest, "tools": nested}}
    return sent
