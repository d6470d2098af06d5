"""The engine's side of the conversation: JSON lines in on stdin, JSON lines out on the real stdout.

Standard library only, and no engine: each adapter gives `answer_requests` an object whose methods
are the operations. Whatever an engine prints goes to stderr, so that it can't garble an answer.
"""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
import tempfile
import time
import traceback
import urllib.error
import urllib.request
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

Answer = dict[str, Any]
Operation = Callable[..., Answer]


def answer_requests(operations: Mapping[str, Operation]) -> None:
    """Until stdin ends. An operation that raises is an answer too; a crash is none, and the other
    side sees that."""
    answers = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)
    for line in sys.stdin:
        asked: dict[str, Any] = json.loads(line)
        try:
            answer = operations[asked.pop("op")](**asked)
        except Exception as error:
            traceback.print_exc()
            answer = {"error": f"{type(error).__name__}: {error}"}
        answers.write(json.dumps(answer) + "\n")


def run_adapter(engine: Any) -> None:
    """The whole life of the adapter of an engine that has a server of its own."""
    names = ("load", "prefill", "decode", "serve")
    try:
        answer_requests({name: getattr(engine, name) for name in names})
    finally:
        engine.stop()


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


class HttpServer:
    """A server process of an engine, waited for until it says that it is ready."""

    def __init__(
        self,
        command: list[str],
        port: int,
        ready_path: str,
        *,
        env: Mapping[str, str] | None = None,
        timeout_s: float = 270,  # less than the other side waits: it should hear why
        log: Path | None = None,  # what it prints is kept here; by default nowhere
    ) -> None:
        self.port = port
        self._log = (
            tempfile.TemporaryFile("w+", errors="replace")  # noqa: SIM115 (closed by stop)
            if log is None
            else log.open("w+", errors="replace")
        )
        self._process = subprocess.Popen(
            command, stdout=self._log, stderr=self._log, env={**os.environ, **(env or {})}
        )
        deadline = time.monotonic() + timeout_s
        while not self._ready(ready_path):
            if self._process.poll() is not None:
                why = f"status {self._process.returncode}: {self._last_words()}"
                self.stop()
                raise RuntimeError(f"the server ended with {why}")
            if time.monotonic() > deadline:
                self.stop()
                raise RuntimeError(f"the server was not ready within {timeout_s:g} s")
            time.sleep(0.2)

    def _ready(self, path: str) -> bool:
        try:
            with urllib.request.urlopen(f"http://127.0.0.1:{self.port}{path}", timeout=5):
                return True
        except (OSError, urllib.error.HTTPError):
            return False

    def _last_words(self) -> str:
        """The last line that speaks of an error, or else the last one."""
        self._log.seek(0)
        lines = [line.strip() for line in self._log.read().splitlines() if line.strip()]
        errors = [line for line in lines if "rror:" in line]
        return (errors or lines or ["it said nothing"])[-1]

    def stop(self) -> None:
        self._process.terminate()
        try:
            self._process.wait(20)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        self._log.close()
