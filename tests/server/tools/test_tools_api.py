"""Tool calling through the official SDK, against a real server whose model's template knows no
tools: everything it is told and says goes through the plain convention."""

from __future__ import annotations

import json
from typing import Any

import jsonschema
import openai
import pydantic
import pytest
from openai.types.chat import ChatCompletion

from headrace.server.tools.formats import MAX_CALLS

MODEL = "smollm2"
ASK: list[Any] = [{"role": "user", "content": "Weather in Paris?"}]
WEATHER: Any = {
    "type": "function",
    "function": {
        "name": "look",
        "description": "Look it up.",
        "parameters": {
            "type": "object",
            "properties": {"city": {"type": "string", "maxLength": 12}},
            "required": ["city"],
            "additionalProperties": False,
        },
        "strict": True,
    },
}
NOW: Any = {"type": "function", "function": {"name": "now", "description": "The time."}}
SCHEMAS = {"look": WEATHER["function"]["parameters"], "now": {"maxProperties": 0}}


def ask(client: openai.OpenAI, **more: Any) -> ChatCompletion:
    fields = {"model": MODEL, "messages": ASK, "tools": [WEATHER, NOW], "max_tokens": 40}
    made: ChatCompletion = client.chat.completions.create(**{"temperature": 0, **fields, **more})
    return made


def calls_of(choice: Any) -> list[tuple[str, dict[str, Any]]]:
    found = []
    for call in choice.message.tool_calls or []:
        assert call.type == "function"
        arguments = json.loads(call.function.arguments)
        jsonschema.validate(arguments, SCHEMAS[call.function.name])
        found.append((call.function.name, arguments))
    return found


def test_required(client: openai.OpenAI) -> None:
    fields: Any = {"n": 4, "temperature": 1.5, "seed": 1, "parallel_tool_calls": False}
    made = ask(client, tool_choice="required", **fields)
    assert all(choice.message.content is None for choice in made.choices)
    called = [choice for choice in made.choices if choice.finish_reason == "tool_calls"]
    assert len(called) > 1
    assert all(len(calls_of(choice)) == 1 for choice in called)
    ids = [call.id for choice in called for call in choice.message.tool_calls or []]
    assert len(set(ids)) == len(ids)


def named(name: str) -> Any:
    return {"type": "function", "function": {"name": name}}


@pytest.mark.parametrize("parallel", [None, True, False])
def test_a_named_function_is_called_once(client: openai.OpenAI, parallel: bool | None) -> None:
    """As OpenAI has it: one call, and `stop`, since it was not the model that chose to call."""
    for name in ("now", "look"):
        more = {} if parallel is None else {"parallel_tool_calls": parallel}
        made = ask(client, tool_choice=named(name), max_tokens=400, **more)
        assert [called for called, _ in calls_of(made.choices[0])] == [name]
        assert made.choices[0].finish_reason == "stop"
        assert made.choices[0].message.content is None


def test_a_named_function_is_called_once_in_a_stream(client: openai.OpenAI) -> None:
    fields: Any = {"model": MODEL, "messages": ASK, "tools": [WEATHER, NOW], "temperature": 0}
    fields |= {"tool_choice": named("look"), "max_tokens": 400}
    chunks = list(client.chat.completions.create(**fields, stream=True))
    deltas = [call for c in chunks for call in c.choices[0].delta.tool_calls or []]
    assert {call.index for call in deltas} == {0}
    assert chunks[-1].choices[0].finish_reason == "stop"
    whole = calls_of(client.chat.completions.create(**fields).choices[0])
    written = "".join(call.function.arguments or "" for call in deltas if call.function)
    assert whole == [("look", json.loads(written))]


def test_a_named_function_is_called_once_in_responses(client: openai.OpenAI) -> None:
    flat: Any = {"type": "function", **NOW["function"]}
    choice: Any = {"type": "function", "name": "now"}
    fields: Any = {"model": MODEL, "input": "Time?", "tools": [flat], "tool_choice": choice}
    fields |= {"temperature": 0, "max_output_tokens": 400}
    made = client.responses.create(**fields)
    assert made.status == "completed"
    assert [item.type for item in made.output] == ["function_call"]
    events = list(client.responses.create(**fields, stream=True))
    assert [e.type for e in events].count("response.function_call_arguments.done") == 1
    assert events[-1].type == "response.completed"


def test_required_comes_to_an_end(client: openai.OpenAI) -> None:
    """However often a small model repeats itself: no bound of ours is near but that of calls."""
    made = ask(client, tools=[NOW], tool_choice="required", max_tokens=2000)
    assert made.choices[0].finish_reason == "tool_calls"
    assert 1 <= len(calls_of(made.choices[0])) <= MAX_CALLS


def test_none(client: openai.OpenAI) -> None:
    made = ask(client, tool_choice="none", max_tokens=8)
    assert made.choices[0].message.tool_calls is None
    assert made.choices[0].message.content
    plain = ask(client, tools=openai.omit, max_tokens=8)
    assert plain.choices[0].message.content == made.choices[0].message.content


def shown(place: str) -> list[Any]:
    """A question about a place that was answered by a call, for a small model to follow."""
    function = {"name": "look", "arguments": json.dumps({"city": place})}
    calls = [{"id": place, "type": "function", "function": function}]
    return [
        {"role": "user", "content": f"Weather in {place}?"},
        {"role": "assistant", "content": "Let me look.", "tool_calls": calls},
        {"role": "tool", "tool_call_id": place, "content": "12"},
        {"role": "assistant", "content": "It is 12."},
    ]


def test_auto_is_text_or_calls(client: openai.OpenAI) -> None:
    plain = ask(client, max_tokens=16)
    assert plain.choices[0].message.content
    assert plain.choices[0].message.tool_calls is None
    told = [*shown("Rome"), *shown("Oslo"), *shown("Lima"), *ASK]
    [choice] = ask(client, messages=told, tools=[WEATHER]).choices
    assert choice.finish_reason == "tool_calls"
    assert calls_of(choice) == [("look", {"city": "Paris"})]
    assert choice.message.content == "Let me look."


def test_parallel_calls(client: openai.OpenAI) -> None:
    """A model that is never satisfied writes one call after another, until its time is up."""
    made = ask(client, tools=[NOW], tool_choice="required", max_tokens=60, temperature=0)
    counts = [len(choice.message.tool_calls or []) for choice in made.choices]
    assert max(counts) > 1
    one = ask(client, tools=[NOW], tool_choice="required", parallel_tool_calls=False, n=2)
    assert [len(choice.message.tool_calls or []) for choice in one.choices] == [1, 1]


def test_a_call_that_is_cut_is_left_out(client: openai.OpenAI) -> None:
    made = ask(
        client, tool_choice={"type": "function", "function": {"name": "look"}}, max_tokens=14
    )
    assert made.choices[0].finish_reason == "length"
    assert made.choices[0].message.tool_calls is None
    assert made.choices[0].message.content is None


def test_streamed_deltas_are_the_same_calls(client: openai.OpenAI) -> None:
    fields: Any = {"model": MODEL, "messages": ASK, "tools": [WEATHER, NOW], "max_tokens": 40}
    fields |= {"temperature": 0, "tool_choice": "required", "parallel_tool_calls": False}
    whole = client.chat.completions.create(**fields)
    with client.chat.completions.stream(**fields) as stream:
        kinds = [event.type for event in stream]
        final = stream.get_final_completion()
    assert calls_of(final.choices[0]) == calls_of(whole.choices[0])
    assert final.choices[0].finish_reason == "tool_calls"
    assert kinds.count("tool_calls.function.arguments.done") == 1

    chunks = list(client.chat.completions.create(**fields, stream=True))
    deltas = [call for c in chunks for call in c.choices[0].delta.tool_calls or []]
    first, *rest = deltas
    assert first.id
    assert first.function is not None
    assert (first.function.name, first.function.arguments) == ("look", "")
    assert len(rest) > 3  # in pieces, as they come
    assert all(call.id is None and call.index == 0 for call in rest)
    assert [c.choices[0].finish_reason for c in chunks][-1] == "tool_calls"
    assert not any(c.choices[0].delta.content for c in chunks)


def test_streams_of_several_choices(client: openai.OpenAI) -> None:
    fields: Any = {"model": MODEL, "messages": ASK, "tools": [WEATHER, NOW], "max_tokens": 40}
    fields |= {"temperature": 1.2, "seed": 2, "n": 2, "parallel_tool_calls": False}
    whole = client.chat.completions.create(**fields, tool_choice="required")
    with client.chat.completions.stream(
        **fields, tool_choice="required", stream_options={"include_usage": True}
    ) as stream:
        final = stream.get_final_completion()
    for one, other in zip(whole.choices, final.choices, strict=True):
        if one.finish_reason == "tool_calls":
            assert calls_of(one) == calls_of(other)
        assert one.finish_reason == other.finish_reason
    assert final.usage == whole.usage or final.usage.total_tokens == whole.usage.total_tokens  # type: ignore[union-attr]


def test_a_round_trip(client: openai.OpenAI) -> None:
    first = ask(client, tool_choice="required", parallel_tool_calls=False)
    [call] = first.choices[0].message.tool_calls or []
    said = first.choices[0].message.model_dump(exclude_none=True)
    result = {"role": "tool", "tool_call_id": call.id, "content": "12 degrees, rain"}
    second = ask(client, messages=[*ASK, said, result], max_tokens=16)
    assert second.choices[0].message.content or second.choices[0].message.tool_calls
    assert second.usage is not None
    assert first.usage is not None
    assert second.usage.prompt_tokens > first.usage.prompt_tokens


class GetWeather(pydantic.BaseModel):
    city: str = pydantic.Field(max_length=16)


def test_the_sdk_parses_arguments(client: openai.OpenAI) -> None:
    made = client.chat.completions.parse(
        model=MODEL,
        messages=ASK,
        tools=[openai.pydantic_function_tool(GetWeather)],
        tool_choice="required",
        parallel_tool_calls=False,
        temperature=0,
        max_tokens=60,
    )
    [call] = made.choices[0].message.tool_calls or []
    assert isinstance(call.function.parsed_arguments, GetWeather)


def test_refused_alone(client: openai.OpenAI) -> None:
    odd = {"type": "function", "function": {"name": "f", "strict": True}}
    odd["function"]["parameters"] = {"type": "object", "properties": {"a": {"not": {}}}}  # type: ignore[index]
    for fields in (
        {"tools": [WEATHER, WEATHER]},
        {"tool_choice": {"type": "function", "function": {"name": "unheard"}}},
        {"tools": [odd]},
        {"messages": [{"role": "assistant", "tool_calls": [{"id": "x"}]}]},
    ):
        with pytest.raises(openai.BadRequestError):
            ask(client, **fields)
    assert ask(client, tools=[NOW], tool_choice="required", parallel_tool_calls=False).choices
