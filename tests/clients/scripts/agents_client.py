"""OpenAI's Agents SDK: on /v1/responses, which is its default, and on chat completions."""

from __future__ import annotations

from collections.abc import AsyncIterator

from agents import (
    Agent,
    AgentOutputSchema,
    MaxTurnsExceeded,
    Model,
    ModelBehaviorError,
    ModelSettings,
    OpenAIChatCompletionsModel,
    OpenAIResponsesModel,
    Runner,
    function_tool,
    set_tracing_disabled,
)
from openai import AsyncOpenAI
from pydantic import BaseModel

from checks import MODEL, URL, run

set_tracing_disabled(True)
PROMPT = "What is the weather in Paris?"


class Person(BaseModel):
    name: str
    age: int


@function_tool
def get_weather(city: str) -> str:
    """The weather in a city."""
    return f"Rain in {city}."


async def each_model() -> AsyncIterator[Model]:
    """A client belongs to an event loop, and each check has its own."""
    async with AsyncOpenAI(base_url=f"{URL}/v1", api_key="none", max_retries=0) as client:
        yield OpenAIResponsesModel(model=MODEL, openai_client=client)
        yield OpenAIChatCompletionsModel(model=MODEL, openai_client=client)


def agent(model: object, tool_choice: str | None = None, **more: object) -> Agent:
    settings = ModelSettings(
        temperature=0, max_tokens=1500, include_usage=True, tool_choice=tool_choice
    )
    return Agent(name="a", instructions="Be brief.", model=model, model_settings=settings, **more)


async def check_plain() -> None:
    async for model in each_model():
        found = await Runner.run(agent(model), "Name a river.")
        assert found.final_output
        assert found.context_wrapper.usage.output_tokens > 0


async def check_stream() -> None:
    async for model in each_model():
        stream = Runner.run_streamed(agent(model), "Name a river.")
        kinds = [event.type async for event in stream.stream_events()]
        assert "raw_response_event" in kinds
        assert stream.final_output
        assert stream.context_wrapper.usage.output_tokens > 0


async def check_output_type() -> None:
    async for model in each_model():
        found = await Runner.run(agent(model, output_type=Person), "Ada is 36 years old.")
        assert isinstance(found.final_output, Person)


async def check_an_output_schema_that_is_not_strict() -> None:
    async for model in each_model():
        asked = agent(model, output_type=AgentOutputSchema(Person, strict_json_schema=False))
        found = await Runner.run(asked, "Ada is 36 years old.")
        assert isinstance(found.final_output, Person)


async def check_a_required_tool_is_called_and_the_run_ends() -> None:
    async for model in each_model():
        asked = agent(
            model, "required", tools=[get_weather], tool_use_behavior="stop_on_first_tool"
        )
        found = await Runner.run(asked, PROMPT, max_turns=2)
        assert found.final_output.startswith("Rain in")


async def check_a_named_tool_is_called_once() -> None:
    async for model in each_model():
        asked = agent(
            model, "get_weather", tools=[get_weather], tool_use_behavior="stop_on_first_tool"
        )
        found = await Runner.run(asked, PROMPT, max_turns=2)
        calls = [item for item in found.new_items if item.type == "tool_call_item"]
        assert len(calls) == 1


async def check_the_result_of_a_tool_goes_back() -> None:
    """The choice is reset after the first call; whether the model calls again, or writes until it
    is cut, is its own. A result that the server refused would be another kind of error."""
    async for model in each_model():
        asked = agent(model, "required", tools=[get_weather])
        try:
            found = await Runner.run(asked, PROMPT, max_turns=4)
        except (MaxTurnsExceeded, ModelBehaviorError) as error:
            items = error.run_data.new_items
        else:
            items = found.new_items
        assert {"tool_call_item", "tool_call_output_item"} <= {item.type for item in items}


async def check_a_handoff_is_a_tool() -> None:
    async for model in each_model():
        other = agent(model)
        asked = agent(model, "transfer_to_b", handoffs=[other.clone(name="b")])
        found = await Runner.run(asked, "Name a river.", max_turns=3)
        assert found.last_agent.name == "b"


async def check_previous_response_id() -> None:
    async for model in each_model():
        if not isinstance(model, OpenAIResponsesModel):
            continue
        first = await Runner.run(agent(model), "My name is Ada.")
        second = await Runner.run(
            agent(model), "What is my name?", previous_response_id=first.last_response_id
        )
        assert second.final_output
        alone = await Runner.run(agent(model), "What is my name?")
        counts = [found.context_wrapper.usage.input_tokens for found in (second, alone)]
        assert counts[0] > counts[1]


if __name__ == "__main__":
    run()
