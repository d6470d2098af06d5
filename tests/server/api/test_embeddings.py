"""/v1/embeddings through the official SDK, against a real server and the library."""

from __future__ import annotations

import base64
import math
import struct
from typing import Any

import httpx
import openai
import pytest

from headrace import LLM

MODEL = "smollm2"
TEXTS = ["The cat sat on the mat.", "A kitten lay on the rug.", "Interest rates rose in May."]


def post(client: openai.OpenAI, **sent: Any) -> Any:
    reply = httpx.post(f"{client.base_url}embeddings", json={"model": MODEL, **sent}, timeout=60)
    assert reply.status_code == 200, reply.text
    return reply.json()


def dot(left: list[float], right: list[float]) -> float:
    return sum(a * b for a, b in zip(left, right, strict=True))


def test_every_kind_of_input_is_the_librarys_vector_of_length_one(
    client: openai.OpenAI, llm: LLM
) -> None:
    ids = [llm.tokenizer.encode(text) for text in TEXTS]
    vectors = llm.embed(TEXTS)
    lengths = [math.sqrt(dot(v, v)) for v in vectors]
    wanted = [[x / length for x in v] for v, length in zip(vectors, lengths, strict=True)]
    assert all(abs(length - 1) > 0.01 for length in lengths)  # or scaling would not be seen
    for given, expected in (
        (TEXTS[0], wanted[:1]),
        (TEXTS, wanted),
        (ids[0], wanted[:1]),
        (ids, wanted),
    ):
        answer = client.embeddings.create(model=MODEL, input=given)  # base64, says the SDK
        plain = post(client, input=given, encoding_format="float")
        coded = post(client, input=given, encoding_format="base64")
        for number, right in enumerate(expected):
            packed = base64.b64decode(coded["data"][number]["embedding"])
            values = list(struct.unpack(f"<{len(right)}f", packed))
            for found in (
                answer.data[number].embedding,
                plain["data"][number]["embedding"],
                values,
            ):
                assert found == pytest.approx(right, abs=1e-6)
            assert answer.data[number].index == number
        assert len(answer.data) == len(expected)
        assert answer.usage.prompt_tokens == sum(map(len, ids[: len(expected)]))
        assert plain["usage"] == coded["usage"] == answer.usage.model_dump()


def test_like_texts_are_nearer_than_others(client: openai.OpenAI) -> None:
    cat, kitten, money = (
        e.embedding for e in client.embeddings.create(model=MODEL, input=TEXTS).data
    )
    assert dot(cat, kitten) > dot(cat, money)
    assert dot(cat, kitten) > dot(kitten, money)


def test_more_inputs_than_run_at_a_time_keep_their_order(client: openai.OpenAI) -> None:
    texts = [f"{number} apples" for number in range(70)]
    many = client.embeddings.create(model=MODEL, input=texts).data
    for place in (0, 33, 69):
        (one,) = client.embeddings.create(model=MODEL, input=texts[place]).data
        assert many[place].embedding == pytest.approx(one.embedding, abs=1e-6)
        assert many[place].index == place


@pytest.mark.parametrize(
    ("change", "param"),
    [
        ({"input": ""}, "input"),
        ({"input": []}, "input"),
        ({"input": ["a", ""]}, "input"),
        ({"input": [1, "a"]}, "input"),
        ({"input": ["a"] * 2049}, "input"),
        ({"input": [[7] * 8193]}, "input"),
        ({"input": [10**9]}, "input"),
        ({"dimensions": 8}, "dimensions"),
        ({"encoding_format": "hex"}, "encoding_format"),
    ],
)
def test_what_cannot_be_asked_is_named(
    client: openai.OpenAI, change: dict[str, Any], param: str
) -> None:
    with pytest.raises(openai.BadRequestError) as caught:
        client.embeddings.create(**{"model": MODEL, "input": "Hi", **change})
    assert caught.value.param == param
    size = len(client.embeddings.create(model=MODEL, input="Hi").data[0].embedding)
    again = client.embeddings.create(model=MODEL, input="Hi", dimensions=size)
    assert len(again.data[0].embedding) == size
