"""/v1/chat/completions through the official SDK, against a real server and the library."""

from __future__ import annotations

import asyncio
import contextlib
import functools
from typing import Any

import openai
import pytest
from openai.types.chat import ChatCompletion, ChatCompletionChunk

from headrace import LLM, SamplingParams
from headrace.core.request import RequestOutput

MODEL = "smollm2"
QUESTIONS = ["Name three primary colors.", "What is 2+2?", "Write a haiku about rivers."]


def ask(text: str) -> list[Any]:
    return [{"role": "user", "content": text}]


def greedy(client: openai.OpenAI, text: str, **more: Any) -> ChatCompletion:
    answer: ChatCompletion = client.chat.completions.create(
        model=MODEL, messages=ask(text), **{"temperature": 0, "max_tokens": 24, **more}
    )
    return answer


def stream(client: openai.OpenAI, text: str, **more: Any) -> list[ChatCompletionChunk]:
    made = client.chat.completions.create(
        model=MODEL, messages=ask(text), stream=True, **{"max_tokens": 24, **more}
    )
    return list(made)


def joined(chunks: list[ChatCompletionChunk], index: int = 0) -> str:
    found = [c for chunk in chunks for c in chunk.choices if c.index == index]
    return "".join(choice.delta.content or "" for choice in found)


@functools.cache
def expected(llm: LLM, text: str, **params: Any) -> RequestOutput:
    (output,) = llm.chat(
        ask(text), SamplingParams(**{"temperature": 0, "max_tokens": 24, **params})
    )
    return output


def test_an_answer_is_the_librarys_in_openais_shape(client: openai.OpenAI, llm: LLM) -> None:
    output = expected(llm, QUESTIONS[0])
    answer = greedy(client, QUESTIONS[0])
    (choice,) = answer.choices
    assert (choice.index, choice.message.role) == (0, "assistant")
    assert choice.message.content == output.outputs[0].text
    assert choice.finish_reason == output.outputs[0].finish_reason
    assert choice.logprobs is None
    assert (answer.object, answer.model) == ("chat.completion", MODEL)
    assert answer.id.startswith("chatcmpl-")
    assert answer.system_fingerprint
    assert {c.system_fingerprint for c in stream(client, "Hi")} == {answer.system_fingerprint}
    assert answer.usage is not None
    assert answer.usage.prompt_tokens == len(output.prompt_token_ids)
    assert answer.usage.completion_tokens == len(output.outputs[0].token_ids)
    assert answer.usage.total_tokens == answer.usage.prompt_tokens + answer.usage.completion_tokens


def test_a_stream_joined_is_the_whole_answer(client: openai.OpenAI, llm: LLM) -> None:
    for question in QUESTIONS:
        chunks = stream(client, question, temperature=0)
        assert joined(chunks) == expected(llm, question).outputs[0].text
        assert chunks[0].choices[0].delta.role == "assistant"
        ends = [c.choices[0].finish_reason for c in chunks if c.choices[0].finish_reason]
        assert ends == [expected(llm, question).outputs[0].finish_reason]
        assert len({chunk.id for chunk in chunks}) == 1
        assert all(chunk.usage is None for chunk in chunks)
        assert sum(bool(c.choices[0].delta.content) for c in chunks) > 3  # as they come


def test_many_at_once_answer_as_alone(server: Any, llm: LLM) -> None:
    async def whole(client: openai.AsyncOpenAI, text: str) -> str | None:
        answer = await client.chat.completions.create(
            model=MODEL, messages=ask(text), temperature=0, max_tokens=24
        )
        return answer.choices[0].message.content

    async def streamed(client: openai.AsyncOpenAI, text: str) -> str:
        chunks = await client.chat.completions.create(
            model=MODEL, messages=ask(text), temperature=0, max_tokens=24, stream=True
        )
        return joined([chunk async for chunk in chunks])

    async def all_of_them() -> list[str | None]:
        made = openai.AsyncOpenAI(base_url=f"{server.base_url}/v1", api_key="none", max_retries=0)
        async with made as client:
            kinds = [whole, streamed] * 2
            return await asyncio.gather(*[f(client, text) for text in QUESTIONS for f in kinds])

    found = asyncio.run(all_of_them())
    assert found == [expected(llm, text).outputs[0].text for text in QUESTIONS for _ in range(4)]


def test_usage_comes_last_or_with_every_chunk(client: openai.OpenAI) -> None:
    last = stream(client, QUESTIONS[0], stream_options={"include_usage": True})
    assert last[-1].choices == []
    assert last[-1].usage is not None
    assert last[-1].usage.completion_tokens > 3
    assert all(chunk.usage is None for chunk in last[:-1])
    options: Any = {"include_usage": True, "continuous_usage_stats": True}
    every = stream(client, QUESTIONS[0], stream_options=options)
    counts = [chunk.usage.completion_tokens for chunk in every if chunk.usage is not None]
    assert len(counts) == len(every)
    assert counts == sorted(counts)
    assert counts[0] <= 1 < counts[-1]


def test_usage_says_what_the_prefix_cache_had(client: openai.OpenAI) -> None:
    question = "Count to twenty. " * 30

    def cached(salt: str, *, streamed: bool = False) -> int:
        more: dict[str, Any] = {"extra_body": {"cache_salt": salt}, "max_tokens": 1}
        if streamed:
            last = stream(client, question, stream_options={"include_usage": True}, **more)[-1]
            usage = last.usage
        else:
            usage = greedy(client, question, **more).usage
        assert usage is not None
        assert usage.prompt_tokens_details is not None
        assert usage.prompt_tokens_details.cached_tokens is not None
        assert usage.prompt_tokens_details.cached_tokens < usage.prompt_tokens
        return usage.prompt_tokens_details.cached_tokens

    assert cached("one") == 0
    assert cached("one") > 60
    assert cached("one", streamed=True) == cached("one")
    assert cached("another") == 0


@pytest.mark.parametrize("streamed", [False, True])
def test_several_choices_are_several_draws(client: openai.OpenAI, streamed: bool) -> None:
    more: dict[str, Any] = {"n": 4, "temperature": 1.2, "seed": -7, "top_p": 1.0}
    if streamed:
        chunks = stream(client, QUESTIONS[2], **more)
        texts = [joined(chunks, index) for index in range(4)]
        ended = {c.index for ch in chunks for c in ch.choices if c.finish_reason is not None}
        assert ended == {0, 1, 2, 3}
    else:
        answer = client.chat.completions.create(
            model=MODEL, messages=ask(QUESTIONS[2]), max_tokens=24, **more
        )
        assert [choice.index for choice in answer.choices] == [0, 1, 2, 3]
        texts = [choice.message.content or "" for choice in answer.choices]
    assert len(set(texts)) > 1
    again = stream(client, QUESTIONS[2], **more)
    assert [joined(again, index) for index in range(4)] == texts  # the seed decides them all


def test_a_negative_seed_is_one_like_any_other(client: openai.OpenAI) -> None:
    def text(seed: int) -> str | None:
        answer = client.chat.completions.create(
            model=MODEL, messages=ask(QUESTIONS[2]), temperature=1.0, seed=seed, max_tokens=6
        )
        return answer.choices[0].message.content

    assert text(-1) == text(-1)
    assert len({text(seed) for seed in (-1, -(2**63), 1, 2)}) > 1


@pytest.mark.parametrize("streamed", [False, True])
def test_logprobs_are_the_librarys_and_bytes_are_the_tokens(
    client: openai.OpenAI, llm: LLM, streamed: bool
) -> None:
    question = "Repeat exactly: 🙂🦀漢"  # characters of several tokens each
    output = expected(llm, question, logprobs=3).outputs[0]
    more: dict[str, Any] = {"logprobs": True, "top_logprobs": 3, "temperature": 0}
    if streamed:
        choices = [c for chunk in stream(client, question, **more) for c in chunk.choices]
        found = [t for c in choices if c.logprobs for t in c.logprobs.content or []]
    else:
        logprobs = greedy(client, question, **more).choices[0].logprobs
        assert logprobs is not None
        found = logprobs.content or []
    assert output.logprobs is not None
    assert len(found) == len(output.token_ids)
    pieces = []
    for token, token_id, here in zip(found, output.token_ids, output.logprobs, strict=True):
        assert token.logprob == pytest.approx(here[token_id].logprob, abs=1e-6)
        assert len(token.top_logprobs) == 3
        values = [top.logprob for top in token.top_logprobs]
        assert values == sorted(values, reverse=True)
        assert token.bytes == list(llm.tokenizer.token_bytes(token_id))
        if token_id not in llm.tokenizer.special_ids:
            pieces.append(bytes(token.bytes or []))
    assert b"".join(pieces).decode("utf-8", "replace") == output.text
    # Otherwise this question does not show what it is for.
    assert any(token.token.startswith("\\x") for token in found)


def test_stop_strings_cut_the_text_and_end_it(client: openai.OpenAI) -> None:
    whole = greedy(client, QUESTIONS[0]).choices[0].message.content or ""
    stop = whole[10:14]
    for given in (stop, ["never said", stop]):
        answer = greedy(client, QUESTIONS[0], stop=given)
        assert answer.choices[0].message.content == whole[: whole.index(stop)]
        assert answer.choices[0].finish_reason == "stop"
        assert (
            joined(stream(client, QUESTIONS[0], temperature=0, stop=given))
            == (whole[: whole.index(stop)])
        )


def test_logit_bias_forbids_and_forces(client: openai.OpenAI, llm: LLM) -> None:
    first = expected(llm, QUESTIONS[0]).outputs[0].token_ids[0]
    biased = greedy(client, QUESTIONS[0], logit_bias={str(first): -100}, logprobs=True)
    logprobs = biased.choices[0].logprobs
    assert logprobs is not None
    assert logprobs.content is not None
    assert logprobs.content[0].bytes != list(llm.tokenizer.token_bytes(first))
    (only,) = llm.tokenizer.encode("a", add_bos=False)
    forced = greedy(client, QUESTIONS[0], logit_bias={str(only): 100}, max_tokens=5)
    assert forced.choices[0].message.content == "aaaaa"


def test_extra_body_is_vllms(client: openai.OpenAI, llm: LLM) -> None:
    answer = greedy(client, "Say hi.", extra_body={"ignore_eos": True}, max_tokens=40)
    assert answer.usage is not None
    assert answer.usage.completion_tokens == 40
    assert answer.choices[0].finish_reason == "length"
    likeliest = client.chat.completions.create(
        model=MODEL,
        messages=ask(QUESTIONS[1]),
        temperature=1.0,
        max_tokens=24,
        extra_body={"top_k": 1, "cache_salt": "a", "priority": 3, "repetition_penalty": 1.0},
    )
    assert likeliest.choices[0].message.content == expected(llm, QUESTIONS[1]).outputs[0].text
    repeated = expected(llm, QUESTIONS[0], repetition_penalty=1.5, presence_penalty=0.5)
    punished = greedy(
        client, QUESTIONS[0], presence_penalty=0.5, extra_body={"repetition_penalty": 1.5}
    )
    assert punished.choices[0].message.content == repeated.outputs[0].text


def test_messages_may_be_parts_developers_and_silent_assistants(
    client: openai.OpenAI, llm: LLM
) -> None:
    plain = [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": "Hi"},
        {"role": "assistant", "content": ""},
        {"role": "user", "content": "Name a color."},
    ]
    (output,) = llm.chat(plain, SamplingParams(temperature=0, max_tokens=12))
    messages: list[Any] = [
        {"role": "developer", "content": "Be brief."},
        {"role": "user", "content": [{"type": "text", "text": "Hi"}], "name": "ann"},
        {"role": "assistant", "content": None},
        {"role": "user", "content": "Name a color."},
    ]
    answer = client.chat.completions.create(
        model=MODEL, messages=messages, temperature=0, max_tokens=12
    )
    assert answer.usage is not None
    assert answer.usage.prompt_tokens == len(output.prompt_token_ids)
    assert answer.choices[0].message.content == output.outputs[0].text


def test_an_answer_that_was_begun_is_continued(client: openai.OpenAI, llm: LLM) -> None:
    begun = [*ask("Name three primary colors."), {"role": "assistant", "content": "Sure: red,"}]
    extra = {"continue_final_message": True, "add_generation_prompt": False}
    answer = client.chat.completions.create(
        model=MODEL, messages=begun, temperature=0, max_tokens=12, extra_body=extra
    )
    template = llm.chat_template
    assert template is not None
    prompt = template.render(ask("Name three primary colors.")) + "Sure: red,"
    ids = llm.tokenizer.encode_template(prompt)
    (output,) = llm.generate([ids], SamplingParams(temperature=0, max_tokens=12))
    assert answer.choices[0].message.content == output.outputs[0].text
    assert answer.usage is not None
    assert answer.usage.prompt_tokens == len(ids)


@pytest.mark.parametrize(
    ("change", "param"),
    [
        ({"max_tokens": 0}, "max_tokens"),
        ({"max_tokens": -3}, "max_tokens"),
        ({"max_tokens": 10**30}, "max_tokens"),
        ({"max_completion_tokens": 0, "max_tokens": None}, "max_completion_tokens"),
        ({"max_completion_tokens": 5, "max_tokens": 6}, "max_completion_tokens"),
        ({"top_logprobs": 2}, "top_logprobs"),
        ({"logprobs": True, "top_logprobs": 21}, "top_logprobs"),
        ({"logprobs": True, "top_logprobs": -1}, "top_logprobs"),
        ({"n": 0}, "n"),
        ({"n": 17}, "n"),
        ({"stop": ["x"] * 17}, "stop"),
        ({"stop": ""}, "stop"),
        ({"logit_bias": {"x": 1}}, "logit_bias"),
        ({"logit_bias": {"1": 101}}, "logit_bias"),
        ({"logit_bias": {"999999": 1}}, "logit_bias"),
        ({"temperature": -1}, "temperature"),
        ({"top_p": 0}, "top_p"),
        ({"presence_penalty": 3}, "presence_penalty"),
        ({"stream_options": {"include_usage": True}}, "stream_options"),
        ({"extra_body": {"top_k": 10**30}}, "top_k"),
        ({"extra_body": {"timeout_s": 0}}, "timeout_s"),
        ({"extra_body": {"chat_template_kwargs": {"messages": []}}}, "chat_template_kwargs"),
        (
            {"extra_body": {"continue_final_message": True, "add_generation_prompt": True}},
            "continue_final_message",
        ),
        ({"messages": []}, "messages"),
        ({"messages": [{"role": "user", "content": None}]}, "messages[0].content"),
        (
            {
                "messages": [
                    {
                        "role": "user",
                        "content": [{"type": "image_url", "image_url": {"url": "http://x/y.png"}}],
                    }
                ]
            },
            "messages[0].content[0].type",
        ),
    ],
)
def test_what_cannot_be_asked_is_named(
    client: openai.OpenAI, change: dict[str, Any], param: str
) -> None:
    sent: dict[str, Any] = {"messages": ask("Hi"), "max_tokens": 4, "model": MODEL, **change}
    with pytest.raises(openai.BadRequestError) as caught:
        client.chat.completions.create(**{k: v for k, v in sent.items() if v is not None})
    assert caught.value.param == param
    assert caught.value.type == "invalid_request_error"
    assert greedy(client, "Hi", max_tokens=1).choices  # the next one works


def test_another_model_is_not_found(client: openai.OpenAI) -> None:
    with pytest.raises(openai.NotFoundError, match="smollm2") as caught:
        client.chat.completions.create(model="gpt-4o", messages=ask("Hi"))
    assert caught.value.code == "model_not_found"


def test_a_prompt_beyond_the_context_says_both_numbers(client: openai.OpenAI) -> None:
    with pytest.raises(openai.BadRequestError, match=r"8192") as caught:
        greedy(client, "one two three " * 4000)
    assert caught.value.code == "context_length_exceeded"


def test_time_that_passes_in_the_queue_is_503_and_later_cuts_the_answer(
    client: openai.OpenAI,
) -> None:
    with pytest.raises(openai.InternalServerError) as caught:
        greedy(client, "Hi", extra_body={"timeout_s": 1e-6})
    assert caught.value.status_code == 503
    assert "retry-after" in caught.value.response.headers
    with pytest.raises(openai.InternalServerError):
        stream(client, "Hi", extra_body={"timeout_s": 1e-6})
    for timeout_s in (0.5, 2.0, 8.0, 32.0):  # the first that lets a token come, however slow
        limit: dict[str, Any] = {"timeout_s": timeout_s, "ignore_eos": True}
        with contextlib.suppress(openai.InternalServerError):
            (choice,) = greedy(client, QUESTIONS[2], max_tokens=7000, extra_body=limit).choices
            last = stream(client, QUESTIONS[2], max_tokens=7000, extra_body=limit)[-1].choices[0]
            break
    assert choice.message.content
    for end in (choice, last):
        assert end.finish_reason == "length"
        assert end.model_extra is not None
        assert end.model_extra["stop_reason"] == "timeout"
