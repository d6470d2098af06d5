"""Grammars for the fuzzer: good ones, broken ones, and those that have hurt a compiler somewhere.

Schemas, regexes, choices, Lark and GBNF; each as the fields of a request that ask for it. Hostile
ones are kept apart, so that a run can leave them out. Knows grammars; no endpoint.
"""

from __future__ import annotations

import random
from typing import Any

import fuzz_values

Chooser = random.Random

SCHEMAS: tuple[dict[str, Any], ...] = (
    {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]},
    {"type": "string", "maxLength": 4},
    {"type": "array", "items": {"type": "boolean"}, "minItems": 1, "maxItems": 2},
    {"enum": ["yes", "no", 1, None]},
    {"const": {"a": [1, 2]}},
    {"anyOf": [{"type": "integer"}, {"type": "null"}]},
    {"type": "number", "minimum": 0, "maximum": 1, "multipleOf": 0.25},
    {"type": "string", "pattern": "^[a-c]{1,3}$"},
    {"type": "string", "format": "date-time"},
    {"$ref": "#/$defs/x", "$defs": {"x": {"type": "integer", "minimum": -3}}},
    {"type": "object", "patternProperties": {"^a": {"type": "integer"}}},
    {"type": "object", "additionalProperties": False},
    {"type": ["integer", "string"]},
    {},
)
BROKEN_SCHEMAS: tuple[Any, ...] = (
    {"type": "nothing"},
    {"type": 1},
    {"$ref": "#/$defs/missing"},
    {"$ref": "http://127.0.0.1:9/schema.json"},
    {"$ref": "#"},
    {"$defs": {"a": {"$ref": "#/$defs/b"}, "b": {"$ref": "#/$defs/a"}}, "$ref": "#/$defs/a"},
    {"pattern": "(", "type": "string"},
    {"type": "string", "pattern": "(?=a)b"},
    {"type": "string", "minLength": 5, "maxLength": 2},
    {"type": "integer", "multipleOf": 0},
    {"type": "integer", "multipleOf": 1e-300},
    {"minimum": "a", "type": "integer"},
    {"enum": []},
    {"allOf": [{"type": "integer"}, {"type": "string"}]},
    {"not": {}},
    {"if": {"type": "integer"}, "then": {"minimum": 1}, "else": {}},
    {"properties": {"a": 3}},
    {"required": "a"},
    {"type": "object", "properties": {"\ud800": {}}},
    {"type": "array", "minItems": 10**9},
    {"type": "string", "minLength": 10**9},
    {"unevaluatedProperties": False, "propertyNames": {"pattern": "x"}},
)
REGEXES = (
    "(yes|no)",
    "[0-9]{1,3}",
    "a*",
    ".",
    "",
    "[^a]b?",
    "(?i)yes",
    "\\d+\\.\\d",
    "é|日",
    "x{0}",
)
BROKEN_REGEXES = (
    "(",
    "[",
    "a{2,1}",
    "*",
    "(?=a)",
    "\\1",
    "a{99999999}",
    "\ud800",
    "(?P<a",
    "\\p{Zz9}",
)
LARK = (
    'start: "a" | "b"',
    "start: /[0-9]+/",
    'start: x+\nx: "ab" | "c"',
    'start: "x" start | ""',
    'start: %json {"type": "integer"}',
)
BROKEN_LARK = (
    "",
    "start:",
    "start: y",
    "x: 'a'",
    'start: "a" |',
    "start: start",
    "::=",
    "root ::= ",
)
GBNF = ('root ::= "yes" | "no"', "root ::= [0-9]+", 'root ::= x x\nx ::= "a" | [b-d]')
CHOICES = (["yes", "no"], ["a"], ["a", "ab", "abc"], ["é", "日本"], ["x" * 30, "x" * 31])
BROKEN_CHOICES: tuple[list[Any], ...] = ([], [""], [1], ["a", None], ["\ud800"], [["a"]])


def _patterns(count: int, gap: int) -> dict[str, Any]:
    parts = [{"pattern": f".*a{{{place}}}.{{{gap}}}"} for place in range(1, count + 1)]
    return {"type": "string", "allOf": parts}


def intersections(count: int) -> str:
    terms = " & ".join(f"/.*a{{{place}}}.*/" for place in range(1, count + 1))
    return f"start: T\nT: {terms}"


def _properties(count: int) -> dict[str, Any]:
    names = {f"^k{place:04}.*x$": {"type": "integer"} for place in range(count)}
    return {"type": "object", "patternProperties": names}


AMBIGUOUS = 'start: s\ns: s s s | s s | "a"'


def hostile(chooser: Chooser) -> dict[str, Any]:
    """What is small and costs much, in compiling or in every step."""
    kind = chooser.randrange(12)
    many = chooser.choice((3, 10, 30, 100))
    if kind == 0:
        return {"guided_json": _patterns(many, chooser.choice((2, 5, 9)))}
    if kind == 1:
        return {"guided_grammar": intersections(many)}
    if kind == 2:
        return {"guided_json": _properties(many * 19)}
    if kind == 3:
        return {"guided_grammar": AMBIGUOUS, "logit_bias": {"81": 100}, "ignore_eos": True}
    if kind == 4:
        return {"guided_regex": f"(a|a)*{{{many}}}b"}
    if kind == 5:
        return {"guided_regex": f"(.*a.{{{many}}}){{{many}}}"}
    if kind == 6:
        return {"guided_regex": "(" * many + "a" + ")?" * many}
    if kind == 7:
        return {"guided_choice": [f"{place:05}{'x' * 20}" for place in range(many * 20)]}
    if kind == 8:
        schema: dict[str, Any] = {"type": "integer"}
        for _ in range(min(many, 60)):
            schema = {"anyOf": [schema, {"type": "array", "items": schema}]}
            if len(str(schema)) > 20_000:
                break
        return {"guided_json": schema}
    if kind == 9:
        return {"guided_json": {"type": "string", "minLength": many * 50, "maxLength": many * 100}}
    if kind == 10:
        return {
            "guided_json": {"type": "array", "items": {}, "minItems": many, "maxItems": many * 9}
        }
    rules = "\n".join(
        f"r{place}: r{place + 1} r{place + 1} | r{place + 1}" for place in range(many)
    )
    return {"guided_grammar": f'start: r0\n{rules}\nr{many}: "a" | ""'}


def asked(chooser: Chooser, *, with_hostile: bool) -> dict[str, Any]:
    """Fields of a chat or completion that ask for a grammar."""
    if with_hostile and chooser.random() < 0.05:
        return hostile(chooser)
    broken = chooser.random() < 0.5
    kind = chooser.randrange(8)
    if kind == 0:
        schema = chooser.choice(BROKEN_SCHEMAS if broken else SCHEMAS)
        return {"response_format": _response_format(schema)}
    if kind == 1:
        return {"guided_json": chooser.choice(BROKEN_SCHEMAS if broken else SCHEMAS)}
    if kind == 2:
        return {"guided_regex": chooser.choice(BROKEN_REGEXES if broken else REGEXES)}
    if kind == 3:
        return {"guided_choice": chooser.choice(BROKEN_CHOICES if broken else CHOICES)}
    if kind == 4:
        return {"guided_grammar": chooser.choice(BROKEN_LARK if broken else LARK)}
    if kind == 5:
        return {"grammar": chooser.choice(BROKEN_LARK if broken else GBNF)}
    if kind == 6:
        inner = asked(chooser, with_hostile=False)
        names = {"guided_json": "json", "guided_regex": "regex", "guided_choice": "choice"}
        return {"structured_outputs": {names.get(n, "grammar"): v for n, v in inner.items()}}
    return {"response_format": {"type": chooser.choice(("json_object", "text", "xml", None))}}


def _response_format(schema: Any) -> dict[str, Any]:
    return {"type": "json_schema", "json_schema": {"name": "x", "schema": schema}}


def tools(chooser: Chooser) -> dict[str, Any]:
    """Fields of a chat that give tools, good and odd ones."""
    count = chooser.choice((0, 1, 1, 2, 3, 16, 17, 128))
    found = [_tool(chooser, place) for place in range(count)]
    fields: dict[str, Any] = {"tools": found}
    if chooser.random() < 0.6:
        fields["tool_choice"] = chooser.choice(
            (
                *("auto", "none", "required", "any", ""),
                {"type": "function", "function": {"name": "f0"}},
                {"type": "function", "function": {"name": "absent"}},
                {"type": "allowed_tools", "allowed_tools": {"mode": "auto", "tools": found[:1]}},
                {},
            )
        )
    if chooser.random() < 0.3:
        fields["parallel_tool_calls"] = chooser.choice((True, False, None, 1))
    return fields


def _tool(chooser: Chooser, place: int) -> Any:
    kind = chooser.randrange(10)
    if kind == 0:
        return fuzz_values.anything(chooser)
    if kind == 1:
        return {"type": chooser.choice(("web_search", "custom", "namespace", "mcp", 3))}
    schema = chooser.choice(SCHEMAS if kind < 8 else BROKEN_SCHEMAS)
    name = f"f{place}" if kind < 9 else fuzz_values.text(chooser, 5)
    function: dict[str, Any] = {"name": name, "parameters": schema}
    if chooser.random() < 0.3:
        function["strict"] = chooser.random() < 0.5
    if chooser.random() < 0.3:
        function["description"] = fuzz_values.text(chooser)
    return {"type": "function", "function": function}
