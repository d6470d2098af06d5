"""Requests beyond their bounds, against a real server: refused by name, counted, in few words."""

from __future__ import annotations

import asyncio
import json
import re
from types import SimpleNamespace
from typing import Any, cast

import httpx
import pytest
from tests.server.conftest import RunningServer

from headrace.core.errors import QueueTimeoutError
from headrace.core.request import GenerateRequest
from headrace.core.server_config import ServerConfig
from headrace.server.access.keys import Keys
from headrace.server.api import embeddings
from headrace.server.request.call import Call
from headrace.server.request.service import Service

CHAT, COMPLETIONS = "/v1/chat/completions", "/v1/completions"
EMBEDDINGS, RESPONSES = "/v1/embeddings", "/v1/responses"
MESSAGES = [{"role": "user", "content": "Hi"}]
TOOL = {"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}
PAIRS, LONG_PAIR = dict.fromkeys(map(str, range(65)), "a"), {"a": "b" * 32_768}
PART = {"type": "text", "text": "a"}


def chat(**fields: Any) -> tuple[str, dict[str, Any]]:
    return CHAT, {"messages": MESSAGES, "max_tokens": 2, **fields}


def post(server: RunningServer, path: str, fields: dict[str, Any]) -> httpx.Response:
    return httpx.post(f"{server.base_url}{path}", json=fields, timeout=120)


def refused(server: RunningServer, bound: str) -> float:
    text = httpx.get(f"{server.base_url}/metrics").text
    name = rf'headrace:refused_bounds_total{{[^}}]*bound="{bound}"[^}}]*}}'
    found = re.search(rf"^{name} (\S+)$", text, re.M)
    assert found is not None, bound
    return float(found[1])


@pytest.mark.parametrize(
    ("sent", "param", "bound"),
    [
        # The attacks of the issue.
        (chat(stop=["ab" * 250_000] * 16, n=16), "stop", "stop_characters"),
        (chat(stop_token_ids=[5] * 4_100_000), "stop_token_ids", "body_numbers"),
        (chat(allowed_token_ids=[5] * 4_100_000, n=16), "allowed_token_ids", "body_numbers"),
        (chat(logit_bias={str(i): 1 for i in range(600_000)}), "logit_bias", "body_values"),
        (chat(bad_words=["word " * 24_000] * 64), "bad_words", "bad_word_characters"),
        ((EMBEDDINGS, {"input": ["word " * 780] * 2048}), "input", "input_tokens"),
        (
            (
                COMPLETIONS,
                {"prompt": [5] * 4000, "echo": True, "logprobs": 20, "n": 16, "max_tokens": 1},
            ),
            "logprobs",
            "prompt_logprobs",
        ),
        # Others of their kind.
        (chat(stop=["a"] * 17), "stop", "stop"),
        (chat(stop_token_ids=[5] * 1025), "stop_token_ids", "stop_token_ids"),
        (chat(allowed_token_ids=[5] * 49_153), "allowed_token_ids", "allowed_token_ids"),
        (chat(logit_bias={str(i): 1 for i in range(16_385)}), "logit_bias", "logit_bias"),
        (chat(bad_words=["a"] * 65), "bad_words", "bad_words"),
        (chat(cache_salt="x" * 1025), "cache_salt", "cache_salt"),
        (chat(messages=MESSAGES * 8193), "messages", "messages"),
        (chat(messages=[{"role": "user", "content": [PART] * 16_385}]), "messages", "body_values"),
        (chat(messages=[{"role": "user", "content": [1] * 16_385}]), "messages", "parts"),
        (chat(tools=[TOOL] * 129), "tools", "tools"),
        (chat(tools=[{"type": "x"}] * 129), "tools", "tools"),
        (chat(guided_choice=["a"] * 40_000), "guided_choice", "schema"),
        (chat(guided_json="[" + "1," * 1_100_000 + "1]"), "guided_json", "body_numbers"),
        (chat(n=17), "n", "n"),
        (chat(prompt_logprobs=21), "prompt_logprobs", "logprobs"),
        ((COMPLETIONS, {"prompt": [[5]] * 129}), "prompt", "prompts"),
        ((EMBEDDINGS, {"input": ["a"] * 2049}), "input", "inputs"),
        ((RESPONSES, {"input": "Hi", "metadata": PAIRS}), "metadata", "metadata"),
        ((RESPONSES, {"input": "Hi", "metadata": LONG_PAIR}), "metadata", "metadata_characters"),
        ((RESPONSES, {"input": MESSAGES * 8193}), "input", "messages"),
        (("/v1/messages", {"max_tokens": 1, "messages": MESSAGES * 8193}), None, "messages"),
        (("/detokenize", {"tokens": [5] * 1_100_000}), "tokens", "body_numbers"),
    ],
)
def test_refused_with_its_name_and_its_bound(
    server: RunningServer, sent: tuple[str, dict[str, Any]], param: str | None, bound: str
) -> None:
    before = refused(server, bound)
    reply = post(server, *sent)
    assert reply.status_code == 400, reply.text[:500]
    error = reply.json()["error"]
    assert error.get("param") == param
    assert len(reply.content) < 1500
    assert refused(server, bound) == before + 1
    assert httpx.get(f"{server.base_url}/health").status_code == 200


def test_at_their_bounds_they_are_answered_as_without(server: RunningServer) -> None:
    """Everything that can be there and change nothing, at once."""
    _, plain = chat(max_tokens=12, temperature=0)
    wanted = post(server, CHAT, plain).json()["choices"][0]["message"]["content"]
    everything = {
        **plain,
        "stop": ["\u2603" * 4096] * 16,
        "stop_token_ids": [49_151] * 1024,
        "allowed_token_ids": list(range(49_152)),
        "logit_bias": dict.fromkeys(map(str, range(16_384)), 0),
        "bad_words": [f"\u2603{i}" for i in range(64)],
        "cache_salt": "x" * 1024,
        "n": 16,
    }
    choices = post(server, CHAT, everything).json()["choices"]
    assert [choice["message"]["content"] for choice in choices] == [wanted] * 16


@pytest.mark.parametrize("stream", [False, True])
def test_echoed_logprobs_are_the_same_for_every_choice(server: RunningServer, stream: bool) -> None:
    fields = {"prompt": "One two three four", "echo": True, "logprobs": 3, "max_tokens": 2}
    fields |= {"temperature": 0, "ignore_eos": True}
    one = post(server, COMPLETIONS, fields).json()["choices"][0]
    if not stream:
        found = post(server, COMPLETIONS, {**fields, "n": 3}).json()["choices"]
        assert [choice["logprobs"] for choice in found] == [one["logprobs"]] * 3
        assert {choice["text"] for choice in found} == {one["text"]}
        return
    text = post(server, COMPLETIONS, {**fields, "n": 3, "stream": True}).text
    events = [json.loads(line[6:]) for line in text.split("\n\n") if line.startswith("data: {")]
    for index in range(3):
        parts = [c for event in events for c in event["choices"] if c["index"] == index]
        assert "".join(part["text"] for part in parts) == one["text"]
        for name, values in one["logprobs"].items():
            assert [value for part in parts for value in part["logprobs"][name]] == values
    assert one["logprobs"]["token_logprobs"][0] is None
    assert len(one["logprobs"]["tokens"]) > 4


def test_an_embeddings_timeout_is_the_whole_requests(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each input had the whole of it: thousands of them could take hours."""
    now_s = [1000.0]
    given: list[float | None] = []

    async def embed(service: Service, call: Call, request: GenerateRequest) -> list[float]:
        given.append(request.timeout_s)
        now_s[0] += 4.0
        return [1.0]

    monkeypatch.setattr(embeddings, "_embed", embed)
    monkeypatch.setattr(embeddings, "AT_A_TIME", 1)
    monkeypatch.setattr("headrace.server.api.embeddings.time.monotonic", lambda: now_s[0])
    model = SimpleNamespace(
        name="m",
        answers_to=lambda name: True,
        vocab_size=10,
        hidden_size=1,
        tokenizer=SimpleNamespace(longest_token_characters=9),
    )
    service = SimpleNamespace(config=ServerConfig(), model=model, context_tokens=100, keys=Keys())
    for inputs, wanted in ((2, [10.0, 6.0]), (5, [10.0, 6.0, 2.0])):
        given.clear()
        body = json.dumps({"input": [[5]] * inputs, "timeout_s": 10}).encode()
        call = Call(method="POST", path="/", headers={}, request_id="r", body=body)
        call.arrived_s = now_s[0]
        answering = embeddings.embeddings(cast("Service", service), call)
        if len(wanted) == inputs:
            asyncio.run(cast("Any", answering))
        else:
            with pytest.raises(QueueTimeoutError):
                asyncio.run(cast("Any", answering))
        assert given == wanted
