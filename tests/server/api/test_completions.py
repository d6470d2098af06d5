"""/v1/completions through the official SDK, against a real server and the library."""

from __future__ import annotations

from typing import Any

import httpx
import openai
import pytest
from openai.types import Completion

from headrace import LLM, SamplingParams

MODEL = "smollm2"
PROMPTS = ["The capital of France is", "Once upon a time", "def fib(n):"]


def complete(client: openai.OpenAI, prompt: Any, **more: Any) -> Completion:
    sent = {"model": MODEL, "temperature": 0, "max_tokens": 8, **more}
    answer: Completion = client.completions.create(prompt=prompt, **sent)
    return answer


def stream(client: openai.OpenAI, prompt: Any, **more: Any) -> list[Completion]:
    sent = {"model": MODEL, "temperature": 0, "max_tokens": 8, **more}
    return list(client.completions.create(prompt=prompt, stream=True, **sent))


def expected(llm: LLM, prompt: Any, **more: Any) -> list[str]:
    params = SamplingParams(**{"temperature": 0, "max_tokens": 8, **more})
    return [o.text for output in llm.generate(prompt, params) for o in output.outputs]


def test_every_kind_of_prompt(client: openai.OpenAI, llm: LLM) -> None:
    ids = [llm.tokenizer.encode(prompt) for prompt in PROMPTS]
    texts = expected(llm, PROMPTS)
    for prompt, wanted in (
        (PROMPTS[0], texts[:1]),
        (PROMPTS, texts),
        (ids[0], texts[:1]),
        (ids, texts),
        ([PROMPTS[0], ids[1]], texts[:2]),
    ):
        answer = complete(client, prompt)
        assert [choice.text for choice in answer.choices] == wanted
        assert [choice.index for choice in answer.choices] == list(range(len(wanted)))
        assert {choice.finish_reason for choice in answer.choices} == {"length"}
        assert answer.usage is not None
        assert answer.usage.prompt_tokens == sum(map(len, ids[: len(wanted)]))
        assert answer.usage.completion_tokens == 8 * len(wanted)
        streamed = stream(client, prompt)
        for index, text in enumerate(wanted):
            choices = [c for chunk in streamed for c in chunk.choices if c.index == index]
            assert "".join(choice.text for choice in choices) == text
            assert [c.finish_reason for c in choices if c.finish_reason] == ["length"]


def test_defaults_are_openais(client: openai.OpenAI) -> None:
    answer = client.completions.create(model=MODEL, prompt=PROMPTS[1])
    assert answer.object == "text_completion"
    assert answer.id.startswith("cmpl-")
    assert answer.usage is not None
    assert answer.usage.completion_tokens <= 16
    assert len(answer.choices) == 1


def test_choices_are_numbered_prompt_by_prompt(client: openai.OpenAI, llm: LLM) -> None:
    params = {"n": 3, "temperature": 1.0, "seed": 5, "top_p": 1.0}
    wanted = expected(llm, PROMPTS[:2], **params)
    assert len(set(wanted)) > 2
    answer = complete(client, PROMPTS[:2], **params)
    assert [choice.index for choice in answer.choices] == list(range(6))
    assert [choice.text for choice in answer.choices] == wanted
    chunks = stream(client, PROMPTS[:2], **params, stream_options={"include_usage": True})
    for index, text in enumerate(wanted):
        found = [c.text for chunk in chunks for c in chunk.choices if c.index == index]
        assert "".join(found) == text
    assert chunks[-1].usage is not None
    assert chunks[-1].usage.completion_tokens == 48
    assert answer.usage is not None
    assert chunks[-1].usage.prompt_tokens == answer.usage.prompt_tokens


def test_streams_of_several_prompts_interleave(client: openai.OpenAI) -> None:
    order = [c.index for ch in stream(client, PROMPTS, max_tokens=24) for c in ch.choices]
    assert order != sorted(order)


@pytest.mark.parametrize("streamed", [False, True])
def test_logprobs_in_the_old_shape_with_echo(
    client: openai.OpenAI, llm: LLM, streamed: bool
) -> None:
    prompt = "Café 🦀 costs"
    ids = llm.tokenizer.encode(prompt)
    params = SamplingParams(temperature=0, max_tokens=8, logprobs=2, prompt_logprobs=2)
    (output,) = llm.generate(prompt, params)
    if streamed:
        choices = [
            c for chunk in stream(client, prompt, logprobs=2, echo=True) for c in chunk.choices
        ]
        text = "".join(choice.text for choice in choices)
        lists: dict[str, list[Any]] = {}
        for choice in choices:
            assert choice.logprobs is not None
            for name, values in choice.logprobs.model_dump().items():
                lists.setdefault(name, []).extend(values)
    else:
        (choice,) = complete(client, prompt, logprobs=2, echo=True).choices
        text = choice.text
        assert choice.logprobs is not None
        lists = choice.logprobs.model_dump()
    completion = output.outputs[0]
    assert text == prompt + completion.text
    all_ids = [*ids, *completion.token_ids]
    assert output.prompt_logprobs is not None
    assert completion.logprobs is not None
    scores = [*output.prompt_logprobs, *completion.logprobs]
    assert {len(values) for values in lists.values()} == {len(all_ids)}
    assert lists["token_logprobs"][0] is lists["top_logprobs"][0] is None
    for token_id, found, top, here in list(
        zip(all_ids, lists["token_logprobs"], lists["top_logprobs"], scores, strict=True)
    )[1:]:
        assert here is not None
        assert found == pytest.approx(here[token_id].logprob, abs=1e-6)
        assert len(top) in (2, 3)
        assert found in top.values()
        assert token_id in here
    # Where tokens are whole characters, the text at a token's offset is the token.
    for place, token in zip(lists["text_offset"], lists["tokens"], strict=True):
        assert token.startswith("bytes:\\x") or text[place:].startswith(token)
    assert any(token.startswith("bytes:\\x") for token in lists["tokens"])


def test_a_prompt_is_scored_without_an_answer(client: openai.OpenAI, llm: LLM) -> None:
    answer = complete(client, PROMPTS[0], max_tokens=0, echo=True, logprobs=1)
    (choice,) = answer.choices
    assert choice.text == PROMPTS[0]
    assert choice.logprobs is not None
    assert choice.logprobs.tokens == [
        llm.tokenizer.decode([token], continuation=True)
        for token in llm.tokenizer.encode(PROMPTS[0])
    ]
    assert answer.usage is not None
    assert answer.usage.completion_tokens == 0
    (only,) = complete(client, "A", max_tokens=0, echo=True, logprobs=1).choices
    assert only.logprobs is not None
    assert list[object](only.logprobs.token_logprobs or []) == [None]


def test_best_of_gives_the_likeliest(client: openai.OpenAI, llm: LLM) -> None:
    params = SamplingParams(temperature=1.5, seed=3, max_tokens=8, n=2, best_of=6)
    wanted = [o.text for o in llm.generate(PROMPTS[1], params)[0].outputs]
    answer = complete(client, PROMPTS[1], temperature=1.5, seed=3, n=2, best_of=6)
    assert [choice.text for choice in answer.choices] == wanted
    assert answer.usage is not None
    assert answer.usage.completion_tokens == 48  # the losers were made too


@pytest.mark.parametrize(
    ("change", "param"),
    [
        ({"prompt": []}, "prompt"),
        ({"prompt": ""}, "prompt"),
        ({"prompt": [[]]}, "prompt"),
        ({"prompt": [1, "a"]}, "prompt"),
        ({"prompt": [10**9]}, "prompt"),
        ({"prompt": [-1]}, "prompt"),
        ({"prompt": ["a"] * 129}, "prompt"),
        ({"suffix": "end"}, "suffix"),
        ({"best_of": 4, "stream": True}, "best_of"),
        ({"best_of": 1, "n": 2}, "best_of"),
        ({"best_of": 17}, "best_of"),
        ({"max_tokens": 0}, "max_tokens"),
        ({"logprobs": 21}, "logprobs"),
        ({"logprobs": -1}, "logprobs"),
    ],
)
def test_what_cannot_be_asked_is_named(
    client: openai.OpenAI, change: dict[str, Any], param: str
) -> None:
    sent: dict[str, Any] = {"prompt": "Hi", "max_tokens": 2, "model": MODEL, **change}
    with pytest.raises(openai.BadRequestError) as caught:
        client.completions.create(**sent)
    assert caught.value.param == param
    assert complete(client, "Hi").choices


@pytest.mark.parametrize("streamed", [False, True])
def test_one_prompt_that_cannot_run_ends_them_all(client: openai.OpenAI, streamed: bool) -> None:
    with pytest.raises(openai.BadRequestError) as caught:
        complete(client, [[1, 2, 3], [7] * 8200], stream=streamed, max_tokens=4)
    assert caught.value.code == "context_length_exceeded"
    assert complete(client, "Hi").choices


def test_models_are_listed_and_found(client: openai.OpenAI, llm: LLM) -> None:
    (card,) = client.models.list().data
    assert card.id == MODEL
    assert card.model_extra is not None
    assert card.model_extra["max_model_len"] == llm.context_tokens
    assert client.models.retrieve(MODEL) == card
    for name in ("gpt-4o", "meta/llama"):
        with pytest.raises(openai.NotFoundError) as caught:
            client.models.retrieve(name)
        assert caught.value.code == "model_not_found"


def test_tokenize_and_detokenize_are_vllms(server: Any, llm: LLM) -> None:
    with httpx.Client(base_url=server.base_url) as http:

        def post(path: str, **sent: Any) -> Any:
            reply = http.post(path, json=sent)
            assert reply.status_code == 200, reply.text
            return reply.json()

        for text in ("Hello, world", "a <|im_start|> b", "🦀é", "word " * 3000, ""):
            found = post("/tokenize", prompt=text, return_token_strs=True)
            assert found["tokens"] == llm.tokenizer.encode(text)
            assert found["count"] == len(found["tokens"]) == len(found["token_strs"])
            assert found["max_model_len"] == llm.context_tokens
            assert post("/detokenize", tokens=found["tokens"]) == {"prompt": text}
        messages = [{"role": "user", "content": "Hi"}]
        assert llm.chat_template is not None
        found = post("/tokenize", model=MODEL, messages=messages)
        assert found["tokens"] == llm.chat_template.encode(messages)
        assert found["token_strs"] is None
        bare = post("/tokenize", messages=messages, add_generation_prompt=False)["tokens"]
        assert bare == llm.chat_template.encode(messages, add_generation_prompt=False)
        for path, sent in (
            ("/tokenize", {}),
            ("/tokenize", {"prompt": "a", "messages": messages}),
            ("/detokenize", {"tokens": [-1]}),
            ("/detokenize", {"tokens": [10**9]}),
            ("/detokenize", {"tokens": [10**30]}),
        ):
            assert http.post(path, json=sent).status_code == 400
        assert http.post("/tokenize", json={"prompt": "a", "model": "x"}).status_code == 404


def test_more_prompts_than_may_wait_would_never_be_taken(strict: Any) -> None:
    body = {"prompt": ["a", "b", "c"], "max_tokens": 1}
    reply = httpx.post(f"{strict.base_url}/v1/completions", json=body, timeout=60)
    assert reply.status_code == 400
    assert "--max-waiting-requests" in reply.json()["error"]["message"]
