"""Keys over HTTP: who gets in, what each has left, and that their caches stay apart."""

from __future__ import annotations

import os
import socket
from typing import Any

import httpx
import openai
import pytest
from tests.server.access.test_keys_file import write
from tests.server.conftest import RunningServer, StartServer

CHAT = "/v1/chat/completions"
GOOD: dict[str, Any] = {"messages": [{"role": "user", "content": "Hi"}], "max_tokens": 1}


@pytest.fixture(scope="module")
def keyed(start_server: StartServer, tmp_path_factory: pytest.TempPathFactory) -> RunningServer:
    path = write(
        tmp_path_factory.mktemp("keys"),
        '[[keys]]\nname = "a"\nkey = "key-of-a"\n[[keys]]\nname = "b"\nkey = "key-of-b"\n'
        '[[keys]]\nname = "few"\nkey = "key-of-few"\nrequests_per_minute = 1\n'
        '[[keys]]\nname = "one"\nkey = "key-of-one"\nmax_concurrent = 1\n'
        '[[keys]]\nname = "two"\nkey = "key-of-two"\nmax_concurrent = 2\n'
        '[[keys]]\nname = "small"\nkey = "key-of-small"\ntokens_per_minute = 1000\n',
    )
    return start_server(server={"api_keys_file": str(path)})


def bearer(name: str) -> dict[str, str]:
    return {"authorization": f"Bearer key-of-{name}"}


def test_every_route_but_probes_and_the_page_needs_a_key(keyed: RunningServer) -> None:
    described = httpx.get(f"{keyed.base_url}/openapi.json", headers=bearer("a")).json()["paths"]
    assert len(described) > 8
    probes = {"/health", "/ready", "/ping", "/"}
    assert probes < described.keys()
    with httpx.Client() as client:
        for path in [*described, "/nowhere", "/health/", "//health"]:
            for method in ("GET", "POST", "OPTIONS", "HEAD"):
                reply = client.request(method, keyed.base_url + path)
                assert (reply.status_code == 401) == (path not in probes), path
                if reply.status_code == 401 and method != "HEAD":
                    assert reply.headers["www-authenticate"] == "Bearer"
                    assert reply.json()["error"]["type"] == "authentication_error"
    assert httpx.get(f"{keyed.base_url}/nowhere", headers=bearer("a")).status_code == 404


def test_two_keys_at_once_are_none(keyed: RunningServer) -> None:
    with socket.create_connection(("127.0.0.1", keyed.port)) as sock:
        sock.sendall(
            b"GET /v1/models HTTP/1.1\r\nhost: localhost\r\nauthorization: Bearer no\r\n"
            b"authorization: Bearer key-of-a\r\n\r\n"
        )
        assert sock.recv(100).startswith(b"HTTP/1.1 401 ")


def test_the_openai_client_sends_its_key(keyed: RunningServer) -> None:
    with openai.OpenAI(base_url=f"{keyed.base_url}/v1", api_key="key-of-a") as client:
        assert client.models.list().data[0].id == "smollm2"
    with (
        openai.OpenAI(base_url=f"{keyed.base_url}/v1", api_key="wrong") as client,
        pytest.raises(openai.AuthenticationError),
    ):
        client.models.list()


def test_a_spent_key_gets_429_with_the_time_and_the_limits(keyed: RunningServer) -> None:
    url = keyed.base_url + CHAT
    first = httpx.post(url, json=GOOD, headers=bearer("few"), timeout=60)
    assert (first.status_code, first.headers["x-ratelimit-remaining-requests"]) == (200, "0")
    second = httpx.post(url, json=GOOD, headers=bearer("few"), timeout=60)
    assert second.status_code == 429
    assert 1 <= int(second.headers["retry-after"]) <= 61
    assert second.headers["x-ratelimit-limit-requests"] == "1"
    assert second.json()["error"]["type"] == "rate_limit_error"
    assert httpx.post(url, json=GOOD, headers=bearer("a"), timeout=60).status_code == 200


def test_a_stream_is_open_until_its_end(keyed: RunningServer) -> None:
    url, headers = keyed.base_url + CHAT, bearer("one")
    body = {**GOOD, "max_tokens": 3000, "ignore_eos": True, "stream": True}
    with httpx.stream("POST", url, json=body, headers=headers, timeout=60) as stream:
        chunks = stream.iter_bytes()
        next(chunks)
        assert httpx.post(url, json=GOOD, headers=headers).status_code == 429
        assert next(chunks)
    keyed.wait_for(
        lambda: httpx.post(url, json=GOOD, headers=headers, timeout=60).status_code == 200
    )


def test_keys_do_not_see_each_others_prefixes(keyed: RunningServer) -> None:
    """By what the prefix cache says it found."""
    text = f"{os.urandom(8).hex()} " + "A prefix that is long enough for some blocks. " * 20
    body = {**GOOD, "messages": [{"role": "user", "content": text}]}

    def cached(name: str, **more: object) -> int:
        reply = httpx.post(
            keyed.base_url + CHAT, json={**body, **more}, headers=bearer(name), timeout=60
        )
        found: int = reply.json()["usage"]["prompt_tokens_details"]["cached_tokens"]
        return found

    def cached_later(name: str, **more: object) -> int:
        cached(name, **more)
        return cached(name, **more)

    assert cached("a") < 64
    alone = cached_later("a")
    assert alone > 64
    assert cached("b") < 64
    assert cached("a", cache_salt="mine") < 64
    assert cached("b", cache_salt="mine") < 64
    assert cached_later("b") == alone


def test_limits_count_fan_out(keyed: RunningServer) -> None:
    """128 prompts with 16 continuations of 2,000 tokens each went through a limit of 1,000 tokens a
    minute, and one of 2 at a time."""
    prompts = ["Hi"] * 128
    for name, param in (("two", "n"), ("small", "max_tokens")):
        reply = httpx.post(
            f"{keyed.base_url}/v1/completions",
            json={"prompt": prompts, "n": 16, "max_tokens": 2000},
            headers=bearer(name),
            timeout=60,
        )
        assert reply.status_code == 400
        assert "can never run" in reply.json()["error"]["message"]
        assert reply.json()["error"]["param"] == param
    body = {"prompt": prompts[:2], "max_tokens": 1}
    url = f"{keyed.base_url}/v1/completions"
    assert httpx.post(url, json=body, headers=bearer("two"), timeout=60).status_code == 200


@pytest.mark.parametrize(
    ("path", "body"),
    [
        (CHAT, {**GOOD, "max_tokens": 2000}),
        (CHAT, {**GOOD, "max_tokens": 500, "n": 2}),
        ("/v1/completions", {"prompt": "Hi", "max_tokens": 600, "best_of": 2}),
        ("/v1/completions", {"prompt": "Hi", "max_tokens": 2000, "stream": True}),
        ("/v1/responses", {"input": "Hi", "max_output_tokens": 2000}),
        ("/v1/responses", {"input": "Hi", "max_output_tokens": 2000, "stream": True}),
        ("/v1/messages", {**GOOD, "max_tokens": 2000}),
        ("/v1/messages", {**GOOD, "max_tokens": 2000, "stream": True}),
        ("/v1/embeddings", {"input": ["one two three four five six"] * 300}),
    ],
)
def test_every_way_to_the_engine_is_limited(
    keyed: RunningServer, path: str, body: dict[str, Any]
) -> None:
    reply = httpx.post(
        keyed.base_url + path,
        json={"model": "smollm2", **body},
        headers=bearer("small"),
        timeout=60,
    )
    assert reply.status_code == 400, reply.text
    assert "has 1000 per minute, so it can never run" in reply.text
    assert reply.headers["x-ratelimit-limit-tokens"] == "1000"


def test_what_was_not_generated_comes_back(keyed: RunningServer) -> None:
    """A lot set aside, a little used: the next one of the same size fits."""
    for _ in range(3):
        reply = httpx.post(
            keyed.base_url + CHAT,
            json={**GOOD, "max_tokens": 800, "stop": [" "], "seed": 1},
            headers=bearer("small"),
            timeout=60,
        )
        assert reply.status_code == 200, reply.text
        assert int(reply.headers["x-ratelimit-remaining-tokens"]) < 200
    texts = ["one two three"] * 40
    reply = httpx.post(
        f"{keyed.base_url}/v1/embeddings", json={"input": texts}, headers=bearer("two"), timeout=60
    )
    assert len(reply.json()["data"]) == 40  # two at a time
