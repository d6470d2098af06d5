"""A real server with the default model, in processes of its own, for tests that speak HTTP."""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest

from headrace import LLM

START_LIMIT_S = 60.0  # generous: machines are shared; nothing is asserted about it

_COMMAND = (sys.executable, "-P", "-c", "from headrace.cli.commands import main; main()", "serve")


class RunningServer:
    """A server that a test started; `log` is what both of its processes wrote."""

    def __init__(
        self,
        model: Path,
        folder: Path,
        server: dict[str, object],
        engine: dict[str, object],
        *,
        max_files: int | None = None,
        environment: dict[str, str] | None = None,
        cwd: Path | None = None,
    ) -> None:
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            self.port: int = probe.getsockname()[1]
        self.base_url = f"http://127.0.0.1:{self.port}"
        self._log_path = folder / f"server-{self.port}.log"
        settings = {"port": self.port, **server, **engine}
        with self._log_path.open("wb") as log:
            limited = ["sh", "-c", f'ulimit -n {max_files}; exec "$@"', "sh"] if max_files else []
            self.process = subprocess.Popen(
                [
                    *limited,
                    *_COMMAND,
                    str(model),
                    *_flags({"served_model_name": "smollm2", **settings}),
                ],
                stdout=log,
                stderr=subprocess.STDOUT,
                env={**os.environ, "PYTHONUNBUFFERED": "1", **(environment or {})},
                cwd=cwd,
            )

    @property
    def log(self) -> str:
        return self._log_path.read_text(errors="replace")

    def wait_ready(self) -> None:
        self.wait_for(lambda: httpx.get(f"{self.base_url}/ready").status_code == 200)

    def wait_for(self, condition: Callable[[], bool], limit_s: float = START_LIMIT_S) -> None:
        """Until the condition holds; fails with the log if it never does."""
        end = time.monotonic() + limit_s
        while time.monotonic() < end:
            with contextlib.suppress(httpx.TransportError):
                if condition():
                    return
            if self.process.poll() is not None:
                break
            time.sleep(0.05)
        raise AssertionError(f"not within {limit_s:g} s; the server's log:\n{self.log}")

    def engine_pids(self) -> list[int]:
        """The server's children: the engine process, if there is one."""
        children = Path(f"/proc/{self.process.pid}/task/{self.process.pid}/children")
        return [int(pid) for pid in children.read_text().split()]

    def stop(self) -> int:
        if self.process.poll() is None:
            self.process.send_signal(signal.SIGTERM)
        try:
            return self.process.wait(30)
        except subprocess.TimeoutExpired:
            self.process.kill()
            raise


def _flags(settings: dict[str, object]) -> list[str]:
    flags: list[str] = []
    for name, value in settings.items():
        flag = name.replace("_", "-")
        if isinstance(value, bool):
            flags.append(f"--{flag}" if value else f"--no-{flag}")
        elif isinstance(value, list):
            flags += [part for each in value for part in (f"--{flag}", str(each))]
        else:
            flags += [f"--{flag}", str(value)]
    return flags


StartServer = Callable[..., RunningServer]


@pytest.fixture(scope="session")
def start_server(
    default_model_path: Path, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[StartServer]:
    """Starts a server with `server=` and `engine=` settings, and waits until it is ready."""
    started: list[RunningServer] = []

    def start(
        server: dict[str, object] | None = None,
        engine: dict[str, object] | None = None,
        *,
        ready: bool = True,
        **options: Any,
    ) -> RunningServer:
        folder = tmp_path_factory.mktemp("server")
        engine = {"kv_tokens": 16384, **(engine or {})}
        running = RunningServer(default_model_path, folder, server or {}, engine, **options)
        started.append(running)
        if ready:
            running.wait_ready()
        return running

    yield start
    for running in started:
        running.stop()


@pytest.fixture(scope="session")
def server(start_server: StartServer) -> RunningServer:
    """One server that many tests share. Leave it as it was found."""
    return start_server()


@pytest.fixture(scope="session")
def short(start_server: StartServer) -> RunningServer:
    """One with a context of 256 tokens, so that going beyond takes no time. Shared too."""
    return start_server(engine={"context_tokens": 256, "kv_tokens": 2048})


@pytest.fixture(scope="session")
def client(server: RunningServer) -> Iterator[openai.OpenAI]:
    """The official SDK, asking `server`."""
    with openai.OpenAI(base_url=f"{server.base_url}/v1", api_key="none", max_retries=0) as made:
        yield made


@pytest.fixture(scope="session")
def llm(default_model_path: Path) -> Iterator[LLM]:
    """The same model in this process: what a server's answers must be equal to."""
    with LLM(default_model_path, kv_tokens=16384) as model:
        yield model


@pytest.fixture(scope="session")
def strict(start_server: StartServer) -> RunningServer:
    """A server with small bounds, little patience and one request at a time, for tests that go
    beyond. Shared too."""
    return start_server(
        server={
            "client_timeout_s": 1.0,
            "max_connections": 6,
            "max_headers": 4096,
            "max_body": 65536,
            "max_waiting_requests": 2,
            "max_waiting_tokens": 4096,
            "unknown_fields": "refuse",
        },
        engine={"max_sequences": 1},
    )
