"""/v1/responses through the official SDK, against a real server."""

from __future__ import annotations

import json
from typing import Any, Literal

import httpx
import openai
import pydantic
import pytest

MODEL = "smollm2"
WEATHER: Any = {
    "type": "function",
    "name": "get_weather",
    "description": "The weather of a city.",
    "strict": True,
    "parameters": {
        "type": "object",
        "properties": {"city": {"type": "string", "maxLength": 16}},
        "required": ["city"],
        "additionalProperties": False,
    },
}


def ask(client: openai.OpenAI, said: Any = "What is 2+2?", **more: Any) -> Any:
    fields = {"model": MODEL, "input": said, "temperature": 0, "max_output_tokens": 12}
    return client.responses.create(**{**fields, **more})


def test_the_same_words_as_a_chat(client: openai.OpenAI) -> None:
    made = ask(client, instructions="Be brief.", metadata={"a": "b"})
    chat = client.chat.completions.create(
        model=MODEL,
        messages=[
            {"role": "system", "content": "Be brief."},
            {"role": "user", "content": "What is 2+2?"},
        ],
        temperature=0,
        max_tokens=12,
    )
    assert made.output_text == chat.choices[0].message.content
    assert made.object == "response"
    assert made.metadata == {"a": "b"}
    assert made.instructions == "Be brief."
    assert chat.usage is not None
    assert made.usage.input_tokens == chat.usage.prompt_tokens
    assert made.usage.output_tokens == chat.usage.completion_tokens
    assert made.usage.total_tokens == chat.usage.total_tokens


def test_items_are_turns(client: openai.OpenAI) -> None:
    parts = [{"type": "input_text", "text": "My name is Ada."}]
    said = [{"type": "output_text", "text": "Hello, Ada!", "annotations": []}]
    made = ask(
        client,
        [
            {"role": "developer", "content": "Be brief."},
            {"type": "message", "role": "user", "content": parts},
            {"type": "message", "role": "assistant", "id": "msg_1", "content": said},
            {"role": "user", "content": "What is my name?"},
        ],
    )
    chat = client.chat.completions.create(
        model=MODEL,
        messages=[
            {"role": "system", "content": "Be brief."},
            {"role": "user", "content": "My name is Ada."},
            {"role": "assistant", "content": "Hello, Ada!"},
            {"role": "user", "content": "What is my name?"},
        ],
        temperature=0,
        max_tokens=12,
    )
    assert made.output_text == chat.choices[0].message.content


def test_cut_by_its_length(client: openai.OpenAI) -> None:
    made = ask(client, "Tell me a long story.", max_output_tokens=5)
    assert made.status == "incomplete"
    assert made.incomplete_details.reason == "max_output_tokens"
    assert made.output[0].status == "incomplete"
    assert made.usage.output_tokens == 5


def test_a_stream_of_text(client: openai.OpenAI) -> None:
    whole = ask(client)
    events = list(ask(client, stream=True))
    assert [event.sequence_number for event in events] == list(range(len(events)))
    kinds = [event.type for event in events]
    deltas = kinds.count("response.output_text.delta")
    assert deltas > 3
    end = "completed" if whole.status == "completed" else "incomplete"
    assert kinds == [
        "response.created",
        "response.in_progress",
        "response.output_item.added",
        "response.content_part.added",
        *["response.output_text.delta"] * deltas,
        "response.output_text.done",
        "response.content_part.done",
        "response.output_item.done",
        f"response.{end}",
    ]
    assert "".join(e.delta for e in events if e.type.endswith("text.delta")) == whole.output_text
    final = events[-1].response
    assert final.output_text == whole.output_text
    assert final.usage == whole.usage or final.usage.total_tokens == whole.usage.total_tokens
    assert final.id == events[0].response.id
    assert events[0].response.status == "in_progress"


def test_a_call_and_its_result(client: openai.OpenAI) -> None:
    fields = {"tools": [WEATHER], "parallel_tool_calls": False, "max_output_tokens": 40}
    made = ask(client, "Weather in Paris?", tool_choice="required", **fields)
    [call] = made.output
    assert (call.type, call.name, call.status) == ("function_call", "get_weather", "completed")
    assert list(json.loads(call.arguments)) == ["city"]
    result = {"type": "function_call_output", "call_id": call.call_id, "output": "12 C, rain"}
    turns = [{"role": "user", "content": "Weather in Paris?"}, call.model_dump(), result]
    again = ask(client, turns, **{**fields, "max_output_tokens": 4})
    assert again.usage.input_tokens > made.usage.input_tokens
    assert again.output


def test_a_stream_of_a_call(client: openai.OpenAI) -> None:
    fields: Any = {"model": MODEL, "input": "Weather in Paris?", "tools": [WEATHER]}
    named = {"type": "function", "name": "get_weather"}
    fields |= {"temperature": 0, "max_output_tokens": 40, "tool_choice": named}
    with client.responses.stream(**fields, parallel_tool_calls=False) as stream:
        events = list(stream)
        final = stream.get_final_response()
    kinds = [event.type for event in events]
    deltas = kinds.count("response.function_call_arguments.delta")
    assert kinds == [
        "response.created",
        "response.in_progress",
        "response.output_item.added",
        *["response.function_call_arguments.delta"] * deltas,
        "response.function_call_arguments.done",
        "response.output_item.done",
        "response.completed",
    ]
    [call] = final.output
    pieces = [e.delta for e in events if e.type == "response.function_call_arguments.delta"]
    assert call.type == "function_call"
    assert "".join(pieces) == call.arguments
    assert len(pieces) > 2


def test_half_a_call_is_left_out(client: openai.OpenAI) -> None:
    fields = {"tools": [WEATHER], "tool_choice": "required", "max_output_tokens": 12}
    made = ask(client, "Weather in Paris?", **fields)
    assert (made.status, made.output) == ("incomplete", []) or made.output[0].type == "message"
    events = list(ask(client, "Weather in Paris?", stream=True, **fields))
    assert events[-1].type == "response.incomplete"


class Colour(pydantic.BaseModel):
    name: Literal["red", "blue"]
    warm: bool


def test_parse(client: openai.OpenAI) -> None:
    made = client.responses.parse(
        model=MODEL, input="A colour.", text_format=Colour, temperature=0, max_output_tokens=30
    )
    assert isinstance(made.output_parsed, Colour)
    with client.responses.stream(
        model=MODEL, input="A colour.", text_format=Colour, temperature=0, max_output_tokens=30
    ) as stream:
        assert stream.get_final_response().output_parsed == made.output_parsed


def test_json_object(client: openai.OpenAI) -> None:
    made = ask(client, text={"format": {"type": "json_object"}})
    assert made.output_text.startswith("{")


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"previous_response_id": "resp_1"}, "previous_response_id"),
        ({"conversation": "conv_1"}, "conversation"),
        ({"background": True}, "background"),
        ({"prompt": {"id": "pmpt_1"}}, "prompt"),
        ({"truncation": "some"}, "truncation"),
        ({"max_output_tokens": 0}, "max_output_tokens"),
        ({"text": {"format": {"type": "xml"}}}, "response_format.type"),
        ({"input": [{"type": "item_reference", "id": "x"}]}, "input[0].type"),
        ({"input": [{"role": "robot", "content": "x"}]}, "input[0].role"),
        ({"input": [{"role": "user", "content": [{"type": "input_image"}]}]}, None),
        ({"input": []}, "messages"),
    ],
)
def test_refused(client: openai.OpenAI, fields: dict[str, Any], param: str | None) -> None:
    with pytest.raises(openai.BadRequestError) as caught:
        ask(client, fields.get("input", "x"), extra_body=fields)
    if param is not None:
        assert caught.value.param == param


def test_what_is_ignored_is_said(server: Any) -> None:
    body = {"model": MODEL, "input": "Hi", "max_output_tokens": 1, "truncation": "auto"}
    body |= {"reasoning": {"effort": "low"}, "include": ["reasoning.encrypted_content"]}
    reply = httpx.post(f"{server.base_url}/v1/responses", json=body, timeout=60)
    assert reply.status_code == 200
    warning = reply.headers["x-headrace-warning"]
    assert all(word in warning for word in ("encrypted_content", "reasoning", "truncation"))


# -- logprobs --------------------------------------------------------------------------------------

LOGPROBS: Any = ["message.output_text.logprobs"]


@pytest.mark.parametrize("top", [None, 0, 3])
def test_logprobs_that_are_asked_for_come(client: openai.OpenAI, top: int | None) -> None:
    more = {} if top is None else {"top_logprobs": top}
    made = ask(client, include=LOGPROBS, **more)
    chat = client.chat.completions.create(
        model=MODEL,
        messages=[{"role": "user", "content": "What is 2+2?"}],
        temperature=0,
        max_tokens=12,
        logprobs=True,
        top_logprobs=top,
    )
    given = chat.choices[0].logprobs
    assert given is not None
    assert given.content is not None
    found = made.output[0].content[0].logprobs
    assert [each.model_dump() for each in found] == [each.model_dump() for each in given.content]
    assert {len(each.top_logprobs) for each in found} == {top or 0}
    assert made.top_logprobs == (top or 0)


def test_a_number_of_them_asks_for_them(client: openai.OpenAI) -> None:
    assert len(ask(client, top_logprobs=2).output[0].content[0].logprobs) > 3
    assert ask(client, top_logprobs=0).output[0].content[0].logprobs == []
    assert ask(client).output[0].content[0].logprobs == []
    with pytest.raises(openai.BadRequestError, match="top_logprobs is 21"):
        ask(client, top_logprobs=21)


def test_logprobs_in_a_stream(client: openai.OpenAI) -> None:
    whole = ask(client, include=LOGPROBS, top_logprobs=2).output[0].content[0]
    events = list(ask(client, include=LOGPROBS, top_logprobs=2, stream=True))
    deltas = [event for event in events if event.type == "response.output_text.delta"]
    pieces = [each for event in deltas for each in event.logprobs]
    assert [each.token for each in pieces] == [each.token for each in whole.logprobs]
    assert [each.logprob for each in pieces] == [each.logprob for each in whole.logprobs]
    [done] = [event for event in events if event.type == "response.output_text.done"]
    assert len(done.logprobs) == len(whole.logprobs)
    assert events[-1].response.output[0].content[0].logprobs == whole.logprobs


def test_a_call_has_none(client: openai.OpenAI) -> None:
    fields = {"tools": [WEATHER], "parallel_tool_calls": False, "max_output_tokens": 40}
    made = ask(client, "Weather in Paris?", tool_choice="required", include=LOGPROBS, **fields)
    assert [item.type for item in made.output] == ["function_call"]
