"""What clients see of several replicas: what they would see of one server."""

from __future__ import annotations

from typing import Any

import httpx
import openai
import pytest
from prometheus_client.parser import text_string_to_metric_families
from tests.replicas.conftest import Replicas


@pytest.fixture
def client(replicas: Replicas) -> openai.OpenAI:
    return openai.OpenAI(base_url=f"{replicas.base_url}/v1", api_key="none", max_retries=0)


def test_openais_client_is_answered(client: openai.OpenAI, replicas: Replicas) -> None:
    asked: Any = [{"role": "user", "content": "Name a river."}]
    chat: Any = client.chat.completions
    whole = chat.create(model="smollm2", messages=asked, max_tokens=8, temperature=0)
    parts = chat.create(model="smollm2", messages=asked, max_tokens=8, temperature=0, stream=True)
    text = "".join(part.choices[0].delta.content or "" for part in parts if part.choices)
    assert text == whole.choices[0].message.content
    assert [model.id for model in client.models.list()] == ["smollm2"]


def test_shares_are_disjoint(replicas: Replicas) -> None:
    import os

    first, second = (os.sched_getaffinity(pid) for pid in replicas.pids())
    assert not first & second
    assert "1 thread" in replicas.facts()["replicas"][0]["share"] or len(first) > 1


def test_stored_responses_stay_with_their_replica(client: openai.OpenAI) -> None:
    kept = [
        client.responses.create(model="smollm2", input=f"{n}: I am Ann.", max_output_tokens=2)
        for n in range(4)
    ]
    for first in kept:
        more = client.responses.create(
            model="smollm2", input="Who?", previous_response_id=first.id, max_output_tokens=2
        )
        assert more.id[: len("resp_r1_")] == first.id[: len("resp_r1_")]
        assert client.responses.retrieve(more.id).previous_response_id == first.id
    client.responses.delete(kept[0].id)
    for gone in (kept[0].id, "resp_r99_0", "x"):
        with pytest.raises(openai.NotFoundError):
            client.responses.retrieve(gone)


def test_metrics_of_all_replicas(replicas: Replicas) -> None:
    text = httpx.get(f"{replicas.base_url}/metrics").text
    families = {family.name: family for family in text_string_to_metric_families(text)}
    up = families["headrace_router_replica_up"]
    assert [sample.value for sample in up.samples] == [1, 1]
    waiting = families["vllm:num_requests_waiting"]
    assert {sample.labels["replica"] for sample in waiting.samples} == {"1", "2"}


def test_the_page_and_what_it_asks_for(replicas: Replicas) -> None:
    page = httpx.get(f"{replicas.base_url}/")
    assert page.status_code == 200
    assert "text/html" in page.headers["content-type"]
    assert httpx.get(f"{replicas.base_url}/history").status_code == 200
    assert httpx.get(f"{replicas.base_url}/history?replica=2").status_code == 200
    assert httpx.get(f"{replicas.base_url}/history?replica=3").status_code == 404
    assert "server_load" in httpx.get(f"{replicas.base_url}/load").json()


def test_web_pages_are_kept_out_as_by_one_server(replicas: Replicas) -> None:
    body = {"model": "smollm2", "prompt": "x", "max_tokens": 1}
    url = f"{replicas.base_url}/v1/completions"
    foreign = httpx.post(url, json=body, headers={"origin": "https://evil.example"})
    assert foreign.status_code == 403
    assert httpx.post(url, json=body, headers={"host": "evil.example"}).status_code == 403
    plain = httpx.post(url, content='{"prompt": "x"}', headers={"content-type": "text/plain"})
    assert plain.status_code == 415


def test_replicas_answer_nobody_else(replicas: Replicas) -> None:
    for each in replicas.facts()["replicas"]:
        answer = httpx.get(f"{each['url']}/v1/models", headers={"x-headrace-key": "default"})
        assert answer.status_code == 401
