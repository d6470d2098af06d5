"""Structured output through the official SDK, against a real server: valid on every sample."""

from __future__ import annotations

import json
import re
from concurrent.futures import ThreadPoolExecutor
from typing import Any, Literal

import jsonschema
import openai
import pydantic
import pytest

MODEL = "smollm2"
ASK: list[Any] = [{"role": "user", "content": "Describe a person you know."}]
PERSON = {
    "type": "object",
    "properties": {
        "id": {"type": "string", "maxLength": 6},
        "age": {"type": "integer", "minimum": 0, "maximum": 120},
        "pets": {"type": "array", "items": {"enum": ["cat", "dog"]}, "maxItems": 2},
    },
    "required": ["id", "age", "pets"],
    "additionalProperties": False,
}


def answers(client: openai.OpenAI, **more: Any) -> list[str]:
    fields = {"model": MODEL, "messages": ASK, "max_tokens": 60, "temperature": 0, **more}
    made = client.chat.completions.create(**fields)
    assert {choice.finish_reason for choice in made.choices} == {"stop"}
    return [choice.message.content or "" for choice in made.choices]


def schema_format(schema: dict[str, Any]) -> dict[str, Any]:
    return {"type": "json_schema", "json_schema": {"name": "it", "schema": schema, "strict": True}}


def test_fifty_hot_samples_fit_their_schema(client: openai.OpenAI) -> None:
    def sample(seed: int) -> list[str]:
        form = schema_format(PERSON)
        return answers(client, temperature=1.5, seed=seed, n=10, response_format=form)

    with ThreadPoolExecutor(2) as pool:
        found = [text for texts in pool.map(sample, range(5)) for text in texts]
    assert len(found) == 50
    assert len(set(found)) > 25  # they are samples, not one answer
    for text in found:
        jsonschema.validate(json.loads(text), PERSON)


class Person(pydantic.BaseModel):
    name: str = pydantic.Field(max_length=12)
    mood: Literal["glad", "sad"]
    friend: Friend | None


class Friend(pydantic.BaseModel):
    age: Literal[1, 2, 3]


def test_parse_gives_the_model_back(client: openai.OpenAI) -> None:
    made = client.chat.completions.parse(
        model=MODEL, messages=ASK, response_format=Person, max_tokens=80, temperature=0
    )
    assert isinstance(made.choices[0].message.parsed, Person)


def test_streamed_json_is_the_same(client: openai.OpenAI) -> None:
    form: Any = schema_format(PERSON)
    [whole] = answers(client, response_format=form)
    with client.chat.completions.stream(
        model=MODEL, messages=ASK, response_format=form, max_tokens=80, temperature=0
    ) as stream:
        final = stream.get_final_completion()
    assert final.choices[0].message.content == whole


def test_json_object(client: openai.OpenAI) -> None:
    made = client.chat.completions.create(
        model=MODEL,
        messages=[{"role": "user", "content": "A JSON object with your name, nothing more."}],
        max_tokens=40,
        temperature=0,
        response_format={"type": "json_object"},
    )
    text = made.choices[0].message.content or ""
    assert text.startswith("{")
    if made.choices[0].finish_reason == "stop":
        assert isinstance(json.loads(text), dict)


@pytest.mark.parametrize("style", ["guided_{}", "structured_outputs"])
def test_other_forms(client: openai.OpenAI, style: str) -> None:
    def body(kind: str, value: object) -> dict[str, Any]:
        if style == "structured_outputs":
            return {style: {kind: value}}
        return {style.format(kind): value}

    [text] = answers(client, extra_body=body("regex", r"[0-9]{3}-[a-z]{4}"), temperature=1.2)
    assert re.fullmatch(r"[0-9]{3}-[a-z]{4}", text)
    [text] = answers(client, extra_body=body("choice", ["crimson", "teal"]))
    assert text in ("crimson", "teal")
    lark = 'start: "(" (start | /[0-9]/) ")"'
    [text] = answers(client, extra_body=body("grammar", lark), temperature=1.2)
    assert re.fullmatch(r"\(+[0-9]\)+", text)
    assert text.count("(") == text.count(")")
    [text] = answers(client, extra_body=body("grammar", 'root ::= "yes" | "no"'))
    assert text in ("yes", "no")
    [text] = answers(client, extra_body=body("json", {"const": {"a": 1}}))
    assert json.loads(text) == {"a": 1}


def test_plain_completions_take_them_too(client: openai.OpenAI) -> None:
    made = client.completions.create(
        model=MODEL, prompt="A colour:", max_tokens=10, extra_body={"guided_choice": ["teal"]}
    )
    assert made.choices[0].text == "teal"
    assert made.choices[0].finish_reason == "stop"


def deep(levels: int) -> dict[str, Any]:
    schema: dict[str, Any] = {"type": "string"}
    for _ in range(levels):
        schema = {"type": "array", "items": schema}
    return schema


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"response_format": schema_format({"type": "objct"})}, "objct"),
        ({"response_format": schema_format({"type": "array", "uniqueItems": True})}, "uniqueItems"),
        ({"response_format": schema_format({"enum": []})}, "can't be used"),
        ({"response_format": schema_format({"$ref": "#/nowhere"})}, "can't be used"),
        ({"response_format": schema_format({"enum": ["x" * 70_000]})}, "65536"),
        ({"response_format": schema_format(deep(80))}, "64 levels"),
        ({"response_format": {"type": "yaml"}}, "json_schema"),
        ({"extra_body": {"guided_regex": "("}}, "regex"),
        ({"extra_body": {"guided_grammar": "start: other"}}, "can't be used"),
        ({"extra_body": {"guided_regex": "a", "guided_choice": ["b"]}}, "2 times"),
    ],
)
def test_what_cannot_be_is_refused_alone(
    client: openai.OpenAI, fields: dict[str, Any], words: str
) -> None:
    with pytest.raises(openai.BadRequestError, match=re.escape(words)) as caught:
        answers(client, **fields)
    asked = fields.get("extra_body", fields)
    assert str(caught.value.param).partition(".")[0] in asked
    assert answers(client, extra_body={"guided_choice": ["fine"]}) == ["fine"]


def test_a_bomb_ends_alone(client: openai.OpenAI) -> None:
    """It compiles, and is only found out when its second mask would take too long."""
    with pytest.raises(openai.BadRequestError, match="grammar can't be followed"):
        answers(client, extra_body={"guided_regex": "(a{1,1000}){1,1000}{1,1000}"})
    assert answers(client, extra_body={"guided_choice": ["fine"]}) == ["fine"]
