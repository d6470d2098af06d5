"""OpenAI's Python SDK on /v1/responses: streams, tools, and answers that are kept."""

from __future__ import annotations

import json

import openai
from pydantic import BaseModel

from checks import CONTEXT, MODEL, TOO_LONG, URL, WEATHER_SCHEMA, raises, run

client = openai.OpenAI(base_url=f"{URL}/v1", api_key="none", max_retries=0, timeout=120)
GREEDY = {"model": MODEL, "temperature": 0, "max_output_tokens": 40}
WEATHER = {
    "type": "function",
    "name": "get_weather",
    "description": "The weather in a city.",
    "parameters": WEATHER_SCHEMA,
    "strict": True,
}


class River(BaseModel):
    name: str
    length_km: int


def check_plain() -> None:
    answer = client.responses.create(**GREEDY, instructions="Be brief.", input="Name a river.")
    assert answer.output_text
    assert answer.status in ("completed", "incomplete")
    assert answer.usage.total_tokens == answer.usage.input_tokens + answer.usage.output_tokens


def check_stream() -> None:
    whole = client.responses.create(**GREEDY, input="Name a river.")
    events = list(client.responses.create(**GREEDY, input="Name a river.", stream=True))
    kinds = [event.type for event in events]
    assert kinds[:2] == ["response.created", "response.in_progress"]
    assert kinds[-1] in ("response.completed", "response.incomplete")
    text = "".join(e.delta for e in events if e.type == "response.output_text.delta")
    assert text == whole.output_text == events[-1].response.output_text
    assert [e.sequence_number for e in events] == list(range(len(events)))


def check_stream_helper() -> None:
    with client.responses.stream(**GREEDY, input="Name a river.") as stream:
        for _ in stream:
            pass
        assert stream.get_final_response().output_text


def check_structured_output() -> None:
    answer = client.responses.parse(
        **{**GREEDY, "max_output_tokens": 200},
        input="The Rhine is 1230 km long. Give it as JSON.",
        text_format=River,
    )
    assert isinstance(answer.output_parsed, River)


def check_a_named_tool_and_its_result() -> None:
    asked = {**GREEDY, "max_output_tokens": 400, "tools": [WEATHER]}
    question = [{"role": "user", "content": "What is the weather in Paris?"}]
    answer = client.responses.create(
        **asked, input=question, tool_choice={"type": "function", "name": "get_weather"}
    )
    calls = [item for item in answer.output if item.type == "function_call"]
    assert [call.name for call in calls] == ["get_weather"]
    assert set(json.loads(calls[0].arguments)) == {"city", "unit"}
    assert answer.status == "completed"
    result = {"type": "function_call_output", "call_id": calls[0].call_id, "output": "Rain, 9 C."}
    second = client.responses.create(
        **asked, input=[*question, *answer.output, result], tool_choice="none"
    )
    assert second.output_text


def check_a_required_call_streams_and_ends() -> None:
    events = client.responses.create(
        **{**GREEDY, "max_output_tokens": 1000},
        input="What is the weather in Paris?",
        tools=[WEATHER],
        tool_choice="required",
        stream=True,
    )
    *_, last = events
    assert last.type == "response.completed"
    calls = [item for item in last.response.output if item.type == "function_call"]
    assert calls
    for call in calls:
        assert set(json.loads(call.arguments)) == {"city", "unit"}


def check_previous_response_id() -> None:
    """A conversation by id counts the same prompt as the conversation sent whole."""
    first = client.responses.create(**GREEDY, input="My name is Ada.")
    second = client.responses.create(
        **GREEDY, input="What is my name?", previous_response_id=first.id
    )
    assert second.previous_response_id == first.id
    whole = client.responses.create(
        **GREEDY,
        input=[
            {"role": "user", "content": "My name is Ada."},
            {"role": "assistant", "content": first.output_text},
            {"role": "user", "content": "What is my name?"},
        ],
    )
    assert second.usage.input_tokens == whole.usage.input_tokens
    assert second.output_text == whole.output_text


def check_retrieve_and_delete() -> None:
    made = client.responses.create(**GREEDY, input="Name a river.")
    assert client.responses.retrieve(made.id).output_text == made.output_text
    client.responses.delete(made.id)
    raises(openai.NotFoundError, lambda: client.responses.retrieve(made.id))


def check_what_was_not_to_be_stored_is_not() -> None:
    made = client.responses.create(**GREEDY, input="Name a river.", store=False)
    raises(openai.NotFoundError, lambda: client.responses.retrieve(made.id))
    error = raises(
        openai.APIStatusError,
        lambda: client.responses.create(**GREEDY, input="And?", previous_response_id=made.id),
    )
    assert error.status_code in (400, 404)


def check_logprobs() -> None:
    answer = client.responses.create(
        **GREEDY,
        input="Name a river.",
        include=["message.output_text.logprobs"],
        top_logprobs=2,
    )
    tokens = answer.output[0].content[0].logprobs
    assert tokens
    assert all(len(token.top_logprobs) == 2 for token in tokens)


def check_too_long_a_prompt() -> None:
    error = raises(
        openai.BadRequestError, lambda: client.responses.create(**GREEDY, input=TOO_LONG)
    )
    assert error.code == "context_length_exceeded"
    assert f"maximum context length is {CONTEXT}" in error.message


async def check_async() -> None:
    async with openai.AsyncOpenAI(base_url=f"{URL}/v1", api_key="none") as asking:
        answer = await asking.responses.create(**GREEDY, input="Name a river.")
        assert answer.output_text


if __name__ == "__main__":
    run()
