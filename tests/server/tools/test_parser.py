"""The parser of tool calls: the same calls however the text is cut, as a slow reader finds them."""

from __future__ import annotations

import json
import re
from itertools import pairwise
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from headrace.server.tools.formats import HERMES, LLAMA, MISTRAL, ToolFormat
from headrace.server.tools.parser import (
    CallEnd,
    CallParser,
    Content,
    ParsedAnswer,
    parse_answer,
)

Call = tuple[str, dict[str, Any]]

NAMES = st.from_regex(r"[A-Za-z0-9_-]{1,12}", fullmatch=True)
# Strings that look like what the parser looks for.
TEXTS = st.lists(
    st.sampled_from(
        [
            *("<tool_call>", "</tool_call>", "<tool_", "[TOOL_CALLS]", "[TOOL", '{"name": "'),
            *("}", "{", '"', "\\", "\n", "]", " ", "é", "🙂", "a", "<", '\\"', ", "),
        ]
    ),
    max_size=6,
).map("".join)
VALUES = st.recursive(
    st.none() | st.booleans() | st.integers(-99, 99) | TEXTS,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(TEXTS, inner, max_size=3),
    max_leaves=5,
)
CALLS = st.tuples(NAMES, st.dictionaries(TEXTS, VALUES, max_size=3))


def written(tool_format: ToolFormat, text: str, calls: list[Call]) -> str:
    """An answer as the model's documentation has it."""
    if not calls:
        return text
    key = "parameters" if tool_format is LLAMA else "arguments"
    bodies = [json.dumps({"name": name, key: found}) for name, found in calls]
    if tool_format is LLAMA:
        return bodies[0]
    if tool_format is MISTRAL:
        return f"{text}[TOOL_CALLS] [{', '.join(bodies)}]"
    return text + "\n".join(f"<tool_call>\n{body}\n</tool_call>" for body in bodies)


def read_slowly(tool_format: ToolFormat, answer: str) -> tuple[str, list[tuple[str, str]]]:
    """With the whole text there, and a JSON parser for what is JSON: content, and whole calls."""
    decoder, calls = json.JSONDecoder(), []
    opening = {HERMES.opening: HERMES, MISTRAL.opening: MISTRAL}
    if tool_format is LLAMA:
        if not answer.startswith('{"name": "'):
            return ("" if '{"name": "'.startswith(answer) else answer), []
        content, rest = "", answer
    else:
        assert tool_format.opening in opening
        content, tag, rest = answer.partition(tool_format.opening)
        if not tag:
            return content, []
        content = content.rstrip()
    name = re.compile(r'[\s<>_a-z\[,]*\{"name": "([^"]*)", "(?:arguments|parameters)": (?=\{)')
    while found := name.match(rest):
        try:
            _, end = decoder.raw_decode(rest, found.end())
        except ValueError:
            break
        calls.append((found[1], rest[found.end() : end]))
        rest = re.sub(r"^\}(\n</tool_call>)?", "", rest[end:])
    return content, calls


@st.composite
def answers(draw: st.DrawFn) -> tuple[ToolFormat, str, list[int]]:
    tool_format = draw(st.sampled_from([HERMES, LLAMA, MISTRAL]))
    calls = draw(st.lists(CALLS, max_size=1 if tool_format is LLAMA else 3))
    text = draw(TEXTS)
    if tool_format.opening:
        text = text.replace(tool_format.opening, "")
    elif text.startswith("{"):  # the grammar's rule
        text = "x" + text
    answer = written(tool_format, text, calls)
    if draw(st.booleans()):  # cut off
        answer = answer[: draw(st.integers(0, len(answer)))]
    cuts = draw(st.lists(st.integers(0, len(answer)), max_size=12).map(sorted))
    return tool_format, answer, cuts


@given(answers())
def test_any_cutting_gives_what_the_slow_reader_finds(
    found: tuple[ToolFormat, str, list[int]],
) -> None:
    tool_format, answer, cuts = found
    ends = [0, *cuts, len(answer)]
    parser, parsed = CallParser(tool_format), ParsedAnswer()
    for start, end in pairwise(ends):
        parsed.add(parser.push(answer[start:end]))
    parsed.add(parser.finish())
    content, calls = read_slowly(tool_format, answer)
    assert parsed.content == content
    assert [(call.name, call.arguments) for call in parsed.whole_calls] == calls
    assert parser.whole_calls == len(calls)


@given(answers())
def test_one_character_at_a_time(found: tuple[ToolFormat, str, list[int]]) -> None:
    tool_format, answer, _ = found
    parser, parsed = CallParser(tool_format), ParsedAnswer()
    for character in answer:
        parsed.add(parser.push(character))
    parsed.add(parser.finish())
    whole = parse_answer(tool_format, answer)
    assert parsed.content == whole.content
    assert [(c.name, c.arguments, c.is_whole) for c in parsed.calls] == [
        (c.name, c.arguments, c.is_whole) for c in whole.calls
    ]


def test_text_comes_at_once_and_a_tag_never() -> None:
    parser = CallParser(HERMES)
    assert parser.push("Let me look") == [Content("Let me look")]
    assert parser.push(" it up.\n") == [Content(" it up.")]
    assert parser.push("<tool") == []
    assert parser.push("box>") == [Content("\n<toolbox>")]


def test_arguments_come_as_they_are_written() -> None:
    parser = CallParser(HERMES)
    [start] = parser.push('<tool_call>\n{"name": "look", "arguments": ')
    pieces = [parser.push(part) for part in ('{"at"', ': "}', '\\"', '"', "}}\n</tool_call>")]
    texts = [piece.text for pushed in pieces for piece in pushed if hasattr(piece, "text")]
    assert texts == ['{"at"', ': "}', '\\"', '"', "}"]
    assert pieces[-1][-1] == CallEnd(0)
    assert getattr(start, "name", None) == "look"


@pytest.mark.parametrize("tool_format", [HERMES, LLAMA, MISTRAL])
def test_what_is_written_out_is_read_back(tool_format: ToolFormat) -> None:
    calls: list[Call] = [("a", {"x": 'é"}\n'}), ("b", {})][: 1 if tool_format is LLAMA else 2]
    parsed = parse_answer(tool_format, tool_format.write(calls))
    assert [(c.name, json.loads(c.arguments)) for c in parsed.whole_calls] == calls
    assert parsed.content == ""


def test_ids_are_of_the_form_a_template_wants() -> None:
    assert re.fullmatch(r"[A-Za-z0-9]{9}", MISTRAL.new_id())
    assert HERMES.new_id() != HERMES.new_id()


def test_a_broken_form_is_handed_on_as_text() -> None:
    parsed = parse_answer(HERMES, "a <tool_call>nonsense")
    assert (parsed.content, parsed.calls) == ("anonsense", [])
