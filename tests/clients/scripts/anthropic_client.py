"""Anthropic's Python SDK on /v1/messages."""

from __future__ import annotations

import anthropic

from checks import KEY, KEYED_URL, MODEL, TOO_LONG, URL, WEATHER_SCHEMA, raises, run

client = anthropic.Anthropic(base_url=URL, api_key="none", max_retries=0, timeout=120)
ASK = [{"role": "user", "content": "What is the weather in Paris?"}]
# The newest SDK has no word for a temperature of its own; the API takes it.
GREEDY = {
    "model": MODEL,
    "messages": ASK,
    "max_tokens": 40,
    "extra_body": {"temperature": 0},
}
WEATHER = {
    "name": "get_weather",
    "description": "The weather in a city.",
    "input_schema": WEATHER_SCHEMA,
}


def check_plain() -> None:
    answer = client.messages.create(**GREEDY, system="Be brief.")
    assert answer.type == "message"
    assert answer.role == "assistant"
    assert answer.content[0].type == "text"
    assert answer.content[0].text
    assert answer.stop_reason in ("end_turn", "max_tokens")
    assert answer.usage.input_tokens > 0
    assert 0 < answer.usage.output_tokens <= 40


def check_stop_reasons() -> None:
    cut = client.messages.create(**{**GREEDY, "max_tokens": 2})
    assert cut.stop_reason == "max_tokens"
    assert cut.usage.output_tokens == 2
    whole = client.messages.create(**GREEDY).content[0].text
    word = whole.split()[2]
    stopped = client.messages.create(**GREEDY, stop_sequences=[word])
    assert stopped.stop_reason == "stop_sequence"
    assert stopped.stop_sequence == word
    assert word not in stopped.content[0].text


def check_stream() -> None:
    whole = client.messages.create(**GREEDY)
    with client.messages.stream(**GREEDY) as stream:
        text = "".join(stream.text_stream)
        final = stream.get_final_message()
    assert text == whole.content[0].text == final.content[0].text
    assert final.stop_reason == whole.stop_reason
    assert final.usage.output_tokens == whole.usage.output_tokens


def check_events_come_in_order() -> None:
    kinds = [event.type for event in client.messages.create(**GREEDY, stream=True)]
    kinds = [kind for kind in kinds if kind != "ping"]
    assert kinds[:2] == ["message_start", "content_block_start"]
    assert set(kinds[2:-3]) == {"content_block_delta"}
    assert kinds[-3:] == ["content_block_stop", "message_delta", "message_stop"]


async def check_async() -> None:
    async with anthropic.AsyncAnthropic(base_url=URL, api_key="none") as asking:
        answer = await asking.messages.create(**GREEDY)
        async with asking.messages.stream(**GREEDY) as stream:
            text = "".join([piece async for piece in stream.text_stream])
    assert text == answer.content[0].text


def check_content_in_blocks() -> None:
    """As Claude Code sends it: a system prompt and messages in blocks, with cache marks."""
    block = {"type": "text", "text": "Name a river.", "cache_control": {"type": "ephemeral"}}
    answer = client.messages.create(
        model=MODEL,
        max_tokens=20,
        system=[{**block, "text": "Be brief."}],
        messages=[{"role": "user", "content": [block]}],
        metadata={"user_id": "someone"},
    )
    assert answer.content


def check_a_named_tool_and_its_result() -> None:
    asked = {**GREEDY, "max_tokens": 400, "tools": [WEATHER]}
    answer = client.messages.create(**asked, tool_choice={"type": "tool", "name": "get_weather"})
    uses = [block for block in answer.content if block.type == "tool_use"]
    assert [use.name for use in uses] == ["get_weather"]
    assert set(uses[0].input) == {"city", "unit"}
    assert answer.stop_reason == "tool_use"
    result = {"type": "tool_result", "tool_use_id": uses[0].id, "content": "Rain, 9 C."}
    second = client.messages.create(
        **{
            **asked,
            "messages": [
                *ASK,
                {"role": "assistant", "content": answer.content},
                {"role": "user", "content": [result]},
            ],
        },
        tool_choice={"type": "none"},
    )
    assert second.content[0].type == "text"


def check_any_tool_ends() -> None:
    answer = client.messages.create(
        **{**GREEDY, "max_tokens": 1000}, tools=[WEATHER], tool_choice={"type": "any"}
    )
    assert answer.stop_reason == "tool_use"


def check_tools_auto_ends() -> None:
    answer = client.messages.create(
        **{**GREEDY, "max_tokens": 200}, tools=[WEATHER], tool_choice={"type": "auto"}
    )
    assert answer.stop_reason in ("end_turn", "tool_use", "max_tokens")


def check_a_tool_streams() -> None:
    with client.messages.stream(
        **{**GREEDY, "max_tokens": 400},
        tools=[WEATHER],
        tool_choice={"type": "tool", "name": "get_weather"},
    ) as stream:
        kinds = [event.type for event in stream]
        final = stream.get_final_message()
    assert "input_json" in kinds
    uses = [block for block in final.content if block.type == "tool_use"]
    assert len(uses) == 1
    assert set(uses[0].input) == {"city", "unit"}
    assert final.stop_reason == "tool_use"


def check_token_counts_agree() -> None:
    """What count_tokens says is what an answer's usage says."""
    for more in ({}, {"system": "Be brief."}, {"tools": [WEATHER]}):
        counted = client.messages.count_tokens(model=MODEL, messages=ASK, **more)
        usage = client.messages.create(**{**GREEDY, "max_tokens": 1}, **more).usage
        cached = (usage.cache_read_input_tokens or 0) + (usage.cache_creation_input_tokens or 0)
        assert counted.input_tokens == usage.input_tokens + cached


def check_a_bad_key() -> None:
    asking = anthropic.Anthropic(base_url=KEYED_URL, api_key="wrong", max_retries=0)
    error = raises(anthropic.AuthenticationError, lambda: asking.messages.create(**GREEDY))
    assert error.body["type"] == "error"
    assert error.body["error"]["type"] == "authentication_error"
    good = anthropic.Anthropic(base_url=KEYED_URL, api_key=KEY, max_retries=0)
    assert good.messages.create(**GREEDY).content
    bearer = anthropic.Anthropic(base_url=KEYED_URL, auth_token=KEY, max_retries=0)
    assert bearer.messages.create(**GREEDY).content


def check_errors() -> None:
    too_long = {**GREEDY, "messages": [{"role": "user", "content": TOO_LONG}]}
    error = raises(anthropic.BadRequestError, lambda: client.messages.create(**too_long))
    assert error.body["error"]["type"] == "invalid_request_error"
    unknown = {**GREEDY, "model": "claude-9"}
    raises(anthropic.NotFoundError, lambda: client.messages.create(**unknown))


def check_models() -> None:
    assert MODEL in [model.id for model in client.models.list()]


if __name__ == "__main__":
    run()
