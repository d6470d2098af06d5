"""OpenAI's Python SDK: chats, completions, embeddings, errors; /v1/responses is beside it."""

from __future__ import annotations

import json

import openai
from pydantic import BaseModel

from checks import CONTEXT, KEY, KEYED_URL, MODEL, TOO_LONG, URL, WEATHER_SCHEMA, raises, run

client = openai.OpenAI(base_url=f"{URL}/v1", api_key="none", max_retries=0, timeout=120)
ASK = [{"role": "user", "content": "What is the weather in Paris?"}]
GREEDY = {"model": MODEL, "messages": ASK, "temperature": 0, "max_tokens": 24}
WEATHER = {
    "type": "function",
    "function": {
        "name": "get_weather",
        "description": "The weather in a city.",
        "parameters": WEATHER_SCHEMA,
    },
}
TIME = {"type": "function", "function": {"name": "get_time", "parameters": {"type": "object"}}}


class River(BaseModel):
    name: str
    length_km: int


def check_plain() -> None:
    answer = client.chat.completions.create(**GREEDY)
    choice = answer.choices[0]
    assert choice.message.role == "assistant"
    assert choice.message.content
    assert choice.finish_reason in ("stop", "length")
    assert answer.usage.total_tokens == answer.usage.prompt_tokens + answer.usage.completion_tokens
    assert 0 < answer.usage.completion_tokens <= 24


def check_stream_says_the_same() -> None:
    whole = client.chat.completions.create(**GREEDY)
    options = {"include_usage": True}
    chunks = list(client.chat.completions.create(**GREEDY, stream=True, stream_options=options))
    text = "".join(c.choices[0].delta.content or "" for c in chunks if c.choices)
    assert text == whole.choices[0].message.content
    assert chunks[-1].choices == []
    assert chunks[-1].usage == whole.usage.model_copy(
        update={"prompt_tokens_details": chunks[-1].usage.prompt_tokens_details}
    )
    ends = [c.choices[0].finish_reason for c in chunks if c.choices]
    assert ends[-1] == whole.choices[0].finish_reason
    assert set(ends[:-1]) == {None}


async def check_async_many_at_once() -> None:
    import asyncio

    async with openai.AsyncOpenAI(base_url=f"{URL}/v1", api_key="none") as asking:
        answers = await asyncio.gather(
            *(asking.chat.completions.create(**GREEDY) for _ in range(8))
        )
        assert len({answer.choices[0].message.content for answer in answers}) == 1
        stream = await asking.chat.completions.create(**GREEDY, stream=True)
        text = "".join([c.choices[0].delta.content or "" async for c in stream])
        assert text == answers[0].choices[0].message.content


def check_stream_helper() -> None:
    with client.chat.completions.stream(**{**GREEDY, "max_tokens": 400}) as stream:
        kinds = {event.type for event in stream}
        final = stream.get_final_completion()
    assert {"chunk", "content.delta", "content.done"} <= kinds
    assert final.choices[0].message.content


def check_raw_response_and_request_id() -> None:
    raw = client.chat.completions.with_raw_response.create(**GREEDY)
    answer = raw.parse()
    assert raw.headers["x-request-id"]
    assert answer._request_id == raw.headers["x-request-id"]


def check_tools_auto_ends() -> None:
    answer = client.chat.completions.create(
        **{**GREEDY, "max_tokens": 200}, tools=[WEATHER, TIME], tool_choice="auto"
    )
    choice = answer.choices[0]
    assert choice.finish_reason in ("stop", "tool_calls", "length")
    assert (choice.finish_reason == "tool_calls") == bool(choice.message.tool_calls)


def check_a_named_tool_is_called_once() -> None:
    named = {"type": "function", "function": {"name": "get_weather"}}
    answer = client.chat.completions.create(
        **{**GREEDY, "max_tokens": 400}, tools=[WEATHER, TIME], tool_choice=named
    )
    calls = answer.choices[0].message.tool_calls
    assert [call.function.name for call in calls] == ["get_weather"]
    assert set(json.loads(calls[0].function.arguments)) == {"city", "unit"}
    assert answer.choices[0].finish_reason in ("stop", "tool_calls")
    assert answer.usage.completion_tokens < 400


def check_a_required_call_ends() -> None:
    answer = client.chat.completions.create(
        **{**GREEDY, "max_tokens": 1000}, tools=[WEATHER], tool_choice="required"
    )
    calls = answer.choices[0].message.tool_calls
    assert calls
    assert answer.choices[0].finish_reason == "tool_calls"
    for call in calls:
        assert call.function.name == "get_weather"
        json.loads(call.function.arguments)


def check_one_required_call_without_parallel_ones() -> None:
    answer = client.chat.completions.create(
        **{**GREEDY, "max_tokens": 1000},
        tools=[WEATHER],
        tool_choice="required",
        parallel_tool_calls=False,
    )
    assert len(answer.choices[0].message.tool_calls) == 1


def check_tool_calls_stream() -> None:
    named = {"type": "function", "function": {"name": "get_weather"}}
    chunks = client.chat.completions.create(
        **{**GREEDY, "max_tokens": 400}, tools=[WEATHER], tool_choice=named, stream=True
    )
    arguments, ids, names, end = "", [], [], None
    for chunk in chunks:
        for piece in chunk.choices[0].delta.tool_calls or []:
            assert piece.index == 0
            ids += [piece.id] if piece.id else []
            names += [piece.function.name] if piece.function.name else []
            arguments += piece.function.arguments or ""
        end = chunk.choices[0].finish_reason or end
    assert names == ["get_weather"]
    assert len(ids) == 1
    assert set(json.loads(arguments)) == {"city", "unit"}
    assert end in ("stop", "tool_calls")


def check_a_round_of_tools() -> None:
    """The call and its result go back, as an agent sends them, and an answer comes."""
    named = {"type": "function", "function": {"name": "get_weather"}}
    first = client.chat.completions.create(
        **{**GREEDY, "max_tokens": 400}, tools=[WEATHER], tool_choice=named
    )
    message = first.choices[0].message
    result = {"role": "tool", "tool_call_id": message.tool_calls[0].id, "content": "Rain, 9 C."}
    second = client.chat.completions.create(
        model=MODEL,
        messages=[*ASK, message, result],
        tools=[WEATHER],
        tool_choice="none",
        temperature=0,
        max_tokens=40,
    )
    assert second.choices[0].message.content
    assert not second.choices[0].message.tool_calls


def check_legacy_functions_are_not_ignored() -> None:
    """OpenAI's first shape of tools is refused, and the newer one named."""
    error = raises(
        openai.BadRequestError,
        lambda: client.chat.completions.create(
            **GREEDY, functions=[WEATHER["function"]], function_call={"name": "get_weather"}
        ),
    )
    assert "tools" in str(error)


def check_json_schema() -> None:
    answer = client.chat.completions.parse(
        model=MODEL,
        messages=[{"role": "user", "content": "The Rhine is 1230 km long. Give it as JSON."}],
        response_format=River,
        temperature=0,
        max_tokens=200,
    )
    assert isinstance(answer.choices[0].message.parsed, River)
    assert answer.choices[0].finish_reason == "stop"


def check_json_object() -> None:
    answer = client.chat.completions.create(
        **{**GREEDY, "max_tokens": 300, "response_format": {"type": "json_object"}}
    )
    if answer.choices[0].finish_reason == "stop":
        assert isinstance(json.loads(answer.choices[0].message.content), dict)


def check_logprobs() -> None:
    answer = client.chat.completions.create(**GREEDY, logprobs=True, top_logprobs=3)
    tokens = answer.choices[0].logprobs.content
    assert "".join(t.token for t in tokens).startswith(answer.choices[0].message.content)
    for token in tokens:
        assert len(token.top_logprobs) == 3
        assert token.logprob <= 0


def check_several_choices_and_seed() -> None:
    """With a seed the same choices come again, all different draws of one request."""
    asked = {**GREEDY, "temperature": 1, "n": 3, "seed": 7}
    first, second = (client.chat.completions.create(**asked) for _ in range(2))
    assert [c.index for c in first.choices] == [0, 1, 2]
    assert [c.message for c in first.choices] == [c.message for c in second.choices]


def check_completions() -> None:
    answer = client.completions.create(
        model=MODEL, prompt=["The capital of France is", "Once"], temperature=0, max_tokens=8
    )
    assert [choice.index for choice in answer.choices] == [0, 1]
    assert answer.choices[0].text.startswith(" Paris")
    stream = client.completions.create(
        model=MODEL, prompt="The capital of France is", temperature=0, max_tokens=8, stream=True
    )
    assert "".join(chunk.choices[0].text for chunk in stream) == answer.choices[0].text


def check_embeddings() -> None:
    """As floats and, which is the SDK's default, as base64."""
    texts = ["A river.", "A stream of water.", "Tax law."]
    floats = client.embeddings.create(model=MODEL, input=texts, encoding_format="float")
    packed = client.embeddings.create(model=MODEL, input=texts)
    assert [each.index for each in packed.data] == [0, 1, 2]
    assert packed.usage.prompt_tokens > 0
    for one, other in zip(floats.data, packed.data, strict=True):
        assert max(abs(a - b) for a, b in zip(one.embedding, other.embedding, strict=True)) < 1e-6
        assert abs(sum(a * a for a in one.embedding) - 1) < 1e-3


def check_models() -> None:
    assert MODEL in [model.id for model in client.models.list()]
    assert client.models.retrieve(MODEL).id == MODEL
    raises(openai.NotFoundError, lambda: client.models.retrieve("gpt-4o"))


def check_fields_of_others() -> None:
    """What vLLM's and llama.cpp's users send beside OpenAI's own fields is no error."""
    extra = {
        "top_k": 40,
        "min_p": 0.05,
        "repetition_penalty": 1.1,
        "skip_special_tokens": True,
        "chat_template_kwargs": {"enable_thinking": False},
        "cache_prompt": True,
        "mirostat": 0,
    }
    answer = client.chat.completions.create(
        **GREEDY,
        user="someone",
        store=True,
        metadata={"a": "b"},
        service_tier="auto",
        prompt_cache_key="key",
        safety_identifier="id",
        extra_body=extra,
    )
    assert answer.choices[0].message.content


def check_a_bad_key() -> None:
    asking = openai.OpenAI(base_url=f"{KEYED_URL}/v1", api_key="wrong", max_retries=0)
    error = raises(openai.AuthenticationError, lambda: asking.chat.completions.create(**GREEDY))
    assert error.code == "invalid_api_key"
    good = openai.OpenAI(base_url=f"{KEYED_URL}/v1", api_key=KEY, max_retries=0)
    assert good.chat.completions.create(**GREEDY).choices


def check_too_long_a_prompt() -> None:
    asked = {**GREEDY, "messages": [{"role": "user", "content": TOO_LONG}]}
    error = raises(openai.BadRequestError, lambda: client.chat.completions.create(**asked))
    assert error.code == "context_length_exceeded"
    assert f"maximum context length is {CONTEXT}" in error.message
    streamed = raises(
        openai.BadRequestError, lambda: client.chat.completions.create(**asked, stream=True)
    )
    assert streamed.code == "context_length_exceeded"


def check_max_tokens_that_do_not_fit() -> None:
    """Asked for more than there is room for: never fewer tokens without a word."""
    words = "word " * (CONTEXT - 400)
    asked = {"model": MODEL, "messages": [{"role": "user", "content": words}], "temperature": 0}
    error = raises(
        openai.BadRequestError,
        lambda: client.chat.completions.create(**asked, max_tokens=1000),
    )
    assert error.code == "context_length_exceeded"


def check_bad_values() -> None:
    error = raises(
        openai.BadRequestError,
        lambda: client.chat.completions.create(**{**GREEDY, "temperature": -1}),
    )
    assert error.param == "temperature"
    raises(
        openai.NotFoundError,
        lambda: client.chat.completions.create(**{**GREEDY, "model": "gpt-4o"}),
    )


def check_a_timeout_of_the_client() -> None:
    """The SDK gives up; the server goes on with others."""
    hasty = client.with_options(timeout=0.05)
    raises(
        openai.APITimeoutError,
        lambda: hasty.chat.completions.create(
            **{**GREEDY, "max_tokens": 4000}, extra_body={"ignore_eos": True}
        ),
    )
    check_plain()


def check_leaving_a_stream() -> None:
    with client.chat.completions.create(
        **{**GREEDY, "max_tokens": 4000}, stream=True, extra_body={"ignore_eos": True}
    ) as stream:
        next(iter(stream))
    check_plain()


if __name__ == "__main__":
    run()
