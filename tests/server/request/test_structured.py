"""From a request's fields to the engine's grammar: every name, one at a time, within bounds."""

from __future__ import annotations

import json
from typing import Any

import msgspec
import pytest

from headrace.core.constraint import GrammarKind, GrammarSpec
from headrace.core.errors import InvalidRequestError
from headrace.server.request.structured import MAX_SCHEMA_LEVELS, StructuredFields, grammar_of

SCHEMA = {"type": "object", "properties": {"größe": {"type": "integer"}}}


def read(**fields: Any) -> GrammarSpec | None:
    return grammar_of(msgspec.convert(fields, StructuredFields), 1000)


def json_schema(schema: object) -> dict[str, Any]:
    return {"type": "json_schema", "json_schema": {"name": "it", "schema": schema, "strict": True}}


def test_nothing_asked() -> None:
    assert read() is None
    assert read(response_format={"type": "text"}) is None
    assert read(structured_outputs={"json_object": False}) is None


@pytest.mark.parametrize(
    "fields",
    [
        {"response_format": json_schema(SCHEMA)},
        {"guided_json": SCHEMA},
        {"guided_json": json.dumps(SCHEMA)},
        {"structured_outputs": {"json": SCHEMA}},
        {"structured_outputs": {"json": json.dumps(SCHEMA)}},
    ],
)
def test_a_schema_by_any_name(fields: dict[str, Any]) -> None:
    spec = read(**fields)
    assert spec is not None
    assert spec.kind is GrammarKind.JSON_SCHEMA
    assert json.loads(spec.source) == SCHEMA
    assert "größe" in spec.source  # as itself: the compiler matches text


@pytest.mark.parametrize(
    ("fields", "kind", "source"),
    [
        ({"response_format": {"type": "json_object"}}, GrammarKind.JSON_OBJECT, ""),
        ({"structured_outputs": {"json_object": True}}, GrammarKind.JSON_OBJECT, ""),
        ({"guided_regex": "a+"}, GrammarKind.REGEX, "a+"),
        ({"structured_outputs": {"regex": "a+"}}, GrammarKind.REGEX, "a+"),
        ({"guided_grammar": 'start: "a"'}, GrammarKind.LARK, 'start: "a"'),
        ({"structured_outputs": {"grammar": 'start: "a"'}}, GrammarKind.LARK, 'start: "a"'),
        ({"guided_choice": ["a", "é"]}, GrammarKind.CHOICE, '["a", "é"]'),
        ({"structured_outputs": {"choice": ["a"]}}, GrammarKind.CHOICE, '["a"]'),
    ],
)
def test_every_other_name(fields: dict[str, Any], kind: GrammarKind, source: str) -> None:
    spec = read(**fields)
    assert spec is not None
    assert (spec.kind, spec.source) == (kind, source)
    assert spec.param.partition(".")[0] in fields


def deep(levels: int) -> dict[str, Any]:
    schema: dict[str, Any] = {"type": "string"}
    for _ in range(levels - 1):
        schema = {"not": schema}
    return schema


@pytest.mark.parametrize(
    ("fields", "param", "words"),
    [
        ({"response_format": {"type": "xml"}}, "response_format.type", "'json_object'"),
        ({"response_format": {}}, "response_format.type", "missing"),
        ({"response_format": {"type": "json_schema"}}, "response_format.json_schema", "missing"),
        ({"response_format": json_schema(None)}, "response_format.json_schema.schema", "missing"),
        ({"response_format": json_schema([])}, "response_format.json_schema.schema", "schema"),
        ({"guided_json": "{"}, "guided_json", "not JSON"),
        ({"guided_json": "[]"}, "guided_json", "schema"),
        ({"guided_choice": []}, "guided_choice", "list"),
        ({"guided_choice": [""]}, "guided_choice", "none of them empty"),
        ({"guided_regex": ""}, "guided_regex", "text"),
        (
            {"guided_regex": "a" * 1001},
            "guided_regex",
            "1001 bytes; this server takes at most 1000",
        ),
        ({"guided_json": {"$comment": "é" * 500}}, "guided_json", "at most 1000"),
        ({"guided_json": deep(MAX_SCHEMA_LEVELS + 1)}, "guided_json", "64 levels"),
        ({"guided_json": SCHEMA, "guided_regex": "a"}, "guided_regex", "2 times"),
        ({"structured_outputs": {"regex": "a", "choice": ["a"]}}, None, "2 times"),
        ({"guided_json": {"const": "\ud800"}}, "guided_json", "JSON"),
    ],
)
def test_refused(fields: dict[str, Any], param: str | None, words: str) -> None:
    with pytest.raises(InvalidRequestError) as caught:
        read(**fields)
    assert words in str(caught.value)
    assert caught.value.remedy
    if param is not None:
        assert caught.value.param == param


def test_as_deep_as_allowed() -> None:
    assert read(guided_json=deep(MAX_SCHEMA_LEVELS)) is not None
