"""LangChain's ChatOpenAI and OpenAIEmbeddings, and an agent of langchain's on top of it."""

from __future__ import annotations

import json

import openai
from langchain_core.messages import AIMessageChunk, HumanMessage
from langchain_core.tools import tool
from langchain_openai import ChatOpenAI, OpenAI, OpenAIEmbeddings
from pydantic import BaseModel, Field

from checks import MODEL, TOO_LONG, URL, raises, run

PLACE = {"base_url": f"{URL}/v1", "api_key": "none", "model": MODEL}
chat = ChatOpenAI(**PLACE, stream_usage=True, temperature=0, max_tokens=40, max_retries=0)
roomy = ChatOpenAI(**PLACE, temperature=0, max_tokens=600, max_retries=0)


@tool
def get_weather(city: str) -> str:
    """The weather in a city."""
    return f"Rain in {city}."


@tool
def get_time(city: str) -> str:
    """The time in a city."""
    return f"Noon in {city}."


class River(BaseModel):
    """A river."""

    name: str = Field(description="Its name")
    length_km: int = Field(description="Its length")


def check_plain() -> None:
    answer = chat.invoke("Name a river.")
    assert answer.content
    assert answer.usage_metadata["output_tokens"] > 0
    assert answer.response_metadata["finish_reason"] in ("stop", "length")


def check_stream() -> None:
    whole: AIMessageChunk | None = None
    for chunk in chat.stream("Name a river."):
        whole = chunk if whole is None else whole + chunk
    assert whole.content == chat.invoke("Name a river.").content
    assert whole.usage_metadata["output_tokens"] > 0


async def check_async_and_batches() -> None:
    answers = await chat.abatch(["Name a river."] * 4)
    assert len({answer.content for answer in answers}) == 1
    text = "".join([chunk.content async for chunk in chat.astream("Name a river.")])
    assert text == answers[0].content


def check_a_named_tool_is_called_once() -> None:
    bound = roomy.bind_tools([get_weather, get_time], tool_choice="get_weather")
    answer = bound.invoke("What is the weather in Paris?")
    assert [call["name"] for call in answer.tool_calls] == ["get_weather"]
    assert set(answer.tool_calls[0]["args"]) == {"city"}
    assert not answer.invalid_tool_calls


def check_any_tool_ends() -> None:
    answer = roomy.bind_tools([get_weather], tool_choice="any").invoke("Weather in Paris?")
    assert answer.tool_calls
    assert answer.response_metadata["finish_reason"] == "tool_calls"


def check_tools_auto_end() -> None:
    answer = roomy.bind_tools([get_weather]).invoke("What is the weather in Paris?")
    assert answer.response_metadata["finish_reason"] in ("stop", "tool_calls", "length")


def check_a_tool_streams() -> None:
    bound = roomy.bind_tools([get_weather], tool_choice="get_weather")
    whole: AIMessageChunk | None = None
    for chunk in bound.stream("What is the weather in Paris?"):
        whole = chunk if whole is None else whole + chunk
    assert [call["name"] for call in whole.tool_calls] == ["get_weather"]


def check_a_round_of_tools() -> None:
    ask = HumanMessage("What is the weather in Paris?")
    call = roomy.bind_tools([get_weather], tool_choice="get_weather").invoke([ask])
    result = get_weather.invoke(call.tool_calls[0])
    assert chat.invoke([ask, call, result]).content


def check_structured_output() -> None:
    for method in ("json_schema", "function_calling"):
        asked = roomy.with_structured_output(River, method=method, include_raw=True)
        found = asked.invoke("The Rhine is 1230 km long. Answer in JSON.")
        assert found["raw"].response_metadata["finish_reason"] in ("stop", "tool_calls"), method
        assert isinstance(found["parsed"], River), method


def check_json_mode() -> None:
    """Promises JSON, not this schema, nor that a small model comes to its end."""
    asked = roomy.with_structured_output(River, method="json_mode", include_raw=True)
    try:
        found = asked.invoke("The Rhine is 1230 km long. Answer in JSON.")
    except openai.LengthFinishReasonError:
        return
    assert isinstance(json.loads(found["raw"].content), dict)


def check_structured_output_streams() -> None:
    pieces = list(roomy.with_structured_output(River).stream("The Rhine is 1230 km long."))
    assert isinstance(pieces[-1], River)


def check_an_agent_ends() -> None:
    from langchain.agents import create_agent

    found = create_agent(chat, [get_weather]).invoke(
        {"messages": [{"role": "user", "content": "What is the weather in Paris?"}]},
        {"recursion_limit": 8},
    )
    assert found["messages"][-1].type == "ai"


def check_responses_api() -> None:
    asking = ChatOpenAI(**PLACE, use_responses_api=True, max_retries=0, max_tokens=40)
    assert asking.invoke("Name a river.").text
    assert "".join(chunk.text for chunk in asking.stream("Name a river."))


def check_responses_api_remembers() -> None:
    asking = ChatOpenAI(
        **PLACE,
        use_responses_api=True,
        use_previous_response_id=True,
        max_retries=0,
        max_tokens=40,
        temperature=0,
    )
    first = asking.invoke("My name is Ada.")
    second = asking.invoke([HumanMessage("My name is Ada."), first, HumanMessage("My name?")])
    assert second.usage_metadata["input_tokens"] > first.usage_metadata["input_tokens"]


def check_completions() -> None:
    text = OpenAI(**PLACE, temperature=0, max_tokens=8, max_retries=0).invoke(
        "The capital of France is"
    )
    assert text.startswith(" Paris")


def check_embeddings() -> None:
    """Sends token ids of OpenAI's tokenizer unless it is told not to."""
    made = OpenAIEmbeddings(**PLACE, check_embedding_ctx_length=False, max_retries=0)
    vectors = made.embed_documents(["A river.", "A lake."])
    assert len(vectors) == 2
    assert len(vectors[0]) == len(made.embed_query("A river."))


def check_logprobs() -> None:
    answer = chat.bind(logprobs=True, top_logprobs=2).invoke("Name a river.")
    assert answer.response_metadata["logprobs"]["content"]


def check_too_long_a_prompt() -> None:
    error = raises(openai.BadRequestError, lambda: chat.invoke(TOO_LONG))
    assert error.code == "context_length_exceeded"


def check_too_long_a_prompt_is_its_own_kind_of_error() -> None:
    """Middleware that shortens conversations hangs on this kind. The newest openai shows the
    message alone, not the code; LangChain then looks for "prompt is too long" in it."""
    from langchain_core.exceptions import ContextOverflowError

    raises(ContextOverflowError, lambda: chat.invoke(TOO_LONG))


if __name__ == "__main__":
    run()
