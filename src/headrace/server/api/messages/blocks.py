"""Converts messages made of Anthropic's blocks into the messages of a chat.

In a chat, tool results are separate messages, and consecutive turns of one role are one turn. What
can't be read (images, documents) is refused; what has no effect is dropped with a warning. Knows
both shapes of a message; nothing of the rest of a request.
"""

from __future__ import annotations

from typing import Any

from headrace.core.bounds import PARTS
from headrace.core.errors import InvalidRequestError
from headrace.server.request.call import Call
from headrace.server.request.prompts import check_messages
from headrace.server.request.structured import wrong_value

JsonObject = dict[str, Any]

# Claude Code's first system block has billing data that differs each time: it is of no use to a
# model, and with it no prefix would ever be found in the cache.
_BILLING = "x-anthropic-billing-header:"
_SKIPPED = ("thinking", "redacted_thinking")  # from another model's answers
_ROLES = ("user", "assistant", "system")


def chat_messages(
    call: Call, system: str | list[JsonObject] | None, sent: list[JsonObject]
) -> list[JsonObject]:
    messages: list[JsonObject] = []
    if system:
        text = system if isinstance(system, str) else _system_text(call, system)
        if text:
            messages.append({"role": "system", "content": text})
    check_messages(sent)
    for place, message in enumerate(sent):
        role, param = message.get("role"), f"messages[{place}]"
        if role not in _ROLES:
            raise wrong_value(f"{param}.role", role, "'user' or 'assistant'")
        blocks = _blocks(message.get("content"), f"{param}.content")
        if role == "assistant":
            _add_answer(call, messages, blocks, f"{param}.content")
        else:
            _add_said(call, messages, role, blocks, f"{param}.content")
    return [_joined(message) for message in messages]


def _system_text(call: Call, blocks: list[JsonObject]) -> str:
    PARTS.check("system", len(blocks))
    texts = [_text(call, block, f"system[{place}]") for place, block in enumerate(blocks)]
    return "\n".join(text for text in texts if text and not text.startswith(_BILLING))


def _add_said(
    call: Call, messages: list[JsonObject], role: str, blocks: list[JsonObject], param: str
) -> None:
    texts: list[str] = []
    for place, block in enumerate(blocks):
        where = f"{param}[{place}]"
        if block.get("type") == "tool_result":
            _add_text(messages, role, texts)
            texts = []
            messages.append(_result(call, block, where))
        elif (text := _text(call, block, where)) is not None:
            texts.append(text)
    if texts or not blocks:
        _add_text(messages, role, texts or [""])


def _add_text(messages: list[JsonObject], role: str, texts: list[str]) -> None:
    if not texts:
        return
    last = messages[-1] if messages else None
    if last is not None and last["role"] == role and "tool_calls" not in last:
        if not isinstance(last["content"], list):
            last["content"] = [last["content"]]
        last["content"] += texts
    else:
        messages.append({"role": role, "content": list(texts)})


def _joined(message: JsonObject) -> JsonObject:
    """Joins the texts at the end: appending one by one would take quadratic time."""
    content = message["content"]
    return {**message, "content": "\n".join(content)} if isinstance(content, list) else message


def _add_answer(
    call: Call, messages: list[JsonObject], blocks: list[JsonObject], param: str
) -> None:
    texts: list[str] = []
    calls: list[JsonObject] = []
    for place, block in enumerate(blocks):
        where = f"{param}[{place}]"
        if block.get("type") == "tool_use":
            calls.append(_call(block, where))
        elif (text := _text(call, block, where)) is not None:
            texts.append(text)
    if not calls:
        _add_text(messages, "assistant", texts or [""])
        return
    said = "\n".join(texts)
    last = messages[-1] if messages else None
    if last is not None and last["role"] == "assistant" and "tool_calls" not in last:
        said = "\n".join(filter(None, [_joined(messages.pop())["content"], said]))
    messages.append({"role": "assistant", "content": said or None, "tool_calls": calls})


def _call(block: JsonObject, param: str) -> JsonObject:
    arguments = block.get("input")
    if not isinstance(arguments, dict):
        raise wrong_value(f"{param}.input", arguments, "an object")
    function = {"name": _string(block, "name", param), "arguments": arguments}
    return {"id": _string(block, "id", param), "type": "function", "function": function}


def _result(call: Call, block: JsonObject, param: str) -> JsonObject:
    content = block.get("content")
    blocks = [] if content is None else _blocks(content, f"{param}.content")
    texts = [_text(call, each, f"{param}.content[{i}]") for i, each in enumerate(blocks)]
    text = "\n".join(text for text in texts if text)
    if block.get("is_error"):
        text = f"Error: {text}" if text else "Error"
    return {"role": "tool", "tool_call_id": _string(block, "tool_use_id", param), "content": text}


def _blocks(content: object, param: str) -> list[JsonObject]:
    if isinstance(content, str):
        return [{"type": "text", "text": content}]
    if not isinstance(content, list) or not all(isinstance(block, dict) for block in content):
        raise wrong_value(param, content, "text, or a list of blocks")
    return content


def _text(call: Call, block: JsonObject, param: str) -> str | None:
    """None where it has no content."""
    kind = block.get("type")
    if kind == "text":
        return _string(block, "text", param)
    if isinstance(kind, str) and kind in _SKIPPED:
        call.warn(f"{param} is {kind}, which is not supported, and was ignored")
        return None
    if kind in ("image", "document"):
        raise InvalidRequestError(
            f"{param} is a block of type {kind!r}; this server reads only text.",
            "Send its content as a text block.",
            param=f"{param}.type",
        )
    raise wrong_value(f"{param}.type", kind, "'text', 'tool_use' or 'tool_result'")


def _string(block: JsonObject, name: str, param: str) -> str:
    value = block.get(name)
    if not isinstance(value, str):
        raise wrong_value(f"{param}.{name}", value, "text")
    return value
