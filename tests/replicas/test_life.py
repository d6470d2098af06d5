"""From the start to the end: what is refused, what does not start, who ends with whom."""

from __future__ import annotations

import os
import signal
import sys
import threading
from pathlib import Path
from typing import Any

import httpx
import pytest
from tests.replicas.conftest import start
from typer.testing import CliRunner

from headrace.cli.commands import app


def serve(*words: str) -> Any:
    return CliRunner().invoke(app, ["serve", "--port", "0", *words])


def test_more_replicas_than_cores() -> None:
    done = serve("--replicas", "64", "--device", "cpu", "--dry-run")
    assert done.exit_code == 2
    assert "replicas is 64, and this process may use" in done.output
    assert "try:" in done.output


def test_a_dry_run_shows_the_shares() -> None:
    done = serve("--replicas", "2", "--device", "cpu", "--kv-tokens", "1024", "--dry-run")
    assert done.exit_code == 0, done.output
    assert "replica 1" in done.output
    assert "ledger of each replica" in done.output
    assert "2 x " in done.output


def test_none_starts(default_model_path: Path, tmp_path: Path) -> None:
    running = start(default_model_path, tmp_path, kv_tokens=16, context_tokens=4096)
    assert running.process.wait(60) == 2
    assert "error: A context of 4,096 tokens needs a KV pool" in running.log
    assert running.log.count("error:") == 1


def descendants(pid: int) -> list[int]:
    found = []
    for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split():
        found += [int(child), *descendants(int(child))]
    return found


def gone(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "Z"
    except FileNotFoundError:
        return True


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_nothing_outlives_a_killed_router(default_model_path: Path, tmp_path: Path) -> None:
    running = start(default_model_path, tmp_path)
    running.wait_up()
    family = descendants(running.process.pid)
    assert len(family) >= 4  # two servers and their engines
    os.kill(family[0], signal.SIGSTOP)  # it would not notice anything by itself
    running.process.kill()
    running.process.wait()
    ending = threading.Event()
    for _ in range(600):
        if all(map(gone, family)):
            return
        ending.wait(0.05)
    left = [pid for pid in family if not gone(pid)]
    for pid in left:
        os.kill(pid, signal.SIGKILL)
    raise AssertionError(f"{left} of {family} are left")


def test_a_second_signal_stops_at_once(default_model_path: Path, tmp_path: Path) -> None:
    running = start(default_model_path, tmp_path, drain_timeout_s=300)
    running.wait_up()
    family = descendants(running.process.pid)
    body = {"model": "smollm2", "prompt": "x", "max_tokens": 8000, "ignore_eos": True}
    with httpx.stream(
        "POST",
        f"{running.base_url}/v1/completions",
        json={**body, "stream": True},
        timeout=60,
    ) as answer:
        next(answer.iter_lines())
        running.process.send_signal(signal.SIGTERM)
        running.wait_for(lambda: "stopping: 1 requests running" in running.log)
        running.process.send_signal(signal.SIGTERM)
        assert running.process.wait(30) == 128 + signal.SIGTERM
    waiting = threading.Event()
    for _ in range(200):
        if all(map(gone, family)):
            break
        waiting.wait(0.05)
    assert all(map(gone, family))


KEYS = """[[keys]]
name = "Änn"
key = "sk-ann"
[[keys]]
name = "ben"
key = "sk-ben"
requests_per_minute = 2
"""


def test_keys_and_a_stop_with_one_replica(default_model_path: Path, tmp_path: Path) -> None:
    file = tmp_path / "keys.toml"
    file.write_text(KEYS)
    file.chmod(0o600)
    running = start(
        default_model_path, tmp_path, replicas=1, api_keys_file=str(file), metrics_key="ops"
    )
    running.wait_ready()

    def ask(path: str, key: str | None, body: dict[str, object] | None = None) -> httpx.Response:
        headers = {} if key is None else {"authorization": f"Bearer {key}"}
        headers["x-headrace-key"] = "%C3%84nn"  # nobody but the router may say so
        url = f"{running.base_url}{path}"
        return (
            httpx.get(url, headers=headers)
            if body is None
            else httpx.post(url, json=body, headers=headers)
        )

    body: dict[str, object] = {"model": "smollm2", "input": "Hi.", "max_output_tokens": 1}
    assert ask("/v1/responses", None, body).status_code == 401
    found = ask("/v1/responses", "sk-ann", body)
    assert found.status_code == 200
    stored = found.json()["id"]
    assert ask(f"/v1/responses/{stored}", "sk-ann").status_code == 200
    assert ask(f"/v1/responses/{stored}", "sk-ben").status_code == 404
    more = {**body, "previous_response_id": stored}
    assert ask("/v1/responses", "sk-ann", more).status_code == 200
    assert ask("/v1/responses", "sk-ben", more).status_code == 400
    assert ask("/v1/responses", "sk-ben", body).status_code == 200
    assert ask("/v1/responses", "sk-ben", body).status_code == 429
    assert ask("/replicas", "sk-ann").status_code == 401
    assert ask("/replicas", "ops").status_code == 200
    assert '"key": "\\u00c4nn"' in running.log
    refused = ask("/restart", "ops", {})
    assert refused.status_code == 409
    assert "--replicas 2" in refused.json()["error"]["message"]
    family = descendants(running.process.pid)
    body = {"model": "smollm2", "prompt": "Count:", "max_tokens": 100, "ignore_eos": True}
    with httpx.stream(
        "POST",
        f"{running.base_url}/v1/completions",
        json={**body, "stream": True},
        headers={"authorization": "Bearer sk-ann"},
        timeout=60,
    ) as answer:
        lines = answer.iter_lines()
        next(lines)
        running.process.send_signal(signal.SIGTERM)
        assert "data: [DONE]" in list(lines)  # it ends before everything stops
    assert running.process.wait(30) == 0
    assert all(map(gone, family))
