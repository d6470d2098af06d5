"""Restarted, changed, killed and stopped under load: nobody's request fails, or runs twice."""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import httpx
import openai
import pytest
from tests.replicas.conftest import Replicas
from tests.replicas.load import Load

from headrace.weights.load import open_weights

COMMAND = (sys.executable, "-P", "-c", "from headrace.cli.commands import main; main()")


def load(replicas: Replicas) -> Load:
    return Load(f"{replicas.base_url}/v1/completions", clients=3)


def fingerprints(replicas: Replicas) -> set[str]:
    return {each["fingerprint"] for each in replicas.facts()["replicas"]}


def weights_of(replicas: Replicas) -> str:
    found = httpx.get(f"{replicas.base_url}/version").json()
    return str(found["identity"]["model"]["sampled_sha256"])


def alter(model: Path, copy: Path) -> Path:
    """Another model: one bit of one weight differs."""
    shutil.copy(model, copy)
    with contextlib.closing(open_weights(model)) as file:
        start = bytes(next(iter(file.stored.values())).data[:64])
    data = copy.read_bytes()
    at = data.index(start)
    with copy.open("r+b") as altered:
        altered.seek(at)
        altered.write(bytes([start[0] ^ 1]))
    return copy


def test_every_replica_is_restarted_under_load(replicas: Replicas) -> None:
    """Nothing fails, nothing is computed twice, and stored responses are taken along."""
    before = replicas.pids()
    client = openai.OpenAI(base_url=f"{replicas.base_url}/v1", api_key="none", max_retries=0)
    kept = [
        client.responses.create(model="smollm2", input=f"{n}: I am Ann.", max_output_tokens=2)
        for n in range(4)
    ]
    with load(replicas) as asking:
        asking.wait_for(10)
        replicas.process.send_signal(signal.SIGHUP)
        replicas.wait_for(lambda: not {*before} & {*replicas.pids()})
        replicas.wait_for(lambda: replicas.facts()["roll"]["state"] == "done")
        asking.wait_for(10)
    assert not asking.failed
    # A replica writes its line after the answer.
    replicas.wait_for(lambda: {*asking.answered} <= {*replicas.requests_served()})
    served = replicas.requests_served()
    assert {name: served[name] for name in asking.answered} == dict.fromkeys(asking.answered, 1)
    for first in kept:
        assert client.responses.retrieve(first.id).id == first.id
        more = client.responses.create(
            model="smollm2", input="Who?", previous_response_id=first.id, max_output_tokens=2
        )
        assert len(client.responses.input_items.list(more.id).data) == 3


def test_another_model(replicas: Replicas, default_model_path: Path, tmp_path: Path) -> None:
    """It stays: the tests below do not ask which model answers."""
    (before,) = fingerprints(replicas)
    other = alter(default_model_path, tmp_path / "other.gguf")
    weights = weights_of(replicas)
    with load(replicas) as asking:
        done = subprocess.run(
            [*COMMAND, "restart", replicas.base_url, "-m", str(other), "--set", "max_sequences=8"],
            capture_output=True,
            text=True,
            check=False,
        )
        asking.wait_for(5)
    assert done.returncode == 0, done.stderr
    assert "1 of 2 replicas are new, replica 2 is out" in done.stderr
    assert "all 2 replicas are new" in done.stderr
    assert not asking.failed
    (after,) = fingerprints(replicas)
    assert after != before
    assert asking.versions == {before, after}
    assert weights_of(replicas) != weights


@pytest.mark.parametrize(
    ("asked", "status", "why"),
    [
        ({"model": "/no/such/model.gguf"}, 422, "/no/such/model.gguf"),
        ({"settings": {"kv_tokens": 16, "context_tokens": 4096}}, 422, "context of 4,096"),
        ({"settings": {"port": 1}}, 400, "belongs to the router"),
        ({"modell": "x"}, 400, "modell"),
    ],
)
def test_what_can_not_work_changes_nothing(
    replicas: Replicas, asked: dict[str, object], status: int, why: str
) -> None:
    before = replicas.pids()
    answer = httpx.post(f"{replicas.base_url}/restart", json=asked, timeout=60)
    assert (answer.status_code, why in answer.json()["error"]["message"]) == (status, True)
    assert replicas.pids() == before
    assert replicas.states() == ["up", "up"]


def test_a_replica_is_killed(replicas: Replicas) -> None:
    """Answers that had not begun come from the other; another process takes its place."""
    before = replicas.pids()
    with load(replicas) as asking:
        asking.wait_for(10)
        os.kill(before[0], signal.SIGKILL)
        asking.wait_for(20)
        replicas.wait_up()
    # A stream that had begun can't be saved, and says so.
    assert all("The replica failed half-way" in each for each in asking.failed), asking.failed
    after = replicas.pids()
    assert after[0] != before[0]
    assert after[1] == before[1]


def test_a_replica_is_stopped(replicas: Replicas) -> None:
    """It is out with its heartbeat; one that stays stopped is killed, and another comes."""
    before = replicas.pids()
    with load(replicas) as asking:
        asking.wait_for(4)
        os.kill(before[1], signal.SIGSTOP)
        replicas.wait_for(lambda: replicas.states()[1] != "up")
        asking.wait_for(10)
        replicas.wait_for(lambda: replicas.pids()[1] not in (before[1], None))
        replicas.wait_up()
    assert all("half-way" in each for each in asking.failed), asking.failed
    with contextlib.suppress(ProcessLookupError):
        os.kill(before[1], 0)
        raise AssertionError("the stopped process is still there")
