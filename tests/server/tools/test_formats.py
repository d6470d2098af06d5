"""The grammar of tool calls, walked at random with llguidance itself over a vocabulary of bytes:
whatever it lets through is read back as calls that fit their schemas."""

from __future__ import annotations

import json
import random
from typing import Any

import jsonschema
import llguidance
import pytest

from headrace.server.tools.formats import (
    HERMES,
    LLAMA,
    MAX_CALLS,
    MISTRAL,
    Tool,
    ToolFormat,
    find_format,
    write_grammar,
)
from headrace.server.tools.parser import parse_answer

EOS, TOOL_CALLS, TOOL_CALL = 256, 257, 258
SPECIAL = {TOOL_CALLS: "[TOOL_CALLS]", TOOL_CALL: "<tool_call>"}

CITY = {
    "type": "object",
    "properties": {
        "city": {"type": "string", "maxLength": 5},
        "days": {"type": "integer", "minimum": 1, "maximum": 9},
        "unit": {"enum": ["C", "F"]},
    },
    "required": ["city"],
    "additionalProperties": False,
}
TREE = {
    "$defs": {
        "node": {
            "type": "object",
            "properties": {"next": {"$ref": "#/$defs/node"}},
            "additionalProperties": False,
        }
    },
    "properties": {"root": {"$ref": "#/$defs/node"}},
    "required": ["root"],
    "additionalProperties": False,
}
TOOLS = [
    Tool(name="weather", parameters=CITY),
    Tool(name="weather_tree", parameters={"type": "object", **TREE}),
    Tool(name="now", parameters={"type": "object", "properties": {}, "maxProperties": 0}),
]
SCHEMAS = {tool.name: tool.parameters for tool in TOOLS}


class _Bytes:
    eos_token_id = EOS
    bos_token_id = None
    tokens = [bytes([i]) for i in range(256)] + [b"<eos>", b"[TOOL_CALLS]", b"<tool_call>"]
    special_token_ids = [EOS, TOOL_CALLS, TOOL_CALL]  # noqa: RUF012

    def __call__(self, text: bytes) -> list[int]:
        return list(text)


@pytest.fixture(scope="module")
def vocabulary() -> llguidance.LLTokenizer:
    return llguidance.LLTokenizer(llguidance.TokenizerWrapper(_Bytes()), slices=[])


def start(vocabulary: llguidance.LLTokenizer, lark: str) -> llguidance.LLMatcher:
    matcher = llguidance.LLMatcher(vocabulary, lark, log_level=0)
    assert not matcher.is_error(), matcher.get_error()
    return matcher


def walk(matcher: llguidance.LLMatcher, chance: random.Random, begin: bytes = b"") -> str | None:
    """A random answer that begins so; None if it did not end."""
    text = bytearray(begin)
    assert matcher.consume_tokens(list(begin)), matcher.get_error()
    tokens: list[str] = []
    for _ in range(600):
        mask = matcher.compute_bitmask()
        allowed = [t for t in range(len(_Bytes.tokens)) if mask[t >> 3] >> (t & 7) & 1]
        assert allowed
        # Ends where it may, and prefers what closes: an even draw would rarely come to an end.
        closing = [t for t in allowed if t == EOS or (t < 256 and chr(t) in '"}]<\n')]
        token = chance.choice(closing if closing and chance.random() < 0.6 else allowed)
        if token == EOS:
            break
        tokens.append(SPECIAL.get(token, ""))
        text += SPECIAL[token].encode() if token in SPECIAL else bytes([token])
        assert matcher.consume_token(token)
        if matcher.is_stopped():
            break
    else:
        return None
    return text.decode("utf-8", "replace")


FORMATS = [(HERMES, {}), (HERMES, {"<tool_call>": TOOL_CALL}), (LLAMA, {})]
FORMATS += [(MISTRAL, {}), (MISTRAL, {"[TOOL_CALLS]": TOOL_CALLS})]


@pytest.mark.parametrize(("tool_format", "tag_ids"), FORMATS)
def test_forced_calls_fit_their_schemas(
    vocabulary: llguidance.LLTokenizer, tool_format: ToolFormat, tag_ids: dict[str, int]
) -> None:
    lark = write_grammar(tool_format, TOOLS, tag_ids, forced=True, parallel=True)
    chance, ended, most = random.Random(4), 0, 0
    for _ in range(30):
        answer = walk(start(vocabulary, lark), chance)
        if answer is None:
            continue
        ended += 1
        parsed = parse_answer(tool_format, answer)
        assert parsed.content == ""
        assert parsed.calls == parsed.whole_calls
        assert parsed.calls
        most = max(most, len(parsed.calls))
        for call in parsed.calls:
            jsonschema.validate(json.loads(call.arguments), SCHEMAS[call.name])
    assert ended > 15
    assert most == 1 if tool_format is LLAMA else most > 1


@pytest.mark.parametrize(("tool_format", "tag_ids"), FORMATS)
def test_one_call_where_one_is_asked_for(
    vocabulary: llguidance.LLTokenizer, tool_format: ToolFormat, tag_ids: dict[str, int]
) -> None:
    lark = write_grammar(tool_format, TOOLS[2:], tag_ids, forced=True, parallel=False)
    answer = walk(start(vocabulary, lark), random.Random(0))
    assert answer is not None
    assert [call.name for call in parse_answer(tool_format, answer).whole_calls] == ["now"]


@pytest.mark.parametrize("forced", [True, False])
@pytest.mark.parametrize(("tool_format", "tag_ids"), FORMATS)
def test_calls_are_bounded(
    vocabulary: llguidance.LLTokenizer,
    tool_format: ToolFormat,
    tag_ids: dict[str, int],
    forced: bool,
) -> None:
    """Whoever would go on for ever may end after each call, and must after so many."""
    lark = write_grammar(tool_format, TOOLS[2:], tag_ids, forced=forced, parallel=True)
    most = MAX_CALLS if tool_format.again is not None else 1

    def accepts(count: int) -> bool:
        matcher = start(vocabulary, lark)
        text = tool_format.write([("now", {})] * count)
        for tag, token in tag_ids.items():
            text = text.replace(tag, chr(token))  # a place holder: no byte is so high
        tokens = [t for c in text for t in ([ord(c)] if ord(c) > 255 else c.encode())]
        return all(map(matcher.consume_token, tokens)) and matcher.is_accepting()

    assert all(accepts(count) for count in range(1, most + 1))
    assert not accepts(most + 1)


@pytest.mark.parametrize(("tool_format", "tag_ids"), FORMATS)
def test_free_text_until_a_call_begins(
    vocabulary: llguidance.LLTokenizer, tool_format: ToolFormat, tag_ids: dict[str, int]
) -> None:
    lark = write_grammar(tool_format, TOOLS, tag_ids, forced=False, parallel=True)
    free = start(vocabulary, lark)
    assert free.consume_tokens(list("Any 🙂 text,\n<tool and {such}".encode()))
    assert free.is_accepting()
    chance, called = random.Random(1), 0
    for _ in range(10):
        matcher = start(vocabulary, lark)
        said = "" if tool_format is LLAMA else "Let me see.\n"
        assert matcher.consume_tokens(list(said.encode()))
        opening = tool_format.opening or "{"
        if opening in tag_ids:
            assert matcher.consume_token(tag_ids[opening])
            begin = b""
        else:
            begin = opening.encode()
        answer = walk(matcher, chance, begin)
        if answer is None:
            continue
        full = said + (opening if opening in tag_ids else "") + answer
        parsed = parse_answer(tool_format, full)
        assert parsed.content == said.strip()
        for call in parsed.calls:
            assert call.is_whole
            jsonschema.validate(json.loads(call.arguments), SCHEMAS[call.name])
        called += bool(parsed.calls)
    assert called > 3


def test_nothing_follows_the_calls(vocabulary: llguidance.LLTokenizer) -> None:
    lark = write_grammar(HERMES, TOOLS, {}, forced=False, parallel=True)
    matcher = start(vocabulary, lark)
    assert matcher.consume_tokens(list(HERMES.write([("now", {})]).encode()))
    assert matcher.is_accepting()
    assert not matcher.consume_token(ord("x"))


def test_an_answer_of_json_or_a_call(vocabulary: llguidance.LLTokenizer) -> None:
    schema: dict[str, Any] = {"type": "object", "properties": {"a": {"const": 1}}}
    schema |= {"required": ["a"], "additionalProperties": False}
    lark = write_grammar(HERMES, TOOLS, {}, forced=False, parallel=True, answer=schema)
    for good in ('{"a": 1}', HERMES.write([("now", {})])):
        matcher = start(vocabulary, lark)
        assert matcher.consume_tokens(list(good.encode()))
        assert matcher.is_accepting()
    assert not start(vocabulary, lark).consume_token(ord("x"))


def test_unknown_keywords_are_refused_by_strict_tools_only(
    vocabulary: llguidance.LLTokenizer,
) -> None:
    odd = {"type": "object", "properties": {"a": {"type": "array", "uniqueItems": True}}}
    for strict in (False, True):
        tools = [Tool(name="f", parameters=odd, strict=strict)]
        lark = write_grammar(HERMES, tools, {}, forced=True, parallel=True)
        matcher = llguidance.LLMatcher(vocabulary, lark, log_level=0)
        assert matcher.is_error() is strict
        assert ("uniqueItems" in matcher.get_error()) is strict


QWEN = "{%- if tools %}<tools>{% for tool in tools %}{{ tool | tojson }}{% endfor %}<tool_call>"


@pytest.mark.parametrize(
    ("template", "found"),
    [
        ("{% for message in messages %}{{ message.content }}{% endfor %}", None),
        (QWEN, HERMES),
        (QWEN + "<function=", None),
        ("{% if tools is not none %}[AVAILABLE_TOOLS]{% endif %}[TOOL_CALLS] [", MISTRAL),
        ('{% if tools %}{\'"name": function name, "parameters": dict\'}{% endif %}', LLAMA),
        ("{% if tools %}<|tool_call_begin|>{% endif %}", None),
    ],
)
def test_the_format_shows_in_the_template(template: str, found: ToolFormat | None) -> None:
    assert find_format(template) is found


def test_after_the_tag_nothing_but_a_call(vocabulary: llguidance.LLTokenizer) -> None:
    lark = write_grammar(HERMES, TOOLS, {}, forced=False, parallel=True)
    matcher = start(vocabulary, lark)
    assert matcher.consume_tokens(list(b"Well: <tool_call>"))
    assert not matcher.is_accepting()
    assert not matcher.consume_token(ord("x"))
