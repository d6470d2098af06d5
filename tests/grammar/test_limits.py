"""Grammars that can't be compiled say why, and no grammar, however malicious, hangs the process or
ends it."""

from __future__ import annotations

import json
import threading
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest

from headrace.core.constraint import MAX_GRAMMAR_BYTES, GrammarKind, GrammarSpec
from headrace.core.errors import HeadraceError, InvalidRequestError
from headrace.grammar import GrammarCompiler, Matched
from headrace.tokenizer.tokenizer import Tokenizer


def spec_of(kind: str, source: object = "") -> GrammarSpec:
    text = source if isinstance(source, str) else json.dumps(source)
    return GrammarSpec(kind=GrammarKind(kind), source=text)


@pytest.mark.parametrize(
    ("kind", "source", "why"),
    [
        ("json_schema", "{", "not JSON"),
        ("json_schema", "3", "expected an object"),
        ("json_schema", '{"type": "strin"}', "strin"),
        ("json_schema", '{"not": {"type": "string"}}', "not"),
        ("json_schema", '{"type": "array", "uniqueItems": true}', "uniqueItems"),
        ("json_schema", '{"if": {}, "then": {}}', "then"),
        ("json_schema", '{"type": "string", "x-guidance": {"lenient": true}, "not": {}}', "not"),
        ("json_schema", '{"type": "integer", "minimum": 3, "maximum": 1}', "minimum"),
        ("json_schema", '{"$ref": "https://example.com/other"}', "example.com"),
        ("json_schema", '{"$ref": "#"}', "it matches no text"),
        ("json_schema", '{"type": "integer", "multipleOf": 9999991}', "9999991"),
        (
            "json_schema",
            '{"allOf": [{"multipleOf": 9973}, {"multipleOf": 9967}], "type": "integer"}',
            "9967",
        ),
        ("json_schema", '{"enum": ["\\ud800"]}', ""),
        ("regex", "(", "unclosed"),
        ("regex", "(?=a)", "look-a"),
        ("regex", r"(a)\1", "backreferences"),
        ("regex", r"[^\s\S]", "it matches no text"),
        ("regex", "\ud800", "surrogate"),
        ("choice", "[]", "at least one"),
        ("choice", '["a", 3]', "at least one"),
        ("lark", "start: missing", "missing"),
        ("lark", "start: start", "it matches no text"),
        ("lark", 'root ::= "a', "not GBNF"),
        ("lark", 'root ::= ' + '"a" ' * 3000, "8192"),
        ("lark", 'start: %json {"multiple\\u004ff": 9999991, "type": "integer"}', "9999991"),
        ("regex", "a" * (MAX_GRAMMAR_BYTES + 1), "bytes"),
    ],
)  # fmt: skip
def test_what_cannot_be_compiled_says_why(
    compiler: GrammarCompiler, kind: str, source: str, why: str
) -> None:
    with pytest.raises(InvalidRequestError) as caught:
        compiler.compile(replace(spec_of(kind, source), param="response_format"))
    assert caught.value.param == "response_format"
    assert caught.value.status == 400
    assert why in caught.value.cause
    assert len(str(caught.value)) < 500


def chain(rules: int, body: str = "r{}") -> str:
    lines = [f"r{i}:{body.format(i + 1)}" for i in range(rules)]
    return "\n".join(["start: r0", *lines, f'r{rules}: "a"'])


def chained_schemas(count: int, link: Callable[[dict[str, str]], dict[str, Any]]) -> str:
    links = {str(i): link({"$ref": f"#/$defs/{i + 1}"}) for i in range(count)}
    defs = {**links, str(count): {}}
    return json.dumps({"$ref": "#/$defs/0", "$defs": defs}, separators=(",", ":"))


BOMBS = {
    "nested quantifiers": ("regex", "(((a{1000}){1000}){1000}){1000}"),
    "a billion": ("regex", "a{1000000000}"),
    "many choices": ("regex", "(.*a){200}"),
    "far back": ("regex", "[ab]*a[ab]{200}c"),
    "wide": ("regex", "(.{0,1000}a.{0,1000}){0,100}"),
    "deep groups": ("regex", "(" * 200 + "a" + ")*" * 200),
    "huge enum": ("json_schema", json.dumps({"enum": [f"v{i}" for i in range(6500)]})),
    "many properties": (
        "json_schema",
        json.dumps({"properties": {f"p{i}": {"type": "string"} for i in range(1500)}}),
    ),
    "deep nesting": ("json_schema", '{"items":' * 5000 + "{}" + "}" * 5000),
    "deep references": ("json_schema", chained_schemas(1400, lambda ref: {"items": ref})),
    "deep choices": ("json_schema", chained_schemas(1200, lambda ref: {"anyOf": [ref, {}]})),
    "deep both": ("json_schema", chained_schemas(1200, lambda ref: {"allOf": [ref, {}]})),
    "many paths": ("json_schema", chained_schemas(900, lambda ref: {"prefixItems": [ref, ref]})),
    "recursive": ("json_schema", '{"type":"array","items":{"$ref":"#"},"minItems":2}'),
    "long text": ("json_schema", '{"type":"string","minLength":1000000,"maxLength":2000000}'),
    "many items": ("json_schema", '{"type":"array","minItems":1000000,"items":{"type":"integer"}}'),
    "pattern": ("json_schema", '{"type":"string","pattern":"^(([a-z]{1,50}){1,50}){1,50}$"}'),
    "chain of rules": ("lark", chain(4500)),
    "doubling rules": ("lark", chain(60, "r{0} r{0}")),
    "chain of terminals": ("lark", chain(3000, '"x" r{}').upper().replace("START", "start")),
    "repeated": ("lark", 'start: a{1000}\na: b{1000}\nb: c{1000}\nc: "x"'),
    "ambiguous": ("lark", 'start: s\ns: s s s | s s | "a" | '),
    "negated": ("lark", "start: T\nT: ~/(.*a.{300})/ & /.*b.{400}/"),
    "deep brackets": ("lark", "start: " + "(" * 5000 + '"a"' + ")" * 5000),
}  # fmt: skip


@pytest.mark.parametrize("name", BOMBS)
def test_a_bomb_is_refused_or_works_and_ends_nothing_but_itself(
    compiler: GrammarCompiler, tokenizer: Tokenizer, name: str
) -> None:
    kind, source = BOMBS[name]
    assert len(source) <= MAX_GRAMMAR_BYTES
    try:
        started = compiler.compile(spec_of(kind, source))
    except InvalidRequestError:
        return
    walk(started, tokenizer)


def walk(constraint: Matched, tokenizer: Tokenizer) -> None:
    """On a small stack, as an engine's thread may have: only compiling needs a deep one."""
    failures: list[BaseException] = []

    def run() -> None:
        current = constraint
        try:
            for number in range(40):
                if current.is_stopped:
                    return
                mask = current.mask()
                allowed = [t for t in range(tokenizer.vocab_size) if mask[t >> 3] >> (t & 7) & 1]
                current = current.fork()
                current.accept(allowed[number * 7919 % len(allowed)])
        except HeadraceError as error:
            if "any further" not in error.cause:
                failures.append(error)
        except BaseException as error:
            failures.append(error)

    usual = threading.stack_size(512 << 10)
    try:
        thread = threading.Thread(target=run)
        thread.start()
    finally:
        threading.stack_size(usual)
    thread.join()
    assert not failures


def test_threads_compile_side_by_side(compiler: GrammarCompiler) -> None:
    specs = [spec_of("regex", f"[a-{end}]{{1,9}}") for end in "bcdefg"]
    alone = [compiler.compile(spec).mask() for spec in specs]
    found: dict[int, bytes] = {}

    def work(number: int) -> None:
        found[number] = compiler.compile(specs[number]).mask()

    threads = [threading.Thread(target=work, args=(number,)) for number in range(len(specs))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert [found[number] for number in range(len(specs))] == alone
