"""/v1/messages through Anthropic's own SDK, against a real server."""

from __future__ import annotations

import json
import os
import signal
from collections.abc import Iterator
from typing import Any, Literal

import anthropic
import httpx
import openai
import pydantic
import pytest
from tests.server.conftest import RunningServer, StartServer

MODEL = "smollm2"
QUESTION: Any = [{"role": "user", "content": "What is 2+2?"}]
WEATHER: Any = {
    "name": "get_weather",
    "description": "The weather of a city.",
    "input_schema": {
        "type": "object",
        "properties": {"city": {"type": "string", "maxLength": 16}},
        "required": ["city"],
        "additionalProperties": False,
    },
}
ONE_CALL: Any = {"type": "any", "disable_parallel_tool_use": True}
IN_PARIS: Any = {
    "messages": [{"role": "user", "content": "Weather in Paris?"}],
    "tools": [WEATHER],
    "tool_choice": ONE_CALL,
    "max_tokens": 60,
}


@pytest.fixture(scope="module")
def claude(server: RunningServer) -> Iterator[anthropic.Anthropic]:
    with anthropic.Anthropic(base_url=server.base_url, api_key="none", max_retries=0) as made:
        yield made


@pytest.fixture(scope="module")
def small(start_server: StartServer) -> Iterator[anthropic.Anthropic]:
    """A server whose context is soon full, and which has a key."""
    started = start_server(server={"api_key": "secret"}, engine={"context_tokens": 128})
    with anthropic.Anthropic(base_url=started.base_url, api_key="secret", max_retries=0) as made:
        yield made


def ask(claude: anthropic.Anthropic, **fields: Any) -> Any:
    # The newest SDK has no words for some fields of the API any more.
    greedy = {"temperature": 0, **fields.pop("extra_body", {})}
    return claude.messages.create(
        **{"model": MODEL, "max_tokens": 12, "messages": QUESTION, **fields}, extra_body=greedy
    )


def post(server: RunningServer, **fields: Any) -> httpx.Response:
    body = {"model": MODEL, "max_tokens": 4, "temperature": 0, "messages": QUESTION, **fields}
    return httpx.post(f"{server.base_url}/v1/messages", json=body, timeout=60)


def events_of(reply: httpx.Response) -> list[tuple[str, dict[str, Any]]]:
    """Server-sent events as they are on the wire: their name, and their data."""
    found = []
    for block in reply.text.strip().split("\n\n"):
        first, second = block.split("\n")
        found.append((first.removeprefix("event: "), json.loads(second.removeprefix("data: "))))
    return found


# -- texts -----------------------------------------------------------------------------------------


def test_the_same_words_as_a_chat(claude: anthropic.Anthropic, client: openai.OpenAI) -> None:
    made = ask(claude, system="Be brief.", metadata={"user_id": "me"})
    chat = client.chat.completions.create(
        model=MODEL,
        messages=[{"role": "system", "content": "Be brief."}, QUESTION[0]],
        temperature=0,
        max_tokens=12,
    )
    assert (made.type, made.role, made.model) == ("message", "assistant", MODEL)
    [block] = made.content
    assert (block.type, block.text) == ("text", chat.choices[0].message.content)
    assert made.id.startswith("msg_")
    assert chat.usage is not None
    used = made.usage
    assert used.input_tokens + used.cache_read_input_tokens == chat.usage.prompt_tokens
    assert used.output_tokens == chat.usage.completion_tokens


def test_blocks_are_texts(claude: anthropic.Anthropic) -> None:
    plain = ask(claude, system="Be brief.\nBe kind.", max_tokens=4)
    cached = {"cache_control": {"type": "ephemeral"}}
    billing = "x-anthropic-billing-header: cc_version=2.1; cch=00000;"
    blocks = ask(
        claude,
        system=[
            {"type": "text", "text": billing},
            {"type": "text", "text": "Be brief.", **cached},
            {"type": "text", "text": "Be kind."},
        ],
        messages=[{"role": "user", "content": [{"type": "text", "text": "What is 2+2?"}]}],
        max_tokens=4,
    )
    assert blocks.content == plain.content
    total = plain.usage.input_tokens + plain.usage.cache_read_input_tokens
    assert blocks.usage.input_tokens + blocks.usage.cache_read_input_tokens == total
    assert blocks.usage.cache_read_input_tokens > 0  # the same prompt came just before


def test_turns_of_one_role_are_one(claude: anthropic.Anthropic) -> None:
    turns = [{"role": "user", "content": "What is"}, {"role": "user", "content": "2+2?"}]
    joined = [{"role": "user", "content": "What is\n2+2?"}]
    assert ask(claude, messages=turns).content == ask(claude, messages=joined).content


def test_an_answer_that_was_begun_goes_on(claude: anthropic.Anthropic, server: Any) -> None:
    begun = [
        {"role": "user", "content": "What is the capital of France?"},
        {"role": "assistant", "content": "The capital of France is"},
    ]
    made = ask(claude, messages=begun)
    chat = {"messages": begun, "continue_final_message": True, "max_tokens": 12, "temperature": 0}
    reply = httpx.post(f"{server.base_url}/v1/chat/completions", json=chat, timeout=60).json()
    assert made.content[0].text == reply["choices"][0]["message"]["content"]
    assert "Paris" in made.content[0].text


@pytest.mark.parametrize("stream", [False, True])
def test_how_it_ends(claude: anthropic.Anthropic, stream: bool) -> None:
    count: Any = {"messages": [{"role": "user", "content": "Count from 1 to 9."}]}

    def ending(**fields: Any) -> tuple[str, str | None]:
        fields = {**count, **fields}
        if not stream:
            made = ask(claude, **fields)
        else:
            events = list(ask(claude, stream=True, **fields))
            made = next(e.delta for e in events if e.type == "message_delta")
        return made.stop_reason, made.stop_sequence

    assert ending(max_tokens=3) == ("max_tokens", None)
    assert ending(max_tokens=60, stop_sequences=["zebra", "4"]) == ("stop_sequence", "4")
    assert ending(messages=QUESTION, max_tokens=60) == ("end_turn", None)


def test_a_stream_is_made_of_these_events(server: RunningServer) -> None:
    whole = post(server, max_tokens=8).json()
    events = events_of(post(server, max_tokens=8, stream=True))
    assert all(name == data["type"] for name, data in events)
    names = [name for name, _ in events]
    deltas = names.count("content_block_delta")
    assert deltas > 3
    assert names == [
        "message_start",
        "content_block_start",
        "ping",
        *["content_block_delta"] * deltas,
        "content_block_stop",
        "message_delta",
        "message_stop",
    ]
    start, block = events[0][1]["message"], events[1][1]
    assert (start["type"], start["role"], start["content"]) == ("message", "assistant", [])
    assert (start["stop_reason"], start["stop_sequence"]) == (None, None)
    assert block["content_block"] == {"type": "text", "text": ""}
    text = "".join(data["delta"]["text"] for name, data in events if name == "content_block_delta")
    assert [{"type": "text", "text": text}] == whole["content"]
    end = events[-2][1]
    assert end["delta"] == {"stop_reason": whole["stop_reason"], "stop_sequence": None}
    assert end["usage"]["output_tokens"] == whole["usage"]["output_tokens"]


def test_the_sdk_puts_a_stream_together(claude: anthropic.Anthropic) -> None:
    whole = ask(claude)
    with claude.messages.stream(
        model=MODEL, max_tokens=12, messages=QUESTION, extra_body={"temperature": 0}
    ) as stream:
        text = "".join(stream.text_stream)
        final = stream.get_final_message()
    assert text == whole.content[0].text
    assert final.stop_reason == whole.stop_reason
    assert final.usage.output_tokens == whole.usage.output_tokens


class Colour(pydantic.BaseModel):
    name: Literal["red", "blue"]
    warm: bool


def test_an_answer_by_a_schema(claude: anthropic.Anthropic) -> None:
    made = claude.messages.parse(
        model=MODEL,
        max_tokens=40,
        messages=[{"role": "user", "content": "A colour."}],
        output_format=Colour,
        extra_body={"temperature": 0},
    )
    assert isinstance(made.parsed_output, Colour)


# -- tools -----------------------------------------------------------------------------------------


def test_a_call_and_its_result(claude: anthropic.Anthropic) -> None:
    made = ask(claude, **IN_PARIS)
    assert made.stop_reason == "tool_use"
    [call] = made.content
    assert (call.type, call.name, list(call.input)) == ("tool_use", "get_weather", ["city"])
    result = {"type": "tool_result", "tool_use_id": call.id}
    turns = [*IN_PARIS["messages"], {"role": "assistant", "content": made.content}]

    def again(content: Any, **more: Any) -> Any:
        said = [{**result, "content": content, **more}, {"type": "text", "text": "Go on."}]
        return ask(
            claude,
            messages=[*turns, {"role": "user", "content": said}],
            tools=[WEATHER],
            tool_choice={"type": "none"},
            max_tokens=4,
        )

    first = again("12 C, rain")
    assert again([{"type": "text", "text": "12 C, rain"}]).content == first.content
    failed = again("12 C, rain", is_error=True)
    count = first.usage.input_tokens + first.usage.cache_read_input_tokens
    assert failed.usage.input_tokens + failed.usage.cache_read_input_tokens > count


def test_a_stream_of_a_call(claude: anthropic.Anthropic) -> None:
    whole = ask(claude, **IN_PARIS)
    with claude.messages.stream(model=MODEL, **IN_PARIS, extra_body={"temperature": 0}) as stream:
        events = list(stream)
        final = stream.get_final_message()
    raw = [e.type for e in events if e.type not in ("input_json", "text")]
    deltas = raw.count("content_block_delta")
    assert deltas > 2
    assert raw == [
        *("message_start", "content_block_start"),
        *["content_block_delta"] * deltas,
        *("content_block_stop", "message_delta", "message_stop"),
    ]
    [call] = final.content
    assert call.type == "tool_use"
    assert call.input == whole.content[0].input
    assert final.stop_reason == "tool_use"


def test_the_tool_that_is_named(claude: anthropic.Anthropic) -> None:
    other = {**WEATHER, "name": "get_time"}
    named = {"type": "tool", "name": "get_time", "disable_parallel_tool_use": True}
    made = ask(claude, **{**IN_PARIS, "tools": [WEATHER, other], "tool_choice": named})
    assert [block.name for block in made.content] == ["get_time"]


def test_half_a_call_is_left_out(claude: anthropic.Anthropic) -> None:
    made = ask(claude, **{**IN_PARIS, "max_tokens": 14})
    assert made.stop_reason == "max_tokens"
    assert [block for block in made.content if block.type == "tool_use"] == []


# -- counts ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("more", [{}, {"system": "Be brief."}, {"tools": [WEATHER]}])
def test_tokens_are_counted_as_they_are_used(claude: anthropic.Anthropic, more: Any) -> None:
    counted = claude.messages.count_tokens(model=MODEL, messages=QUESTION, **more)
    used = ask(claude, max_tokens=1, **more).usage
    assert counted.input_tokens == used.input_tokens + used.cache_read_input_tokens


# -- refused, and ignored --------------------------------------------------------------------------

IMAGE = {"type": "image", "source": {"type": "url", "url": "http://127.0.0.1/x.png"}}
DOCUMENT = {"type": "document", "source": {"type": "text", "media_type": "text/plain", "data": "x"}}


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"max_tokens": 0}, "max_tokens is 0"),
        ({"max_tokens": 2**40}, "max_tokens is"),
        ({"messages": []}, "messages"),
        ({"messages": [{"role": "robot", "content": "x"}]}, "messages[0].role"),
        ({"messages": [{"role": "user"}]}, "messages[0].content"),
        (
            {"messages": [{"role": "user", "content": [IMAGE]}]},
            "'image'; this server reads only text",
        ),
        ({"messages": [{"role": "user", "content": [DOCUMENT]}]}, "'document'"),
        ({"messages": [{"role": "user", "content": [{"type": "sound"}]}]}, "content[0].type"),
        ({"system": [IMAGE]}, "system[0]"),
        ({"tools": [{"name": "x"}]}, "tools[0].input_schema"),
        ({"tools": [WEATHER], "tool_choice": {"type": "some"}}, "tool_choice.type"),
        ({"tools": [WEATHER], "tool_choice": {"type": "tool", "name": "x"}}, "get_weather"),
        ({"tool_choice": {"type": "any"}}, "tool_choice"),
        ({"temperature": -1}, "temperature"),
        ({"output_config": {"format": {"type": "xml"}}}, "output_config.format.type"),
    ],
)
def test_refused(server: RunningServer, fields: dict[str, Any], words: str) -> None:
    reply = post(server, **fields)
    assert reply.status_code == 400
    body = reply.json()
    assert body["type"] == "error"
    assert body["error"]["type"] == "invalid_request_error"
    assert words in body["error"]["message"]
    assert reply.headers["request-id"] == body["request_id"] == reply.headers["x-request-id"]


def test_max_tokens_are_required(server: RunningServer) -> None:
    reply = post(server, max_tokens=None)
    assert reply.status_code == 400
    assert "max_tokens" in reply.json()["error"]["message"]


def test_another_model(claude: anthropic.Anthropic) -> None:
    with pytest.raises(anthropic.NotFoundError) as caught:
        ask(claude, model="claude-opus")
    assert caught.value.type == "not_found_error"
    assert caught.value.request_id


def test_what_clients_send_and_means_nothing_here(server: RunningServer) -> None:
    """As Claude Code does."""
    reply = post(
        server,
        metadata={"user_id": "x"},
        thinking={"type": "adaptive"},
        context_management={"edits": []},
        output_config={"effort": "high"},
        service_tier="auto",
        cache_control={"type": "ephemeral"},
        tools=[{"type": "web_search_20250305", "name": "web_search"}],
        messages=[
            *QUESTION,
            {
                "role": "assistant",
                "content": [
                    {"type": "thinking", "thinking": "Hm.", "signature": "x"},
                    {"type": "text", "text": "4"},
                ],
            },
            *QUESTION,
        ],
    )
    assert reply.status_code == 200, reply.text
    warned = reply.headers["x-headrace-warning"]
    for word in (
        "thinking",
        "context_management",
        "effort",
        "web_search",
        "messages[1].content[0]",
    ):
        assert word in warned
    for word in ("metadata", "service_tier", "cache_control"):
        assert word not in warned
    disabled = post(server, thinking={"type": "disabled"})
    assert "x-headrace-warning" not in disabled.headers


def test_a_prompt_beyond_the_context(small: anthropic.Anthropic) -> None:
    for words in (200, 200_000):  # counted, and too long to be counted
        with pytest.raises(
            anthropic.BadRequestError, match=r"prompt is too long: \d+ tokens > 127"
        ):
            ask(small, messages=[{"role": "user", "content": "word " * words}])


def test_more_than_the_context_holds_is_an_ending(small: anthropic.Anthropic) -> None:
    made = ask(small, max_tokens=8_000, extra_body={"ignore_eos": True})
    assert made.stop_reason == "model_context_window_exceeded"
    used = made.usage
    assert used.input_tokens + used.cache_read_input_tokens + used.output_tokens == 128


def test_keys(small: anthropic.Anthropic) -> None:
    assert ask(small, max_tokens=1).content  # sent as x-api-key
    bearer = anthropic.Anthropic(
        base_url=str(small.base_url), auth_token="secret", api_key=None, max_retries=0
    )
    assert ask(bearer, max_tokens=1).content
    wrong = anthropic.Anthropic(base_url=str(small.base_url), api_key="other", max_retries=0)
    with pytest.raises(anthropic.AuthenticationError) as caught:
        ask(wrong, max_tokens=1)
    assert caught.value.type == "authentication_error"


def test_an_error_in_the_middle_is_an_event(start_server: StartServer) -> None:
    started = start_server()
    body = {"max_tokens": 4000, "ignore_eos": True, "stream": True, "messages": QUESTION}
    with httpx.stream("POST", f"{started.base_url}/v1/messages", json=body, timeout=120) as reply:
        lines = reply.iter_lines()
        assert next(lines) == "event: message_start"
        for pid in started.engine_pids():
            os.kill(pid, signal.SIGKILL)
        rest = [line for line in lines if line]
    assert rest[-2] == "event: error"
    told = json.loads(rest[-1].removeprefix("data: "))
    assert told["type"] == "error"
    assert told["error"]["type"] in ("api_error", "overloaded_error")
    assert told["request_id"] == reply.headers["request-id"]
    assert "event: message_stop" not in rest
