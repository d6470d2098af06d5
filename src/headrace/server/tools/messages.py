"""Messages with tools in the form that a model's chat template takes.

Templates that support tools get objects where OpenAI sends JSON as text. For other templates
everything is written as text: the functions into a system message, calls and results into the turns
they belong to. Knows messages; nothing of grammars.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

import msgspec

from headrace.core.bounds import check_json
from headrace.core.errors import InvalidRequestError
from headrace.server.request.structured import wrong_value
from headrace.server.tools.formats import ToolFormat

JsonObject = dict[str, Any]

_EXPLAINED = """You can call functions. Each line here describes one as JSON:
{functions}
To call {which}, write {form} and nothing after it:
{example}
Results come back between <tool_response> and </tool_response>. \
If no function is needed, answer in plain words."""


def parse_arguments(messages: Sequence[Mapping[str, Any]]) -> list[JsonObject]:
    """With the arguments of earlier calls as objects, as templates expect them."""
    return [
        {**message, "tool_calls": _parsed_calls(message["tool_calls"], f"messages[{place}]")}
        if message.get("tool_calls")
        else dict(message)
        for place, message in enumerate(messages)
    ]


def write_out(
    messages: Sequence[Mapping[str, Any]],
    tools: Sequence[JsonObject],
    tool_format: ToolFormat,
    *,
    parallel: bool,
) -> list[JsonObject]:
    """The same messages with only text of system, user and assistant."""
    out: list[JsonObject] = []
    answers: list[str] = []  # results of calls, to be joined in the last message
    for place, message in enumerate(messages):
        role = message.get("role")
        if role == "tool":
            text = f"<tool_response>\n{_joined(message.get('content'))}\n</tool_response>"
            answers.append(text)
            if len(answers) == 1:
                out.append({"role": "user", "content": text})
            continue
        if len(answers) > 1:
            out[-1]["content"] = "\n".join(
                answers
            )  # joined once: appending one by one would take quadratic time
        answers = []
        if message.get("tool_calls"):
            out.append(_written_calls(message, f"messages[{place}]", tool_format))
        else:
            out.append(dict(message))
    if len(answers) > 1:
        out[-1]["content"] = "\n".join(answers)
    return _with_system(out, _explain(tools, tool_format, parallel)) if tools else out


def _explain(tools: Sequence[JsonObject], tool_format: ToolFormat, parallel: bool) -> str:
    shown = tool_format.write([("FUNCTION", {"PARAMETER": "VALUE"})])
    return _EXPLAINED.format(
        functions="\n".join(json.dumps(tool["function"], ensure_ascii=False) for tool in tools),
        which="one or several" if parallel else "one",
        form="this for each" if parallel else "this",
        example=shown,
    )


def _with_system(messages: list[JsonObject], text: str) -> list[JsonObject]:
    if not messages or messages[0].get("role") not in ("system", "developer"):
        return [{"role": "system", "content": text}, *messages]
    first = messages[0]
    content = first.get("content")
    if isinstance(content, list):
        content = [*content, {"type": "text", "text": text}]
    elif isinstance(content, str):
        content = f"{content}\n\n{text}"
    return [{**first, "content": content}, *messages[1:]]


def _written_calls(message: Mapping[str, Any], param: str, tool_format: ToolFormat) -> JsonObject:
    calls = [
        (call["function"]["name"], call["function"]["arguments"])
        for call in _parsed_calls(message["tool_calls"], param)
    ]
    said = _joined(message.get("content"))
    text = tool_format.write(calls)
    rest = {name: value for name, value in message.items() if name != "tool_calls"}
    return {**rest, "content": f"{said}\n{text}" if said else text}


def _parsed_calls(calls: object, param: str) -> list[JsonObject]:
    if not isinstance(calls, list):
        raise wrong_value(f"{param}.tool_calls", calls, "a list of calls")
    return [_parsed_call(call, f"{param}.tool_calls[{i}]") for i, call in enumerate(calls)]


def _parsed_call(call: object, param: str) -> JsonObject:
    function = call.get("function") if isinstance(call, dict) else None
    if not isinstance(call, dict) or not isinstance(function, dict):
        raise wrong_value(param, call, "an object with id, type and function")
    if not isinstance(function.get("name"), str):
        raise wrong_value(f"{param}.function.name", function.get("name"), "text")
    arguments = function.get("arguments")
    if isinstance(arguments, str):
        check_json(arguments.encode("utf-8", "surrogatepass"), f"{param}.function.arguments")
        try:
            arguments = msgspec.json.decode(arguments or "{}")
        except (msgspec.DecodeError, RecursionError, UnicodeError) as error:
            raise InvalidRequestError(
                f"{param}.function.arguments is not JSON: {error}.",
                "Send the arguments as they came.",
                param=f"{param}.function.arguments",
            ) from error
    if not isinstance(arguments, dict):
        raise wrong_value(f"{param}.function.arguments", arguments, "a JSON object")
    return {**call, "function": {**function, "arguments": arguments}}


def _joined(content: object) -> str:
    """The text of a content; the template refuses parts that are not text."""
    if isinstance(content, list):
        texts = [part.get("text") for part in content if isinstance(part, dict)]
        return "\n".join(text for text in texts if isinstance(text, str))
    return content if isinstance(content, str) else ""
