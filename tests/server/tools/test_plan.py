"""What a request says about tools becomes a prompt, a grammar and a way to read the answer."""

from __future__ import annotations

import json
from typing import Any

import pytest

from headrace.core.constraint import GrammarKind, GrammarSpec
from headrace.core.errors import InvalidRequestError
from headrace.server.tools.formats import HERMES, LLAMA, MISTRAL
from headrace.server.tools.plan import ToolUse, plan_tools

WEATHER = {
    "type": "function",
    "function": {
        "name": "weather",
        "description": "The weather of a city.",
        "parameters": {"type": "object", "properties": {"city": {"type": "string"}}},
    },
}
NOW = {"type": "function", "function": {"name": "now"}}
USER = {"role": "user", "content": "How is Paris?"}
CALL = {
    "role": "assistant",
    "content": None,
    "tool_calls": [
        {
            "id": "call_1",
            "type": "function",
            "function": {"name": "weather", "arguments": '{"city": "Paris"}'},
        }
    ],
}
RESULT = {"role": "tool", "tool_call_id": "call_1", "content": "rain"}
KNOWN = "{% if tools %}{{ tools | tojson }}<tool_call>{% endif %}"


class _Vocabulary:
    """As much of a Tokenizer as planning looks at."""

    def __init__(self, chat_template: str, special: dict[int, str] | None = None) -> None:
        self.chat_template = chat_template
        self._special = special or {}
        self.special_ids = frozenset(self._special)

    def piece(self, token_id: int) -> str:
        return self._special[token_id]


def plan(
    messages: list[dict[str, Any]],
    *,
    template: str = "{{ messages }}",
    special: dict[int, str] | None = None,
    tools: list[dict[str, Any]] | None = None,
    tool_choice: str | dict[str, Any] | None = None,
    parallel: bool | None = None,
    answer: GrammarSpec | None = None,
    max_bytes: int = 10_000,
) -> ToolUse:
    return plan_tools(
        _Vocabulary(template, special),  # type: ignore[arg-type]
        messages,
        tools=tools,
        tool_choice=tool_choice,
        parallel=parallel,
        answer=answer,
        max_bytes=max_bytes,
    )


def source(use: ToolUse) -> str:
    assert use.grammar is not None
    assert use.grammar.kind is GrammarKind.LARK
    return use.grammar.source


def test_without_tools_nothing_changes() -> None:
    answer = GrammarSpec(kind=GrammarKind.REGEX, source="a")
    use = plan([USER], answer=answer)
    assert use == ToolUse(messages=[USER], template_tools=None, grammar=answer)
    assert use.new_parser() is None


def test_a_template_that_knows_tools_gets_them() -> None:
    use = plan([USER, CALL, RESULT], template=KNOWN, tools=[WEATHER])
    assert use.template_tools == [WEATHER]
    assert use.tool_format is HERMES
    assert use.messages[1]["tool_calls"][0]["function"]["arguments"] == {"city": "Paris"}
    assert use.messages[2] == RESULT
    assert CALL["tool_calls"][0]["function"]["arguments"] == '{"city": "Paris"}'  # type: ignore[index]


def test_other_models_get_everything_as_text() -> None:
    use = plan([USER, CALL, RESULT, RESULT, USER], tools=[WEATHER, NOW])
    assert use.template_tools is None
    system, user, call, results, again = use.messages
    assert system["role"] == "system"
    described = [line for line in system["content"].splitlines() if line.startswith('{"name": ')]
    assert [json.loads(line)["name"] for line in described[:2]] == ["weather", "now"]
    assert HERMES.write([("FUNCTION", {"PARAMETER": "VALUE"})]) in system["content"]
    assert (user, again) == (USER, USER)
    assert call == {
        "role": "assistant",
        "content": '<tool_call>\n{"name": "weather", "arguments": {"city": "Paris"}}\n</tool_call>',
    }
    assert results["role"] == "user"
    assert results["content"].count("<tool_response>\nrain\n</tool_response>") == 2


def test_the_system_message_keeps_its_words() -> None:
    parts = {"role": "system", "content": [{"type": "text", "text": "Be kind."}]}
    for first in ({"role": "system", "content": "Be kind."}, parts):
        use = plan([first, USER], tools=[NOW])
        assert len(use.messages) == 2
        assert json.dumps(use.messages[0]["content"]).find("Be kind.") >= 0
        assert "<tool_call>" in json.dumps(use.messages[0]["content"])


def test_choices() -> None:
    tools = [WEATHER, NOW]
    named = {"type": "function", "function": {"name": "now"}}
    allowed = {"type": "allowed_tools", "allowed_tools": {"mode": "auto", "tools": [named]}}
    free, forced = (
        source(plan([USER], tools=tools)),
        plan([USER], tools=tools, tool_choice="required"),
    )
    assert "TEXT" in free
    assert "TEXT" not in source(forced)
    assert "weather" in source(forced)
    one = source(plan([USER], tools=tools, tool_choice=named))
    assert "now" in one
    assert "weather" not in one
    assert "TEXT" not in one
    assert "){0," not in one  # called once
    some = source(plan([USER], tools=tools, tool_choice=allowed))
    assert "weather" not in some
    assert "TEXT" in some
    none = plan([USER], tools=tools, tool_choice="none", template=KNOWN)
    assert none == ToolUse(messages=[USER], template_tools=None, grammar=None)
    assert "){0,15}" in free  # up to 16 calls
    assert "){0," not in source(plan([USER], tools=tools, parallel=False))


def test_tags_that_are_control_tokens() -> None:
    template = "{% if tools %}[TOOL_CALLS]{% endif %}"
    use = plan([USER], template=template, special={5: "[TOOL_CALLS]", 1: "<s>"}, tools=[NOW])
    assert use.tool_format is MISTRAL
    assert use.shown_ids == {5}
    assert "<[5]>" in source(use)
    assert "[TOOL_CALLS]" not in source(use)


def test_an_answer_in_json_beside_tools() -> None:
    schema = GrammarSpec(kind=GrammarKind.JSON_SCHEMA, source='{"const": "yes"}')
    assert '"const": "yes"' in source(plan([USER], tools=[NOW], answer=schema))
    assert "yes" not in source(plan([USER], tools=[NOW], answer=schema, tool_choice="required"))
    use = plan([USER], tools=[NOW], answer=schema, tool_choice="none")
    assert use.grammar == schema
    regex = GrammarSpec(kind=GrammarKind.REGEX, source="a")
    with pytest.raises(InvalidRequestError, match="JSON schema"):
        plan([USER], tools=[NOW], answer=regex)
    llama = '{% if tools %}"name": x, "parameters": y{% endif %}'
    assert plan([USER], tools=[NOW], template=llama).tool_format is LLAMA
    with pytest.raises(InvalidRequestError, match="told apart"):
        plan([USER], tools=[NOW], answer=schema, template=llama)


def function(**fields: Any) -> list[dict[str, Any]]:
    return [{"type": "function", "function": {"name": "f", **fields}}]


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"tools": [{"type": "custom", "name": "f"}]}, "tools[0].type"),
        ({"tools": [{"type": "function"}]}, "tools[0].function"),
        ({"tools": function(name="a b")}, "tools[0].function.name"),
        ({"tools": function(name='a"')}, "tools[0].function.name"),
        ({"tools": function(name="a" * 129)}, "tools[0].function.name"),
        ({"tools": function(description=3)}, "tools[0].function.description"),
        ({"tools": function(strict="yes")}, "tools[0].function.strict"),
        ({"tools": function(parameters=[])}, "tools[0].function.parameters"),
        ({"tools": function(parameters={"type": "string"})}, "tools[0].function.parameters.type"),
        ({"tools": function(parameters={"const": float("nan")})}, "tools[0].function.parameters"),
        ({"tools": [NOW, NOW]}, "tools"),
        ({"tools": function(description="x" * 3000, parameters={"title": "y" * 9990})}, "tools"),
        ({"tools": [function(name=f"f{i}")[0] for i in range(129)]}, "tools"),
        ({"tool_choice": "required"}, "tool_choice"),
        ({"tools": [NOW], "tool_choice": "always"}, "tool_choice"),
        ({"tools": [NOW], "tool_choice": {"type": "function"}}, "tool_choice.function.name"),
        (
            {"tools": [NOW], "tool_choice": {"type": "function", "function": {"name": "x"}}},
            "tool_choice.function.name",
        ),
    ],
)
def test_refused(fields: dict[str, Any], param: str) -> None:
    with pytest.raises(InvalidRequestError) as caught:
        plan([USER], **fields)
    assert caught.value.param == param


@pytest.mark.parametrize(
    ("call", "param"),
    [
        ({"tool_calls": {}}, None),
        ({"tool_calls": ["x"]}, "messages[0].tool_calls[0]"),
        ({"tool_calls": [{"function": {}}]}, "messages[0].tool_calls[0].function.name"),
        (
            {"tool_calls": [{"function": {"name": "f", "arguments": "{"}}]},
            "messages[0].tool_calls[0].function.arguments",
        ),
        (
            {"tool_calls": [{"function": {"name": "f", "arguments": "[]"}}]},
            "messages[0].tool_calls[0].function.arguments",
        ),
        ({"tool_calls": "x"}, "messages[0].tool_calls"),
    ],
)
@pytest.mark.parametrize("template", ["{{ messages }}", KNOWN])
def test_calls_from_before_are_checked(
    call: dict[str, Any], param: str | None, template: str
) -> None:
    message = {"role": "assistant", "content": "", **call}
    if param is None:
        assert plan([message], template=template).messages == [message]
        return
    with pytest.raises(InvalidRequestError) as caught:
        plan([message], template=template)
    assert caught.value.param == param
