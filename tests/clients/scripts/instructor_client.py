"""instructor: structured answers by tool calls, which is its default, and by its other modes."""

from __future__ import annotations

from typing import Literal

import instructor
import openai
from pydantic import BaseModel

from checks import MODEL, URL, run

BASE = {"base_url": f"{URL}/v1", "api_key": "none", "max_retries": 0}
TEXT = "Ada is 36 years old and likes water."
ASKED = {
    "model": MODEL,
    "messages": [{"role": "user", "content": TEXT}],
    "temperature": 0,
    "max_tokens": 600,
    "max_retries": 0,
}


class Person(BaseModel):
    name: str
    age: int
    mood: Literal["glad", "sad"]


def check_the_default_mode() -> None:
    client = instructor.from_openai(openai.OpenAI(**BASE))
    person, raw = client.create_with_completion(response_model=Person, **ASKED)
    assert isinstance(person, Person)
    assert len(raw.choices[0].message.tool_calls) == 1
    assert raw.usage.completion_tokens < ASKED["max_tokens"]


def check_from_provider() -> None:
    client = instructor.from_provider(f"openai/{MODEL}", base_url=BASE["base_url"], api_key="none")
    asked = {name: value for name, value in ASKED.items() if name != "model"}
    assert isinstance(client.create(response_model=Person, **asked), Person)


def check_json_schema_mode() -> None:
    client = instructor.from_openai(openai.OpenAI(**BASE), mode=instructor.Mode.JSON_SCHEMA)
    assert isinstance(client.create(response_model=Person, **ASKED), Person)


def check_strict_tools() -> None:
    client = instructor.from_openai(openai.OpenAI(**BASE), mode=instructor.Mode.TOOLS_STRICT)
    assert isinstance(client.create(response_model=Person, **ASKED), Person)


def check_partial_streams_by_json_schema() -> None:
    client = instructor.from_openai(openai.OpenAI(**BASE), mode=instructor.Mode.JSON_SCHEMA)
    for person in client.create_partial(response_model=Person, **ASKED):
        last = person
    assert Person.model_validate(last.model_dump())


def check_partial_streams_by_tools() -> None:
    client = instructor.from_openai(openai.OpenAI(**BASE))
    pieces = list(client.create_partial(response_model=Person, **ASKED))
    assert len(pieces) > 1
    assert Person.model_validate(pieces[-1].model_dump())


async def check_async() -> None:
    client = instructor.from_openai(openai.AsyncOpenAI(**BASE))
    assert isinstance(await client.create(response_model=Person, **ASKED), Person)


if __name__ == "__main__":
    run()
