"""Fields of vLLM's and llama.cpp's clients that do something, through a real server; where another
request, or the library, says what must come of them."""

from __future__ import annotations

import json
from typing import Any

import httpx
import pytest
from tests.server.conftest import RunningServer

from headrace import LLM, SamplingParams

CHAT, COMPLETIONS = "/v1/chat/completions", "/v1/completions"
HI: list[Any] = [{"role": "user", "content": "Say hi."}]
LONG = " ".join(map(str, range(200)))  # hundreds of tokens, all of them different places


def send(server: RunningServer, path: str, **fields: Any) -> httpx.Response:
    if path == CHAT:
        fields = {"messages": HI, "max_tokens": 40, "temperature": 0, **fields}
    elif path == COMPLETIONS:
        fields = {"prompt": "One, two, three,", "max_tokens": 6, "temperature": 0, **fields}
    return httpx.post(server.base_url + path, json=fields, timeout=120)


def ask(server: RunningServer, path: str, **fields: Any) -> dict[str, Any]:
    reply = send(server, path, **fields)
    assert reply.status_code == 200, reply.text
    assert "x-headrace-warning" not in reply.headers
    found: dict[str, Any] = reply.json()
    return found


def stream(server: RunningServer, path: str, **fields: Any) -> list[dict[str, Any]]:
    reply = send(server, path, stream=True, **fields)
    assert reply.status_code == 200, reply.text
    events = [e.removeprefix("data: ") for e in reply.text.split("\n\n") if e]
    assert events.pop() == "[DONE]"
    return [json.loads(event) for event in events]


def refused(server: RunningServer, path: str, **fields: Any) -> dict[str, Any]:
    reply = send(server, path, **fields)
    assert reply.status_code == 400, reply.text
    error: dict[str, Any] = reply.json()["error"]
    return error


def text_of(made: dict[str, Any]) -> str:
    choice = made["choices"][0]
    text: str = choice["message"]["content"] if "message" in choice else choice["text"]
    return text


# -- text ------------------------------------------------------------------------------------------


def test_special_tokens_are_text_where_they_are_wanted(short: RunningServer) -> None:
    plain = ask(short, CHAT)
    assert plain["choices"][0]["finish_reason"] == "stop"
    assert "<|im_end|>" not in text_of(plain)
    # As vLLM: what ended the text is no part of it, unless that is wanted too.
    shown = ask(short, CHAT, skip_special_tokens=False, spaces_between_special_tokens=False)
    assert text_of(shown) == text_of(plain)
    ended = ask(short, CHAT, skip_special_tokens=False, include_stop_str_in_output=True)
    assert text_of(ended) == text_of(plain) + "<|im_end|>"
    on = ask(short, CHAT, skip_special_tokens=False, ignore_eos=True)
    assert text_of(on).startswith(text_of(plain) + "<|im_end|>")
    hidden = ask(short, CHAT, ignore_eos=True)
    assert "<|im_end|>" not in text_of(hidden)
    pieces = stream(short, CHAT, skip_special_tokens=False, include_stop_str_in_output=True)
    said = "".join(p["choices"][0]["delta"].get("content") or "" for p in pieces)
    assert said == text_of(ended)


def test_a_stop_string_is_kept_where_it_is_wanted(short: RunningServer) -> None:
    whole = text_of(ask(short, COMPLETIONS))
    stop = whole[2:5]
    cut = ask(short, COMPLETIONS, stop=stop)
    assert text_of(cut) == whole[: whole.index(stop)]
    kept = ask(short, COMPLETIONS, stop=stop, include_stop_str_in_output=True)
    assert text_of(kept) == whole[: whole.index(stop) + len(stop)]
    assert kept["choices"][0]["finish_reason"] == "stop"
    pieces = stream(short, COMPLETIONS, stop=stop, include_stop_str_in_output=True)
    assert "".join(p["choices"][0]["text"] for p in pieces) == text_of(kept)


def test_a_stop_tokens_text_too(short: RunningServer) -> None:
    made = ask(short, COMPLETIONS, return_token_ids=True)
    third = made["choices"][0]["token_ids"][2]
    texts = [
        text_of(ask(short, COMPLETIONS, stop_token_ids=[third], include_stop_str_in_output=keep))
        for keep in (False, True)
    ]
    assert text_of(made).startswith(texts[1])
    assert texts[1].startswith(texts[0])
    assert len(texts[1]) > len(texts[0])


# -- tokens ----------------------------------------------------------------------------------------


def test_token_ids_of_a_chat(short: RunningServer, llm: LLM) -> None:
    made = ask(short, CHAT, return_token_ids=True)
    tokens = httpx.post(f"{short.base_url}/tokenize", json={"messages": HI}).json()["tokens"]
    assert made["prompt_token_ids"] == tokens
    ids = made["choices"][0]["token_ids"]
    assert len(ids) == made["usage"]["completion_tokens"]
    assert llm.tokenizer.decode(ids, continuation=True) == text_of(made)
    chunks = stream(short, CHAT, return_token_ids=True)
    assert chunks[0]["prompt_token_ids"] == tokens
    assert not any("prompt_token_ids" in chunk for chunk in chunks[1:])
    assert [i for c in chunks for i in c["choices"][0]["token_ids"]] == ids
    plain = ask(short, CHAT)
    assert "prompt_token_ids" not in plain
    assert "token_ids" not in plain["choices"][0]


def test_token_ids_of_calls_are_all_there(short: RunningServer) -> None:
    fields: Any = {"tools": [{"type": "function", "function": {"name": "now"}}]}
    fields |= {"tool_choice": {"type": "function", "function": {"name": "now"}}}
    ids = ask(short, CHAT, return_token_ids=True, **fields)["choices"][0]["token_ids"]
    chunks = stream(short, CHAT, return_token_ids=True, **fields)
    assert [i for c in chunks for i in c["choices"][0]["token_ids"]] == ids


def test_token_ids_of_completions(short: RunningServer) -> None:
    prompts = ["One, two,", "Red, green,"]
    made = ask(short, COMPLETIONS, prompt=prompts, return_token_ids=True)
    for choice, prompt in zip(made["choices"], prompts, strict=True):
        tokens = httpx.post(f"{short.base_url}/tokenize", json={"prompt": prompt}).json()["tokens"]
        assert choice["prompt_token_ids"] == tokens
        assert len(choice["token_ids"]) == 6
    chunks = [
        c["choices"][0] for c in stream(short, COMPLETIONS, prompt=prompts, return_token_ids=True)
    ]
    for whole in made["choices"]:
        mine = [chunk for chunk in chunks if chunk["index"] == whole["index"]]
        assert mine[0]["prompt_token_ids"] == whole["prompt_token_ids"]
        assert [i for chunk in mine for i in chunk["token_ids"]] == whole["token_ids"]
    scored = ask(short, COMPLETIONS, echo=True, max_tokens=0, return_token_ids=True)
    assert scored["choices"][0]["token_ids"] == []


def test_logprobs_of_prompts(short: RunningServer, llm: LLM) -> None:
    """In vLLM's shape; the library's numbers for the same tokens."""
    made = ask(short, COMPLETIONS, prompt_logprobs=2, return_token_ids=True)
    choice = made["choices"][0]
    params = SamplingParams(temperature=0, max_tokens=1, prompt_logprobs=2)
    [expected] = llm.generate([choice["prompt_token_ids"]], params)
    assert expected.prompt_logprobs is not None
    assert choice["prompt_logprobs"][0] is None
    for found, truth in zip(
        choice["prompt_logprobs"][1:], expected.prompt_logprobs[1:], strict=True
    ):
        assert truth is not None
        assert {int(token) for token in found} == set(truth)
        for token, here in found.items():
            there = truth[int(token)]
            assert here["logprob"] == pytest.approx(there.logprob, abs=1e-3)
            assert (here["rank"], here["decoded_token"]) == (there.rank, there.decoded_token)
    chat = ask(short, CHAT, prompt_logprobs=0, max_tokens=1)
    assert len(chat["prompt_logprobs"]) == chat["usage"]["prompt_tokens"]
    assert "prompt_logprobs" not in ask(short, CHAT, max_tokens=1)
    assert ask(short, COMPLETIONS, prompt=[5], prompt_logprobs=1)["choices"][0][
        "prompt_logprobs"
    ] == [None]
    for bad in (21, -1):
        assert refused(short, CHAT, prompt_logprobs=bad)["param"] == "prompt_logprobs"
    assert refused(short, CHAT, prompt_logprobs=1, stream=True)["param"] == "prompt_logprobs"


# -- prompts ---------------------------------------------------------------------------------------


def test_a_prompt_is_cut_where_the_client_says_so(short: RunningServer) -> None:
    prompt = "one two three four five six"
    whole = httpx.post(f"{short.base_url}/tokenize", json={"prompt": prompt}).json()["tokens"]

    def kept(**fields: Any) -> list[int]:
        made = ask(short, COMPLETIONS, return_token_ids=True, max_tokens=1, **fields)
        ids: list[int] = made["choices"][0]["prompt_token_ids"]
        return ids

    for given in (prompt, whole):
        assert kept(prompt=given, truncate_prompt_tokens=3) == whole[-3:]
        assert kept(prompt=given, truncate_prompt_tokens=3, truncation_side="left") == whole[-3:]
        assert kept(prompt=given, truncate_prompt_tokens=3, truncation_side="right") == whole[:3]
        assert kept(prompt=given, truncate_prompt_tokens=100) == whole
    long = httpx.post(
        f"{short.base_url}/tokenize", json={"prompt": LONG, "truncate_prompt_tokens": -1}
    )
    assert long.json()["count"] == 256
    assert kept(prompt=LONG, truncate_prompt_tokens=-1) == long.json()["tokens"][-255:]
    made = ask(short, COMPLETIONS, prompt=LONG, truncate_prompt_tokens=-1, echo=True, max_tokens=6)
    assert made["usage"]["prompt_tokens"] == 250
    assert "198 199" in text_of(made)
    assert "0 1 2" not in text_of(made)
    for bad in (0, -2, 256, 10**9):
        assert (
            refused(short, COMPLETIONS, truncate_prompt_tokens=bad)["param"]
            == "truncate_prompt_tokens"
        )
    assert refused(short, COMPLETIONS, truncation_side="top")["param"] == "truncation_side"


def test_a_chat_is_cut_where_the_client_says_so(short: RunningServer) -> None:
    messages = [{"role": "user", "content": LONG}]
    assert refused(short, CHAT, messages=messages)["code"] == "context_length_exceeded"
    made = ask(short, CHAT, messages=messages, max_tokens=6, truncate_prompt_tokens=-1)
    assert made["usage"]["prompt_tokens"] == 250
    made = ask(short, CHAT, messages=messages, max_tokens=6, truncate_prompt_tokens=9)
    assert made["usage"]["prompt_tokens"] == 9


def test_inputs_of_embeddings_are_cut_as_benchmarks_ask(short: RunningServer) -> None:
    """`vllm bench serve` sends truncate_prompt_tokens -1 with every text."""
    tokens = httpx.post(
        f"{short.base_url}/tokenize", json={"prompt": LONG, "truncate_prompt_tokens": -1}
    ).json()["tokens"]
    cut = ask(short, "/v1/embeddings", input=[LONG, "Hi"], truncate_prompt_tokens=-1)
    assert cut["usage"]["prompt_tokens"] == 257
    same = ask(short, "/v1/embeddings", input=[tokens])
    assert cut["data"][0]["embedding"] == pytest.approx(same["data"][0]["embedding"], abs=1e-4)
    error = refused(short, "/v1/embeddings", input=LONG)
    assert error["code"] == "context_length_exceeded"
    assert error["message"].startswith("This model's maximum context length is 256 tokens.")


def test_megabytes_are_cut_before_they_are_tokenized(server: RunningServer) -> None:
    text = "word " * 1_000_000
    made = ask(server, "/tokenize", prompt=text, truncate_prompt_tokens=4)
    assert made["count"] == 4


def test_documents_and_template_arguments_are_the_templates(short: RunningServer) -> None:
    """A template that knows none of them says the same."""
    plain = ask(short, CHAT, max_tokens=4)
    extra: Any = {"documents": [{"title": "a", "text": "b"}], "chat_template_kwargs": {"x": 1}}
    assert text_of(ask(short, CHAT, max_tokens=4, **extra)) == text_of(plain)


# -- llama.cpp's names -----------------------------------------------------------------------------


def test_second_names_are_the_same_thing(short: RunningServer) -> None:
    made = ask(short, COMPLETIONS, max_tokens=None, n_predict=3)
    assert made["usage"]["completion_tokens"] == 3
    assert ask(short, CHAT, n_predict=40, max_tokens=40)["choices"]
    error = refused(short, COMPLETIONS, n_predict=3, max_tokens=4)
    assert error["param"] == "max_tokens"
    one = text_of(ask(short, COMPLETIONS, repeat_penalty=1.8, max_tokens=12))
    assert one == text_of(ask(short, COMPLETIONS, repetition_penalty=1.8, max_tokens=12))
    assert one != text_of(ask(short, COMPLETIONS, max_tokens=12))
    error = refused(short, CHAT, repeat_penalty=1.8, repetition_penalty=1.7)
    assert error["param"] == "repetition_penalty"


def test_a_prompt_that_is_not_to_be_cached(short: RunningServer) -> None:
    prompt = "Nobody has asked this before: " + LONG[:200]

    def cached(**fields: Any) -> int:
        usage = ask(short, COMPLETIONS, prompt=prompt, max_tokens=1, **fields)["usage"]
        count: int = usage["prompt_tokens_details"]["cached_tokens"]
        return count

    assert [cached(cache_prompt=False) for _ in range(2)] == [0, 0]  # leaves nothing
    assert cached() == 0
    assert cached(cache_prompt=True) > 0
    assert cached(cache_prompt=False) == 0  # and finds nothing


def test_grammars_and_schemas_under_llama_cpps_names(short: RunningServer) -> None:
    made = ask(short, CHAT, grammar='root ::= "yes" | "no"', temperature=1)
    assert text_of(made) in ("yes", "no")
    schema: Any = {"type": "object", "properties": {"a": {"enum": [1, 2]}}}
    schema |= {"required": ["a"], "additionalProperties": False}
    for fields in (
        {"json_schema": schema},
        {"json_schema": json.dumps(schema)},
        {"response_format": {"type": "json_object", "schema": schema}},
    ):
        made = ask(short, COMPLETIONS, max_tokens=40, **fields)
        assert json.loads(text_of(made)) in ({"a": 1}, {"a": 2})
    assert ask(short, CHAT, grammar="", max_tokens=1)
    assert "2 times" in refused(short, CHAT, grammar="root ::= [a-z]", guided_regex="a")["message"]
    assert refused(short, CHAT, grammar="root ::= missing")["param"] == "grammar"


def test_a_request_id_of_the_body_is_the_answers(short: RunningServer) -> None:
    for path in (CHAT, COMPLETIONS):
        reply = send(short, path, request_id="from-the-body", max_tokens=1)
        assert reply.headers["x-request-id"] == "from-the-body"


# -- tools of other kinds --------------------------------------------------------------------------


def test_what_codex_sends(server: RunningServer) -> None:
    """Tools of the server's own are left out; a call of a function in a namespace says so."""
    body = {
        "model": "smollm2",
        "input": [{"type": "message", "role": "user", "content": "List the files."}],
        "tools": [
            {"type": "web_search", "external_web_access": False},
            {
                "type": "namespace",
                "name": "mcp__files",
                "description": "Files.",
                "tools": [{"type": "function", "name": "list", "parameters": {}, "strict": False}],
            },
        ],
        "tool_choice": {"type": "function", "name": "mcp__files__list"},
        "client_metadata": {"installation": "x"},
        "store": False,
        "include": [],
        "max_output_tokens": 60,
    }
    reply = httpx.post(f"{server.base_url}/v1/responses", json=body, timeout=120)
    assert reply.status_code == 200, reply.text
    [item] = reply.json()["output"]
    assert (item["name"], item["namespace"], item["arguments"]) == ("list", "mcp__files", "{}")
    warning = reply.headers["x-headrace-warning"]
    assert "web_search" in warning
    assert "client_metadata" in warning
    assert "store" not in warning
