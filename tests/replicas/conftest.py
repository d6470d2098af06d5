"""A server with two replicas of the default model, in processes of its own."""

from __future__ import annotations

import json
import os
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from tests.server.conftest import RunningServer

SMALL: dict[str, object] = {"kv_tokens": 8192, "max_sequences": 16}


class Replicas(RunningServer):
    def facts(self) -> dict[str, Any]:
        found: dict[str, Any] = httpx.get(f"{self.base_url}/replicas").json()
        return found

    def pids(self) -> list[int]:
        return [each["pid"] for each in self.facts()["replicas"]]

    def states(self) -> list[str]:
        return [str(each.get("state")) for each in self.facts()["replicas"]]

    def wait_up(self) -> None:
        self.wait_for(lambda: self.states() == ["up", "up"])

    def roll(self, **asked: object) -> dict[str, Any]:
        """Restarts them all; returns how it ended."""
        answer = httpx.post(f"{self.base_url}/restart", json=asked, timeout=60)
        assert answer.status_code == 200, answer.text
        self.wait_for(lambda: self.facts()["roll"]["state"] != "rolling")
        found: dict[str, Any] = self.facts()["roll"]
        return found

    def requests_served(self) -> Counter[str]:
        """By the id that their client gave, as the replicas' own log has them."""
        found: Counter[str] = Counter()
        for line in self.log.splitlines():
            if line.startswith("{") and '"event": "request"' in line:
                record = json.loads(line)
                if record["status"] == 200:
                    found[record["request_id"]] += 1
        return found


def start(model: Path, folder: Path, **settings: object) -> Replicas:
    server = {"replicas": 2, "log_format": "json", **SMALL, **settings}
    return Replicas(model, folder, server, {})


@pytest.fixture(scope="session")
def replicas(
    default_model_path: Path, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Replicas]:
    """Shared by many tests. Leave it as it was found."""
    if len(os.sched_getaffinity(0)) < 2:
        pytest.skip("needs two cores")
    running = start(default_model_path, tmp_path_factory.mktemp("replicas"), hang_timeout_s=3)
    running.wait_up()
    yield running
    assert running.stop() == 0
