"""A request's constraint on its answer, as the engine's GrammarSpec.

OpenAI's `response_format`, the two sets of names that vLLM's users send (`guided_*`, and the newer
`structured_outputs`), and llama.cpp's `grammar` and `json_schema`. Sizes and shapes are checked
here; whether a schema, a regex or a grammar can be compiled only the engine knows.
"""

from __future__ import annotations

import json
from typing import Any

import msgspec

from headrace.core.bounds import SCHEMA_BYTES, check_json, shown
from headrace.core.constraint import GrammarKind, GrammarSpec
from headrace.core.errors import InvalidRequestError

JsonObject = dict[str, Any]

MAX_SCHEMA_LEVELS = 64  # of nested objects and lists: far more than people write


class StructuredOutputs(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """vLLM's newer field, sent in the extra body."""

    json: str | JsonObject | None = None
    json_object: bool | None = None
    regex: str | None = None
    choice: list[str] | None = None
    grammar: str | None = None


class StructuredFields(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """The fields of every request that generates; at most one of them may be sent."""

    response_format: JsonObject | None = None
    guided_json: str | JsonObject | None = None
    guided_regex: str | None = None
    guided_choice: list[str] | None = None
    guided_grammar: str | None = None
    structured_outputs: StructuredOutputs | None = None
    # llama.cpp's names.
    grammar: str | None = None
    json_schema: str | JsonObject | None = None


# vLLM's fields without effect here: whitespace is fixed, and there is one compiler.
IGNORED_STRUCTURED = frozenset({"guided_decoding_backend", "guided_whitespace_pattern"})


def grammar_of(sent: StructuredFields, max_bytes: int) -> GrammarSpec | None:
    """The one grammar that a request asks for, if any."""
    found = [
        (param, spec)
        for param, spec in (
            ("response_format", _response_format(sent.response_format, max_bytes)),
            ("guided_json", _json_schema("guided_json", sent.guided_json, max_bytes)),
            ("guided_regex", _text("guided_regex", GrammarKind.REGEX, sent.guided_regex)),
            ("guided_choice", _choice("guided_choice", sent.guided_choice, max_bytes)),
            ("guided_grammar", _text("guided_grammar", GrammarKind.LARK, sent.guided_grammar)),
            *_structured_outputs(sent.structured_outputs, max_bytes),
            # llama.cpp's clients send an empty one for none.
            ("grammar", _text("grammar", GrammarKind.LARK, sent.grammar or None)),
            ("json_schema", _json_schema("json_schema", sent.json_schema, max_bytes)),
        )
        if spec is not None
    ]
    if not found:
        return None
    if len(found) > 1:
        names = ", ".join(param for param, _ in found)
        raise InvalidRequestError(
            f"The request constrains its answer {len(found)} times: {names}; expected at most one.",
            "Leave the others out.",
            param=found[1][0],
        )
    [(param, spec)] = found
    check_size(param, spec.source, max_bytes)
    return spec


def check_size(param: str, source: str, max_bytes: int) -> None:
    _check_bytes(param, len(source.encode("utf-8", "surrogatepass")), max_bytes)


def _check_bytes(param: str, size: int, max_bytes: int) -> None:
    remedy = "Make it smaller, or start the server with --max-schema."
    SCHEMA_BYTES.check(param, size, most=max_bytes, remedy=remedy)


def check_schema(param: str, schema: JsonObject, max_bytes: int = SCHEMA_BYTES.most) -> None:
    """Bounds depth and size before the schema is encoded, since its compiler recurses: each value
    takes two bytes or more."""
    level: list[Any] = [schema]
    least_bytes = 0
    for _ in range(MAX_SCHEMA_LEVELS):
        least_bytes += 2 * sum(map(len, level))
        _check_bytes(param, least_bytes, max_bytes)
        level = [
            item
            for value in level
            for item in (value.values() if isinstance(value, dict) else value)
            if isinstance(item, dict | list)
        ]
        if not level:
            return
    raise InvalidRequestError(
        f"{param} is nested more than {MAX_SCHEMA_LEVELS} levels deep.",
        "Give nested parts a name under $defs and refer to them by $ref.",
        param=param,
    )


def _response_format(sent: JsonObject | None, max_bytes: int) -> GrammarSpec | None:
    if sent is None:
        return None
    kind = sent.get("type")
    if kind == "text":
        return None
    if kind == "json_object" and isinstance(sent.get("schema"), dict):  # llama.cpp's form
        return _json_schema("response_format.schema", sent["schema"], max_bytes)
    if kind == "json_object":
        return GrammarSpec(kind=GrammarKind.JSON_OBJECT, param="response_format")
    if kind != "json_schema":
        raise wrong_value("response_format.type", kind, "'text', 'json_object' or 'json_schema'")
    told = sent.get("json_schema")
    if not isinstance(told, dict):
        raise wrong_value("response_format.json_schema", told, "an object with name and schema")
    schema = told.get("schema")
    if not isinstance(schema, dict):
        raise wrong_value("response_format.json_schema.schema", schema, "a JSON schema")
    # `strict` makes no difference: every answer must match its schema.
    return _json_schema("response_format.json_schema.schema", schema, max_bytes)


def _structured_outputs(
    sent: StructuredOutputs | None, max_bytes: int
) -> list[tuple[str, GrammarSpec | None]]:
    if sent is None:
        return []
    name = "structured_outputs"
    anything = None
    if sent.json_object:
        anything = GrammarSpec(kind=GrammarKind.JSON_OBJECT, param=f"{name}.json_object")
    return [
        (f"{name}.json", _json_schema(f"{name}.json", sent.json, max_bytes)),
        (f"{name}.json_object", anything),
        (f"{name}.regex", _text(f"{name}.regex", GrammarKind.REGEX, sent.regex)),
        (f"{name}.choice", _choice(f"{name}.choice", sent.choice, max_bytes)),
        (f"{name}.grammar", _text(f"{name}.grammar", GrammarKind.LARK, sent.grammar)),
    ]


def _json_schema(param: str, sent: str | JsonObject | None, max_bytes: int) -> GrammarSpec | None:
    if sent is None:
        return None
    if isinstance(sent, str):
        check_json(sent.encode("utf-8", "surrogatepass"), param)
        try:
            schema = msgspec.json.decode(sent)
        except (msgspec.DecodeError, RecursionError, UnicodeError) as error:
            raise InvalidRequestError(
                f"{param} is text that is not JSON: {error}.",
                "Send the schema as an object.",
                param=param,
            ) from error
        if not isinstance(schema, dict):
            raise wrong_value(param, schema, "a JSON schema")
    else:
        schema = sent
    check_schema(param, schema, max_bytes)
    source = dump_json(param, schema)
    return GrammarSpec(kind=GrammarKind.JSON_SCHEMA, source=source, param=param)


def _choice(param: str, sent: list[str] | None, max_bytes: int) -> GrammarSpec | None:
    if sent is None:
        return None
    _check_bytes(param, 3 * len(sent), max_bytes)  # two quotes and a comma
    if not sent or not all(sent):
        raise wrong_value(param, sent, "a list of texts, none of them empty")
    return GrammarSpec(kind=GrammarKind.CHOICE, source=dump_json(param, sent), param=param)


def _text(param: str, kind: GrammarKind, sent: str | None) -> GrammarSpec | None:
    if sent is None:
        return None
    if not sent:
        raise wrong_value(param, sent, "some text")
    return GrammarSpec(kind=kind, source=sent, param=param)


def dump_json(param: str, value: object) -> str:
    """As JSON without escapes: the compiler matches the characters themselves."""
    try:
        text = json.dumps(value, ensure_ascii=False, allow_nan=False)
        text.encode()
    except ValueError as error:  # a lone surrogate raises one too
        raise InvalidRequestError(
            f"{param} can't be encoded as JSON: {error}.", "Correct it.", param=param
        ) from error
    return text


def wrong_value(param: str, found: object, expected: str) -> InvalidRequestError:
    value = "missing" if found is None else shown(found)
    return InvalidRequestError(
        f"{param} is {value}; expected {expected}.", "Correct it and send it again.", param=param
    )
