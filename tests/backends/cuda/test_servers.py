"""Whole servers on a GPU that they share: prompts computed by one and answers by another, replicas
behind one address, a prefix cache on disk. Needs a GPU and what a server needs; nothing here runs
in Triton's interpreter."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("httpx")
pytest.importorskip("openai")

import httpx
from tests.replicas.conftest import Replicas
from tests.server.conftest import RunningServer
from tests.server.handover.servers import (
    HEADERS,
    KEY,
    REQUESTS,
    chat,
    killing,
    outcomes,
    post,
    routing,
)

pytestmark = [
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU"),
    pytest.mark.timeout(600),
]
START_S = 300.0  # kernels are compiled
# The same bits whatever is in a batch: without it answers of two servers need not be equal.
ENGINE: dict[str, object] = {
    "device": "cuda",
    "gpu_memory": 0.2,
    "kv_tokens": 16384,
    "batch_invariant": True,
}


class Started:
    def __init__(self, model: Path, folder: Path) -> None:
        self._model, self._folder = model, folder
        self.servers: list[RunningServer] = []

    def __call__(self, server: dict[str, object], **engine: object) -> RunningServer:
        running = RunningServer(self._model, self._folder, server, {**ENGINE, **engine})
        self.servers.append(running)
        running.wait_for(lambda: httpx.get(f"{running.base_url}/ready").status_code == 200, START_S)
        return running


@pytest.fixture(scope="module")
def start(default_model_path: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Started]:
    started = Started(default_model_path, tmp_path_factory.mktemp("servers"))
    yield started
    for running in started.servers:
        running.stop()


@pytest.fixture(scope="module")
def alone(start: Started) -> RunningServer:
    return start({"api_key": KEY})


@pytest.fixture(scope="module")
def prefill(start: Started) -> RunningServer:
    return start({"role": "prefill", "api_key": KEY})


@pytest.fixture(scope="module")
def decode(start: Started) -> RunningServer:
    return start({"role": "decode", "api_key": KEY}, kv_tokens=8192)


def test_prompts_computed_by_another_server(
    alone: RunningServer, prefill: RunningServer, decode: RunningServer
) -> None:
    with routing(decode, prefill) as url:
        for path, body in REQUESTS:
            apart, whole = post(url, path, body), post(alone.base_url, path, body)
            assert apart["choices"] == whole["choices"]
            usage = apart["usage"]
            cached = usage["prompt_tokens_details"]["cached_tokens"]
            assert 0 < usage["prompt_tokens"] - cached <= 64
        decode.wait_for(lambda: outcomes(decode) == {"whole": len(REQUESTS)})


def test_the_other_server_is_killed(
    alone: RunningServer, prefill: RunningServer, decode: RunningServer
) -> None:
    (pid,) = prefill.engine_pids()
    facts = httpx.get(f"{prefill.base_url}/handover", headers=HEADERS).json()
    path, body = "/v1/chat/completions", chat(20, 32, temperature=0.8, seed=5, logprobs=True)
    with killing(facts["port"], pid, 4_500_000) as port:
        found = post(decode.base_url, path, body, **{"x-headrace-prefill": f"127.0.0.1:{port}"})
    assert found["choices"] == post(alone.base_url, path, body)["choices"]
    decode.wait_for(lambda: outcomes(decode).get("cut") == 1)


def test_a_prefix_cache_on_disk_outlives_its_server(
    start: Started, alone: RunningServer, tmp_path: Path
) -> None:
    body = chat(30, 64, temperature=0.7, seed=2, logprobs=True)
    path = "/v1/chat/completions"
    whole = post(alone.base_url, path, body)
    for number in range(2):
        running = start({"api_key": KEY}, prefix_disk=f"{tmp_path},1GiB")
        found = post(running.base_url, path, body)
        assert found["choices"] == whole["choices"]
        cached = found["usage"]["prompt_tokens_details"]["cached_tokens"]
        assert (cached > 700) == (number == 1), cached
        assert running.stop() == 0


@pytest.fixture(scope="module")
def replicas(
    default_model_path: Path, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Replicas]:
    """Two on one GPU, which stands for two."""
    running = Replicas(
        default_model_path,
        tmp_path_factory.mktemp("replicas"),
        {"replicas": 2, "log_format": "json"},
        ENGINE,
        environment={"HEADRACE_TEST_RANKS_SHARE_GPU": "1"},
    )
    running.wait_for(lambda: running.states() == ["up", "up"], START_S)
    yield running
    running.stop()


def ask(running: RunningServer, **more: Any) -> dict[str, Any]:
    return post(running.base_url, "/v1/chat/completions", chat(1, 2, **more))


def test_replicas_answer_as_one_server(replicas: Replicas, alone: RunningServer) -> None:
    for path, body in REQUESTS:
        found = post(replicas.base_url, path, body)
        assert found["choices"] == post(alone.base_url, path, body)["choices"]
    shares = [each["share"] for each in replicas.facts()["replicas"]]
    assert all("GPU" in str(share) for share in shares), shares


def test_a_killed_replica_comes_back(replicas: Replicas) -> None:
    before = replicas.pids()
    os.kill(before[0], signal.SIGKILL)
    for number in range(20):
        assert ask(replicas, seed=number, temperature=1.0)["choices"]
    replicas.wait_for(lambda: replicas.states() == ["up", "up"], START_S)
    assert replicas.pids()[0] != before[0]
    assert replicas.pids()[1] == before[1]


def test_replicas_are_restarted_one_by_one(replicas: Replicas) -> None:
    before = replicas.pids()
    answer = httpx.post(
        f"{replicas.base_url}/restart", json={"settings": {"max_sequences": 8}}, timeout=120
    )
    assert answer.status_code == 200, answer.text
    while replicas.facts()["roll"]["state"] == "rolling":
        assert ask(replicas, temperature=0.5)["choices"]
    roll = replicas.facts()["roll"]
    assert roll["state"] == "done", roll
    assert not set(before) & set(replicas.pids())


def test_more_replicas_than_gpus(default_model_path: Path, tmp_path: Path) -> None:
    server: dict[str, object] = {"replicas": torch.cuda.device_count() + 1}
    running = RunningServer(default_model_path, tmp_path, server, ENGINE)
    assert running.process.wait(120) == 2
    assert "GPUs; this process sees" in running.log
