"""A real server that runs out of descriptors, and what its engine process is told."""

from __future__ import annotations

import os
import resource
import signal
import time
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import httpx
import pytest
from tests.server.conftest import RunningServer
from tests.server.raw_client import PATIENCE_S, RawClient, check_good

GET_HEALTH = b"GET /health HTTP/1.1\r\nhost: localhost\r\n\r\n"


def kill_engine(server: RunningServer) -> None:
    (pid,) = server.engine_pids()
    os.kill(pid, signal.SIGKILL)
    server.wait_for(lambda: server.engine_pids() not in ([], [pid]))


@pytest.mark.parametrize(("max_files", "connections"), [(400, 350), (4000, 1500)])
def test_a_killed_engine_comes_back_beside_hundreds_of_connections(
    start_server: Any, max_files: int, connections: int
) -> None:
    """Few descriptors, or more than select() knows."""
    server: RunningServer = start_server(
        server={"max_connections": 2000, "max_restarts": 1}, max_files=max_files
    )
    if max_files < 2000:
        assert "max_connections is lowered from 2000 to 266" in server.log
    with ExitStack() as stack:
        for number in range(connections):
            client = stack.enter_context(RawClient(server.port))
            if number % 2:
                assert client.send(GET_HEALTH).answer().status == 200
        kill_engine(server)
        server.wait_ready()
        check_good(server.port)
    assert "Traceback" not in server.log


def test_a_server_without_a_descriptor_to_accept_with_lives_on(start_server: Any) -> None:
    """It neither spins nor dies, its engine is brought back, and then all is as before."""
    server: RunningServer = start_server(server={"max_connections": 500, "max_restarts": 1})
    pid = server.process.pid
    with ExitStack() as stack:
        before = resource.prlimit(pid, resource.RLIMIT_NOFILE)
        # Of what is free now, and a few for connections: what is held back stays so.
        top = max(int(name) for name in os.listdir(f"/proc/{pid}/fd"))
        resource.prlimit(pid, resource.RLIMIT_NOFILE, (top + 20, before[1]))
        for _ in range(200):
            stack.enter_context(RawClient(server.port))
        began_s = cpu_s(pid)
        time.sleep(2)
        assert cpu_s(pid) - began_s < 1.0
        kill_engine(server)
        server.wait_for(lambda: "the engine is back" in server.log)
    server.wait_ready()
    check_good(server.port)
    assert "Traceback" not in server.log
    assert server.log.count("\n") < 200


def cpu_s(pid: int) -> float:
    fields = Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def test_the_engine_imports_nothing_from_the_current_folder_and_is_told_no_secrets(
    start_server: Any, tmp_path: Path
) -> None:
    for name in ("msgspec", "numpy", "select"):
        (tmp_path / f"{name}.py").write_text("raise SystemExit('PLANTED')\n")
    secrets = {"HEADRACE_API_KEY": "sk-secret-1", "HF_TOKEN": "sk-secret-2"}
    server: RunningServer = start_server(cwd=tmp_path, environment=secrets)
    (pid,) = server.engine_pids()
    told = Path(f"/proc/{pid}/environ").read_bytes()
    assert b"sk-secret" not in told
    assert b"PATH=" in told
    assert "PLANTED" not in server.log
    assert httpx.get(f"{server.base_url}/v1/models", timeout=PATIENCE_S).status_code == 401


def test_a_flood_of_silent_connections_is_told_in_a_few_lines(start_server: Any) -> None:
    server: RunningServer = start_server(server={"max_connections": 8})
    with ExitStack() as stack:
        for number in range(1500):
            client = stack.enter_context(RawClient(server.port))
            if number % 100 == 0:
                assert client.send(GET_HEALTH).answer().status == 200
            elif number % 2:
                client.send(b"\x16not http\r\n\r\n")
    metrics = httpx.get(f"{server.base_url}/metrics", timeout=PATIENCE_S).text
    counted = [
        line for line in metrics.splitlines() if "headrace:connections_dropped_total" in line
    ]
    assert sum(float(line.rsplit(" ", 1)[1]) for line in counted if line[0] != "#") > 1000
    assert server.log.count("refused") < 100
