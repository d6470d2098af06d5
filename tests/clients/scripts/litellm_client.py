"""LiteLLM: as its hosted_vllm and openai providers ask, and what its errors become."""

from __future__ import annotations

import json

import litellm
from pydantic import BaseModel

from checks import CONTEXT, KEYED_URL, MODEL, TOO_LONG, URL, WEATHER_SCHEMA, raises, run

litellm.num_retries = 0
ASK = [{"role": "user", "content": "What is the weather in Paris?"}]
PROVIDERS = ("hosted_vllm", "openai")
WEATHER = {"type": "function", "function": {"name": "get_weather", "parameters": WEATHER_SCHEMA}}


def asked(provider: str = "hosted_vllm", **more: object) -> dict:
    return {
        "model": f"{provider}/{MODEL}",
        "api_base": f"{URL}/v1",
        "api_key": "none",
        "messages": ASK,
        "temperature": 0,
        "max_tokens": 24,
        **more,
    }


class River(BaseModel):
    name: str
    length_km: int


def check_plain() -> None:
    for provider in PROVIDERS:
        answer = litellm.completion(**asked(provider))
        assert answer.choices[0].message.content
        assert answer.choices[0].finish_reason in ("stop", "length")
        assert answer.usage.completion_tokens > 0


def check_stream() -> None:
    whole = litellm.completion(**asked())
    chunks = list(litellm.completion(**asked(stream=True, stream_options={"include_usage": True})))
    text = "".join(chunk.choices[0].delta.content or "" for chunk in chunks)
    assert text == whole.choices[0].message.content
    rebuilt = litellm.stream_chunk_builder(chunks, messages=ASK)
    assert rebuilt.usage.completion_tokens == whole.usage.completion_tokens
    assert rebuilt.usage.prompt_tokens == whole.usage.prompt_tokens


async def check_async() -> None:
    answer = await litellm.acompletion(**asked())
    assert answer.choices[0].message.content
    stream = await litellm.acompletion(**asked(stream=True))
    text = "".join([chunk.choices[0].delta.content or "" async for chunk in stream])
    assert text == answer.choices[0].message.content


def check_a_named_tool_is_called_once() -> None:
    for provider in PROVIDERS:
        named = {"type": "function", "function": {"name": "get_weather"}}
        answer = litellm.completion(
            **asked(provider, tools=[WEATHER], tool_choice=named, max_tokens=400)
        )
        calls = answer.choices[0].message.tool_calls
        assert [call.function.name for call in calls] == ["get_weather"]
        assert set(json.loads(calls[0].function.arguments)) == {"city", "unit"}


def check_tools_auto_and_required_end() -> None:
    auto = litellm.completion(**asked(tools=[WEATHER], tool_choice="auto", max_tokens=200))
    assert auto.choices[0].finish_reason in ("stop", "tool_calls", "length")
    required = litellm.completion(**asked(tools=[WEATHER], tool_choice="required", max_tokens=1000))
    assert required.choices[0].finish_reason == "tool_calls"


def check_structured_output() -> None:
    for provider in PROVIDERS:
        answer = litellm.completion(**asked(provider, response_format=River, max_tokens=200))
        River.model_validate_json(answer.choices[0].message.content)


def check_text_completion_and_embeddings() -> None:
    answer = litellm.text_completion(
        model=f"hosted_vllm/{MODEL}",
        api_base=f"{URL}/v1",
        api_key="none",
        prompt="The capital of France is",
        temperature=0,
        max_tokens=8,
    )
    assert answer.choices[0].text.strip().startswith("Paris")
    vectors = litellm.embedding(
        model=f"hosted_vllm/{MODEL}", api_base=f"{URL}/v1", api_key="none", input=["a", "b"]
    )
    assert len(vectors.data) == 2


def check_responses() -> None:
    answer = litellm.responses(
        model=f"openai/{MODEL}",
        api_base=f"{URL}/v1",
        api_key="none",
        input="Name a river.",
        temperature=0,
        max_output_tokens=24,
    )
    assert answer.output[0].content[0].text


def check_anthropic_messages() -> None:
    answer = litellm.completion(
        **{**asked("anthropic"), "api_base": URL},
    )
    assert answer.choices[0].message.content
    assert answer.usage.prompt_tokens > 0


def check_too_long_a_prompt_is_its_own_kind_of_error() -> None:
    """Fallbacks to models with longer contexts hang on this kind."""
    long = [{"role": "user", "content": TOO_LONG}]
    for provider in PROVIDERS:
        error = raises(
            litellm.ContextWindowExceededError,
            lambda provider=provider: litellm.completion(**asked(provider, messages=long)),
        )
        assert str(CONTEXT) in str(error)


def check_a_bad_key() -> None:
    for provider in PROVIDERS:
        raises(
            litellm.AuthenticationError,
            lambda provider=provider: litellm.completion(
                **asked(provider, api_base=f"{KEYED_URL}/v1", api_key="wrong")
            ),
        )


def check_a_timeout_of_the_client() -> None:
    raises(
        litellm.Timeout,
        lambda: litellm.completion(
            **asked(max_tokens=4000, timeout=0.05, extra_body={"ignore_eos": True})
        ),
    )


if __name__ == "__main__":
    run()
