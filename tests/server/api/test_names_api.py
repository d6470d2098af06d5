"""What the model is called, and the small endpoints that other servers have: against real ones."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import httpx
import openai
import pytest
from tests.server.conftest import RunningServer, StartServer

from headrace.core.errors import ConfigError
from headrace.core.server_config import ServerConfig

HUB_NAME = "HuggingFaceTB/SmolLM2-135M-Instruct"
CATALOG_NAME = "smollm2-135m-instruct"


@pytest.fixture(scope="module")
def named(start_server: StartServer) -> Iterator[openai.OpenAI]:
    started = start_server(server={"served_model_name": "prod, org/second,prod"})
    with openai.OpenAI(base_url=f"{started.base_url}/v1", api_key="none", max_retries=0) as made:
        yield made


def ask(named: openai.OpenAI, model: str) -> str:
    made = named.chat.completions.create(
        model=model, messages=[{"role": "user", "content": "Hi"}], max_tokens=1
    )
    return made.model


@pytest.mark.parametrize("name", ["prod", "org/second", HUB_NAME, CATALOG_NAME, "smollm2"])
def test_all_names_are_taken_and_answers_say_the_first(named: openai.OpenAI, name: str) -> None:
    assert ask(named, name) == "prod"


def test_what_was_typed_is_a_name(named: openai.OpenAI, default_model_path: Any) -> None:
    assert ask(named, str(default_model_path)) == "prod"


def test_any_other_name_is_refused_with_those_that_there_are(named: openai.OpenAI) -> None:
    with pytest.raises(openai.NotFoundError, match="expected 'prod' or 'org/second'"):
        ask(named, "third")


def test_names_that_were_chosen_are_listed(named: openai.OpenAI) -> None:
    cards = named.models.list().data
    assert [card.id for card in cards] == ["prod", "org/second"]
    assert {card.model_dump()["root"] for card in cards} == {"prod"}
    assert named.models.retrieve("org/second").id == "org/second"
    assert named.models.retrieve(HUB_NAME).id == "prod"


def test_names_in_the_configuration() -> None:
    assert ServerConfig().served_names == ()
    assert ServerConfig(served_model_name="a").served_names == ("a",)
    assert ServerConfig(served_model_name=" a ,b,,a").served_names == ("a", "b")
    with pytest.raises(ConfigError, match="served_model_name"):
        ServerConfig(served_model_name=" , ")


# -- small endpoints -------------------------------------------------------------------------------


def test_ping(server: RunningServer) -> None:
    for method in ("GET", "POST", "HEAD"):
        assert httpx.request(method, f"{server.base_url}/ping").status_code == 200


def test_ping_waits_for_the_engine_and_needs_no_key(start_server: StartServer) -> None:
    started = start_server(server={"api_key": "secret"}, ready=False)
    seen = set()

    def answers() -> bool:
        seen.add(httpx.get(f"{started.base_url}/ping").status_code)
        return 200 in seen

    started.wait_for(answers)
    assert seen <= {200, 503}
    assert httpx.get(f"{started.base_url}/load").status_code == 401
    assert httpx.get(f"{started.base_url}/tokenizer_info").status_code == 401


def test_load(server: RunningServer) -> None:
    def load() -> int:
        return int(httpx.get(f"{server.base_url}/load").json()["server_load"])

    server.wait_for(lambda: load() == 0)
    body = {"prompt": "Once", "max_tokens": 4000, "ignore_eos": True, "stream": True}
    with httpx.stream("POST", f"{server.base_url}/v1/completions", json=body, timeout=60) as reply:
        lines = reply.iter_lines()  # who drops these closes the connection
        assert next(lines)
        assert load() == 1
    server.wait_for(lambda: load() == 0)


def test_load_says_how_full_the_engine_is(server: RunningServer) -> None:
    def load() -> dict[str, float | None]:
        found: dict[str, float | None] = httpx.get(f"{server.base_url}/load").json()
        return found

    server.wait_for(lambda: load()["saturation"] is not None)  # its first snapshot has come
    found = load()
    levels = {"running", "waiting", "waiting_tokens", "free_blocks", "cache_tokens", "saturation"}
    assert found.keys() == levels | {"server_load"}
    assert found["free_blocks"]
    assert 0 <= (found["saturation"] or 0) <= 1


def test_tokenizer_info(server: RunningServer) -> None:
    info = httpx.get(f"{server.base_url}/tokenizer_info").json()
    assert "<|im_start|>" in info["chat_template"]
    assert info["eos_token"] == "<|im_end|>"
    assert info["model_max_length"] == 8192
    sent = {"tokens": info["eos_token_ids"]}
    shown = httpx.post(f"{server.base_url}/detokenize", json=sent).json()["prompt"]
    assert info["eos_token"] in shown


# -- what was tools once ---------------------------------------------------------------------------

CALLED = {"role": "assistant", "content": None, "function_call": {"name": "x", "arguments": "{}"}}


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"functions": [{"name": "x", "parameters": {}}]}, "functions"),
        ({"function_call": "auto"}, "function_call"),
        ({"messages": [CALLED]}, "messages[0].function_call"),
        ({"messages": [{"role": "function", "name": "x", "content": "4"}]}, "messages[0].role"),
    ],
)
def test_functions_are_refused(server: RunningServer, fields: dict[str, Any], param: str) -> None:
    body = {"messages": [{"role": "user", "content": "Hi"}], "max_tokens": 1, **fields}
    reply = httpx.post(f"{server.base_url}/v1/chat/completions", json=body, timeout=60)
    assert (reply.status_code, reply.json()["error"]["param"]) == (400, param)
    assert "tool" in reply.json()["error"]["message"]


def test_none_of_them_is_none(server: RunningServer) -> None:
    body = {"messages": [{"role": "user", "content": "Hi"}], "max_tokens": 1}
    body |= {"functions": None, "function_call": None}
    reply = httpx.post(f"{server.base_url}/v1/chat/completions", json=body, timeout=60)
    assert reply.status_code == 200
