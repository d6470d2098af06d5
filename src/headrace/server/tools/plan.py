"""Tool calling: turns a request's tool fields into a plan for its prompt, grammar and answer.

OpenAI's `tools`, `tool_choice` and `parallel_tool_calls`. Arguments always parse and fit their
schema, because the grammar allows nothing else. Knows the model's template and vocabulary; formats,
messages and answers are in the files beside it.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, Literal

from headrace.core.bounds import TOOLS
from headrace.core.constraint import GrammarKind, GrammarSpec
from headrace.core.errors import InvalidRequestError
from headrace.server.request.structured import check_schema, check_size, dump_json, wrong_value
from headrace.server.tools.formats import (
    HERMES,
    Tool,
    ToolFormat,
    find_format,
    find_tag_ids,
    write_grammar,
)
from headrace.server.tools.messages import parse_arguments, write_out
from headrace.server.tools.parser import CallParser
from headrace.tokenizer.tokenizer import Tokenizer

JsonObject = dict[str, Any]

_NAME = re.compile(r"[A-Za-z0-9_.:/-]{1,128}")


@dataclass(frozen=True, slots=True, kw_only=True)
class ToolUse:
    """How one request is prompted and its answer parsed. Without tools only the messages change."""

    messages: list[JsonObject]  # for the template
    template_tools: list[JsonObject] | None
    grammar: GrammarSpec | None
    shown_ids: frozenset[int] = frozenset()  # control tokens that belong to the text
    tool_format: ToolFormat | None = None
    is_named: bool = False  # the client chose the function, the model writes only its arguments

    def called_reason(self, reason: str) -> str:
        """The finish_reason, in a chat, of an answer with complete calls. As in OpenAI's API, a
        call to a function that the client named ends like any other answer."""
        return "tool_calls" if reason == "stop" and not self.is_named else reason

    def new_parser(self) -> CallParser | None:
        """A parser for one answer; None where it can't have calls."""
        return CallParser(self.tool_format) if self.tool_format is not None else None


@dataclass(frozen=True, slots=True, kw_only=True)
class _Choice:
    mode: Literal["auto", "none", "required"]
    names: frozenset[str] | None = None  # of the tools that may be called; None: all
    is_named: bool = False  # one function, chosen by name: it is called once


def plan_tools(
    tokenizer: Tokenizer,
    messages: Sequence[Mapping[str, Any]],
    *,
    tools: Sequence[JsonObject] | None,
    tool_choice: str | JsonObject | None = None,
    parallel: bool | None = None,
    answer: GrammarSpec | None = None,
    max_bytes: int,
) -> ToolUse:
    """`answer` is the grammar of the request's response_format."""
    known = find_format(tokenizer.chat_template or "")
    tool_format = known or HERMES
    TOOLS.check("tools", len(tools or ()))
    declared = [_read_tool(tool, f"tools[{i}]", max_bytes) for i, tool in enumerate(tools or ())]
    _check_names(declared)
    choice = _read_choice(tool_choice, declared)
    offered = [] if choice.mode == "none" else list(tools or ())
    many = parallel is not False and not choice.is_named and tool_format.again is not None
    if known is None:
        prepared = write_out(messages, offered, tool_format, parallel=many)
    else:
        prepared = parse_arguments(messages)
    if not offered:
        return ToolUse(messages=prepared, template_tools=None, grammar=answer)
    tag_ids = _tag_ids(tool_format, tokenizer)
    source = write_grammar(
        tool_format,
        [tool for tool in declared if choice.names is None or tool.name in choice.names],
        tag_ids,
        forced=choice.mode == "required",
        parallel=many,
        answer=None if choice.mode == "required" else _answer_schema(answer, tool_format),
    )
    check_size("tools", source, max_bytes)
    return ToolUse(
        messages=prepared,
        template_tools=None if known is None else offered,
        grammar=GrammarSpec(kind=GrammarKind.LARK, source=source, param="tools"),
        shown_ids=frozenset(tag_ids.values()),
        tool_format=tool_format,
        is_named=choice.is_named,
    )


@lru_cache(maxsize=8)
def _tag_ids(tool_format: ToolFormat, tokenizer: Tokenizer) -> Mapping[str, int]:
    return find_tag_ids(tool_format, tokenizer)


def _read_tool(sent: JsonObject, param: str, max_bytes: int) -> Tool:
    if not isinstance(sent, dict) or sent.get("type") != "function":
        found = sent.get("type") if isinstance(sent, dict) else sent
        raise wrong_value(f"{param}.type", found, "'function', the only kind of tool there is here")
    function = sent.get("function")
    if not isinstance(function, dict):
        raise wrong_value(f"{param}.function", function, "an object with name and parameters")
    name = function.get("name")
    if not isinstance(name, str) or not _NAME.fullmatch(name):
        raise wrong_value(f"{param}.function.name", name, "1 to 128 letters, digits and _ . : / -")
    if not isinstance(function.get("description"), str | None):
        raise wrong_value(f"{param}.function.description", function["description"], "text")
    strict = function.get("strict")
    if not isinstance(strict, bool | None):
        raise wrong_value(f"{param}.function.strict", strict, "true or false")
    where = f"{param}.function.parameters"
    parameters = _read_parameters(function.get("parameters"), where, max_bytes)
    return Tool(name=name, parameters=parameters, strict=bool(strict))


def _read_parameters(sent: object, param: str, max_bytes: int) -> JsonObject:
    if sent is None or sent == {}:
        return {"type": "object", "properties": {}, "additionalProperties": False}
    if not isinstance(sent, dict):
        raise wrong_value(param, sent, "a JSON schema")
    if sent.get("type", "object") != "object":
        raise wrong_value(f"{param}.type", sent["type"], "'object': arguments have names")
    check_schema(param, sent)
    check_size("tools", dump_json(param, sent), max_bytes)
    return {"type": "object", **sent}


def _check_names(tools: Sequence[Tool]) -> None:
    names = [tool.name for tool in tools]
    if twice := sorted({name for name in names if names.count(name) > 1}):
        raise wrong_value("tools", f"two functions named {twice[0]}", "different names")


def _read_choice(sent: str | JsonObject | None, tools: Sequence[Tool]) -> _Choice:
    if sent is None or sent == "auto":
        return _Choice(mode="auto")
    if sent == "none":
        return _Choice(mode="none")
    if not tools:
        raise InvalidRequestError(
            "tool_choice asks for a call, but the request has no tools.",
            "Send tools, or leave tool_choice out.",
            param="tool_choice",
        )
    if sent == "required":
        return _Choice(mode="required")
    if isinstance(sent, dict) and sent.get("type") == "function":
        names = _known_names([sent], tools, "tool_choice")
        return _Choice(mode="required", names=names, is_named=True)
    if isinstance(sent, dict) and sent.get("type") == "allowed_tools":
        return _read_allowed(sent.get("allowed_tools"), tools)
    expected = "'none', 'auto', 'required', or {'type': 'function', 'function': {'name': ...}}"
    raise wrong_value("tool_choice", sent, expected)


def _read_allowed(sent: object, tools: Sequence[Tool]) -> _Choice:
    param = "tool_choice.allowed_tools"
    if not isinstance(sent, dict) or not isinstance(sent.get("tools"), list) or not sent["tools"]:
        raise wrong_value(param, sent, "an object with mode and tools")
    TOOLS.check(f"{param}.tools", len(sent["tools"]))
    names = _known_names(sent["tools"], tools, f"{param}.tools")
    if sent.get("mode") == "auto":
        return _Choice(mode="auto", names=names)
    if sent.get("mode") == "required":
        return _Choice(mode="required", names=names)
    raise wrong_value(f"{param}.mode", sent.get("mode"), "'auto' or 'required'")


def _known_names(sent: Sequence[Any], tools: Sequence[Tool], param: str) -> frozenset[str]:
    known = {tool.name for tool in tools}
    found = set()
    for each in sent:
        function = each.get("function") if isinstance(each, dict) else None
        name = function.get("name") if isinstance(function, dict) else None
        if not isinstance(name, str) or name not in known:
            raise wrong_value(f"{param}.function.name", name, f"one of {', '.join(sorted(known))}")
        found.add(name)
    return frozenset(found)


def _answer_schema(answer: GrammarSpec | None, tool_format: ToolFormat) -> JsonObject | None:
    """The form of an answer that is not a call."""
    if answer is None:
        return None
    if answer.kind is GrammarKind.JSON_OBJECT:
        schema: JsonObject = {"type": "object"}
    elif answer.kind is GrammarKind.JSON_SCHEMA:
        schema = json.loads(answer.source)
    else:
        raise InvalidRequestError(
            f"The request has both tools and a {answer.kind.value} for its answer; with tools an "
            "answer can only be constrained by a JSON schema.",
            "Leave one of them out, or set tool_choice to 'none' or 'required'.",
            param="tools",
        )
    if not tool_format.opening:
        raise InvalidRequestError(
            "The request has both tools and a JSON answer, and this model writes calls as JSON "
            "too: they can't be told apart.",
            "Leave one of them out, or set tool_choice to 'none' or 'required'.",
            param="response_format",
        )
    return schema
