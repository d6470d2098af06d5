"""A real Ray cluster on this machine, with several processes: answers, routing, a killed replica,
more and fewer replicas under load. `make test-ray` installs Ray and runs this; `make test` does
without.
"""

from __future__ import annotations

import asyncio
import json
import os
import signal
import socket
import time
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import pytest

with warnings.catch_warnings():
    warnings.simplefilter("ignore")  # Ray's own
    ray: Any = pytest.importorskip("ray", reason="needs Ray: make test-ray")
    import httpx
    from ray import serve

    from headrace.ray_serve.app import build

pytestmark = [
    pytest.mark.filterwarnings("ignore"),  # Ray's own
    pytest.mark.timeout(300),
]
LIMIT_S = 120.0  # generous: machines are shared; nothing is asserted about it
PATH = "/v1/chat/completions"
SMALL = ["--kv-tokens", "8192", "--max-sequences", "4"]


@dataclass(frozen=True, slots=True)
class Cluster:
    url: str
    replicas: Any  # a handle

    def states(self) -> dict[str, int]:
        deployment = serve.status().applications["headrace"].deployments["headrace"]
        return {str(state): n for state, n in deployment.replica_states.items()}

    def running(self) -> int:
        return self.states().get("RUNNING", 0)

    def processes(self) -> list[dict[str, Any]]:
        """Of every replica: asked until all have answered."""
        found: dict[int, dict[str, Any]] = {}

        def all_seen() -> bool:
            facts = self.replicas.processes.remote().result(timeout_s=30)
            found[facts["pid"]] = facts
            return len(found) >= self.running()

        until(all_seen)
        return list(found.values())


def until(holds: Callable[[], bool]) -> None:
    end_s = time.monotonic() + LIMIT_S
    while not holds():
        assert time.monotonic() < end_s, "it has not come to that"
        time.sleep(0.1)


@pytest.fixture(scope="module")
def cluster(default_model_path: object) -> Iterator[Cluster]:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    # More of everything than there is: what is tested is who does what, not how fast.
    ray.init(
        num_cpus=16,
        num_gpus=4,
        include_dashboard=False,
        logging_level="ERROR",
        object_store_memory=100 << 20,
    )
    serve.start(http_options={"host": "127.0.0.1", "port": port})
    settings = {
        "min_replicas": 2,
        "max_replicas": 3,
        "serve_flags": SMALL,
        "waiting_s": 0.05,
        "calm_s": 3.0,
        "interval_s": 1.0,
        "drain_s": 10.0,
    }
    serve.run(build(settings), name="headrace", route_prefix="/")
    handle = serve.get_deployment_handle("headrace", "headrace")
    yield Cluster(f"http://127.0.0.1:{port}", handle)
    serve.shutdown()
    ray.shutdown()


def asking(prompt: str, **more: Any) -> dict[str, Any]:
    message = {"role": "user", "content": prompt}
    return {"messages": [message], "max_tokens": 8, "temperature": 0, **more}


@dataclass(slots=True)
class Seen:
    """What a client saw of one answer."""

    status: int = 0
    text: str = ""
    has_first: bool = False
    is_whole: bool = False
    failure: str = ""


async def stream(client: httpx.AsyncClient, body: dict[str, Any]) -> Seen:
    seen = Seen()
    try:
        async with client.stream("POST", PATH, json={**body, "stream": True}) as answer:
            seen.status = answer.status_code
            async for line in answer.aiter_lines():
                if line.startswith("data: {"):
                    chunk = json.loads(line[6:])
                    if "error" in chunk:
                        seen.failure = chunk["error"]["message"]
                    elif chunk["choices"]:
                        seen.has_first = True
                        seen.text += chunk["choices"][0]["delta"].get("content") or ""
                elif line == "data: [DONE]":
                    seen.is_whole = True
    except httpx.HTTPError as error:
        seen.failure = repr(error)
    return seen


async def load(
    cluster: Cluster, count: int, at_once: int, during: Callable[[], Any], **more: Any
) -> list[Seen]:
    """So many streams or more, so many at one time, for as long as `during` takes: it runs in a
    thread when the first has come."""
    seen: list[Seen] = []
    numbers, is_over = iter(range(1_000_000)), asyncio.Event()
    some = asyncio.Event()
    async with httpx.AsyncClient(base_url=cluster.url, timeout=LIMIT_S) as client:

        async def one_after_the_other() -> None:
            for number in numbers:
                seen.append(await stream(client, asking(f"Count from {number}.", **more)))
                some.set()
                if number >= count and is_over.is_set():
                    return

        tasks = [asyncio.create_task(one_after_the_other()) for _ in range(at_once)]
        await some.wait()
        try:
            await asyncio.to_thread(during)
        finally:
            is_over.set()
            await asyncio.gather(*tasks)
        return seen


def test_answers_and_errors_are_the_servers(cluster: Cluster) -> None:
    client = httpx.Client(base_url=cluster.url, timeout=LIMIT_S)
    (model,) = client.get("/v1/models").json()["data"]
    long = "Name a river. " * 60  # shorter beginnings than 64 tokens are not told apart
    answers = [client.post(PATH, json=asking(long)).json() for _ in range(4)]
    assert answers[0]["model"] == model["id"]
    assert len({each["choices"][0]["message"]["content"] for each in answers}) == 1
    # The same beginning went to the same replica, which had it cached.
    cached = [each["usage"]["prompt_tokens_details"]["cached_tokens"] for each in answers]
    assert cached[0] == 0
    assert min(cached[1:]) > 0, cached
    bad = client.post(PATH, json=asking("x", max_tokens=-1))
    assert bad.status_code == 400
    assert {"message", "type", "param", "code"} <= bad.json()["error"].keys()
    hidden = client.get("/metrics")
    assert hidden.status_code == 404
    assert "There is no /metrics here" in hidden.json()["error"]["message"]
    large = client.post(PATH, content=b"x" * ((8 << 20) + 1))
    assert large.status_code == 413


def test_a_stream_comes_token_by_token(cluster: Cluster) -> None:
    parts = []
    with httpx.stream(
        "POST", cluster.url + PATH, json=asking("Count.", stream=True, max_tokens=24), timeout=60
    ) as answer:
        assert answer.headers["content-type"].startswith("text/event-stream")
        parts = list(answer.iter_raw())
    assert b"".join(parts).endswith(b"data: [DONE]\n\n")
    assert len(parts) >= 12


def test_a_replica_that_is_killed_costs_no_request_before_its_first_token(
    cluster: Cluster,
) -> None:
    until(lambda: cluster.running() >= 2)
    victims = cluster.processes()

    def kill() -> None:
        os.kill(victims[0]["pid"], signal.SIGKILL)  # Ray's worker, and its server with it
        os.kill(victims[1]["server_pid"], signal.SIGKILL)  # a server alone

    seen = asyncio.run(load(cluster, 60, 6, kill, max_tokens=16))
    for each in seen:
        # Where an answer had begun, its client hears that it broke off; all others are whole.
        assert each.status == 200, each
        assert each.is_whole or (each.has_first and "gone" in each.failure), each
    assert sum(each.is_whole for each in seen) >= 40
    with pytest.raises(ProcessLookupError):
        os.kill(victims[0]["server_pid"], 0)
    until(lambda: cluster.running() >= 2)  # Ray Serve has made new ones
    names = {each["pid"] for each in cluster.processes()}
    assert victims[0]["pid"] not in names


def test_more_replicas_under_load_and_fewer_after_it(cluster: Cluster) -> None:
    until(lambda: cluster.running() == 2)
    most = 2

    def watch() -> None:
        nonlocal most

        def has_grown() -> bool:
            nonlocal most
            most = max(most, cluster.running())
            return most == 3

        until(has_grown)

    seen = asyncio.run(load(cluster, 120, 24, watch, max_tokens=48))
    assert most == 3
    assert all(each.is_whole for each in seen), [e for e in seen if not e.is_whole]
    # One goes while requests run: none is lost.
    seen = []
    end_s = time.monotonic() + LIMIT_S
    while cluster.running() > 2 and time.monotonic() < end_s:
        seen += asyncio.run(load(cluster, 4, 1, lambda: None))
    assert cluster.running() == 2
    assert all(each.is_whole for each in seen)


def test_ranks_of_a_replica_are_on_one_node_with_their_gpus(cluster: Cluster) -> None:
    """Ray is told of four GPUs that there are not: it hands out their numbers all the same."""
    flags = [*SMALL, "--device", "cpu"]
    args = {"gpus": 2, "max_replicas": 1, "serve_flags": flags, "drain_s": 1.0}
    serve.run(build(args), name="ranks", route_prefix="/ranks")
    facts = serve.get_deployment_handle("headrace", "ranks").processes.remote().result(timeout_s=30)
    assert len(facts["gpus"].split(",")) == 2
    groups = ray.util.placement_group_table().values()
    bundles = [g["bundles"] for g in groups if g["state"] == "CREATED"]
    assert {0: {"CPU": 1.0, "GPU": 2.0}} in bundles
    serve.delete("ranks")
