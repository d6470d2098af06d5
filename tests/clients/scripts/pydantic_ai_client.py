"""pydantic-ai: output types in all of its modes, tools, streams, on both of OpenAI's APIs."""

from __future__ import annotations

from pydantic import BaseModel
from pydantic_ai import (
    Agent,
    ModelHTTPError,
    ModelSettings,
    NativeOutput,
    PromptedOutput,
    ToolOutput,
    UnexpectedModelBehavior,
    UsageLimitExceeded,
    UsageLimits,
)
from pydantic_ai.models.openai import OpenAIChatModel, OpenAIResponsesModel
from pydantic_ai.providers.openai import OpenAIProvider

from checks import KEYED_URL, MODEL, URL, raises, run

provider = OpenAIProvider(base_url=f"{URL}/v1", api_key="none")
chat = OpenAIChatModel(MODEL, provider=provider)
responses = OpenAIResponsesModel(MODEL, provider=provider)
SETTINGS = ModelSettings(temperature=0, max_tokens=400)
TEXT = "Ada is 36 years old."


class Person(BaseModel):
    name: str
    age: int


def agent(model: object = chat, **more: object) -> Agent:
    return Agent(model, model_settings=SETTINGS, retries=1, **more)


def check_plain() -> None:
    for model in (chat, responses):
        found = agent(model).run_sync("Name a river.")
        assert found.output
        assert found.usage.output_tokens > 0


async def check_stream() -> None:
    for model in (chat, responses):
        async with agent(model).run_stream("Name a river.") as stream:
            pieces = [piece async for piece in stream.stream_text(delta=True)]
        assert "".join(pieces)


def check_output_by_a_tool() -> None:
    """Its default: one tool, required, and the run ends with its first call."""
    for model in (chat, responses):
        found = agent(model, output_type=Person).run_sync(TEXT)
        assert isinstance(found.output, Person)
        assert found.usage.requests == 1


def check_one_of_several_output_tools() -> None:
    found = agent(output_type=[ToolOutput(Person, name="person"), ToolOutput(int, name="number")])
    assert isinstance(found.run_sync(TEXT).output, Person | int)


def check_native_output() -> None:
    for model in (chat, responses):
        found = agent(model, output_type=NativeOutput(Person)).run_sync(TEXT)
        assert isinstance(found.output, Person)


def check_prompted_output_ends() -> None:
    """Asks in words and for a json_object: a small model may miss the schema, but it must end."""
    try:
        found = agent(output_type=PromptedOutput(Person)).run_sync(TEXT)
    except UnexpectedModelBehavior:
        return
    assert isinstance(found.output, Person)


async def check_structured_stream() -> None:
    async with agent(output_type=Person).run_stream(TEXT) as stream:
        pieces = [piece async for piece in stream.stream_output()]
    assert isinstance(pieces[-1], Person)


def check_a_tool_of_the_user_ends() -> None:
    asking = agent()
    called = []

    @asking.tool_plain
    def get_weather(city: str) -> str:
        """The weather in a city."""
        called.append(city)
        return f"Rain in {city}."

    try:
        found = asking.run_sync(
            "What is the weather in Paris?", usage_limits=UsageLimits(request_limit=4)
        )
    except (UsageLimitExceeded, UnexpectedModelBehavior):
        assert called  # it goes on calling, as small models do: protocol, not wit
    else:
        assert isinstance(found.output, str)


def check_a_bad_key() -> None:
    keyed = OpenAIChatModel(
        MODEL, provider=OpenAIProvider(base_url=f"{KEYED_URL}/v1", api_key="wrong")
    )
    error = raises(ModelHTTPError, lambda: agent(keyed).run_sync("Name a river."))
    assert error.status_code == 401


if __name__ == "__main__":
    run()
