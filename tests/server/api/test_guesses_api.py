"""A server that guesses tokens ahead answers as one that does not: through the official SDK, text
by text and number by number. How much it guesses is its own decision, by time; nothing here
depends on it."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import openai
import pytest
from tests.server.conftest import StartServer

MODEL = "smollm2"
LINES = "".join(f'{{"id": {n}, "name": "pump {n % 3}", "state": "idle"}}\n' for n in range(8))
REPEAT: list[Any] = [{"role": "user", "content": f"Repeat these lines exactly:\n{LINES}"}]
SCHEMA: dict[str, Any] = {
    "type": "object",
    "properties": {
        "the_name_of_the_measured_quantity": {"enum": ["length", "weight"]},
        "the_value_in_metric_units": {"type": "integer", "minimum": 0, "maximum": 99},
    },
    "required": ["the_name_of_the_measured_quantity", "the_value_in_metric_units"],
    "additionalProperties": False,
}
FORMAT: Any = {"type": "json_schema", "json_schema": {"name": "measured", "schema": SCHEMA}}

ASKED: dict[str, dict[str, Any]] = {
    "greedy": {"temperature": 0},
    "two with logprobs": {
        "temperature": 0.9,
        "seed": 11,
        "n": 2,
        "logprobs": True,
        "top_logprobs": 2,
    },
    "stop": {"temperature": 0, "stop": ['"pump 2"']},
    "penalties": {"temperature": 0.7, "seed": 5, "frequency_penalty": 0.3},
    "schema": {"temperature": 0, "response_format": FORMAT},
}


@pytest.fixture(scope="module")
def guessing(start_server: StartServer) -> Iterator[openai.OpenAI]:
    yield from served(start_server, "suffix")


@pytest.fixture(scope="module")
def plain(start_server: StartServer) -> Iterator[openai.OpenAI]:
    yield from served(start_server, "off")


def served(start_server: StartServer, speculate: str) -> Iterator[openai.OpenAI]:
    running = start_server(engine={"speculate": speculate})
    url = f"{running.base_url}/v1"
    with openai.OpenAI(base_url=url, api_key="none", max_retries=0) as made:
        yield made
    running.stop()


def whole(client: openai.OpenAI, asked: dict[str, Any]) -> list[Any]:
    made = client.chat.completions.create(
        model=MODEL, messages=REPEAT, **{"max_tokens": 60, **asked}
    )
    assert made.usage is not None
    details = made.usage.completion_tokens_details
    if details is not None:  # some of its tokens were guessed
        assert 0 <= (details.accepted_prediction_tokens or 0) < made.usage.completion_tokens
    return [
        (
            choice.message.content,
            choice.finish_reason,
            None if choice.logprobs is None else choice.logprobs.model_dump(),
        )
        for choice in made.choices
    ]


def streamed(client: openai.OpenAI, asked: dict[str, Any]) -> list[str]:
    texts: dict[int, str] = {}
    for chunk in client.chat.completions.create(
        model=MODEL, messages=REPEAT, stream=True, **{"max_tokens": 60, **asked}
    ):
        for choice in chunk.choices:
            texts[choice.index] = texts.get(choice.index, "") + (choice.delta.content or "")
    return [texts[index] for index in sorted(texts)]


@pytest.mark.parametrize("kind", ASKED)
def test_answers_are_those_of_a_plain_server(
    plain: openai.OpenAI, client: openai.OpenAI, guessing: openai.OpenAI, kind: str
) -> None:
    """And so does one that was told nothing (`client`): on a CPU it guesses, too."""
    asked = ASKED[kind]
    expected = whole(plain, asked)
    assert whole(guessing, asked) == expected
    assert whole(client, asked) == expected
    texts = [text for text, _, _ in expected]
    assert streamed(guessing, asked) == texts
    if kind == "schema":
        assert set(json.loads(texts[0])) == set(SCHEMA["required"])


def test_a_request_may_do_without(plain: openai.OpenAI, guessing: openai.OpenAI) -> None:
    asked = {**ASKED["greedy"], "extra_body": {"speculate": "off"}}
    made = guessing.chat.completions.create(model=MODEL, messages=REPEAT, max_tokens=60, **asked)
    assert made.choices[0].message.content == whole(plain, ASKED["greedy"])[0][0]
    assert made.usage is not None
    assert made.usage.completion_tokens_details is None
