"""Servers of which one computes prompts and another answers: what is asked of them, a router in
front, and a way between the two on which the first is killed."""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator
from typing import Any

import httpx
from tests.server.conftest import RunningServer

LIMIT_S = 60.0
KEY = "internal"
HEADERS = {"authorization": f"Bearer {KEY}"}
WORDS = "The river runs past the old mill and the headrace brings water to the wheel. "
SCHEMA = {"type": "object", "properties": {"river": {"type": "string"}}, "required": ["river"]}


def chat(number: int, times: int = 24, **more: Any) -> dict[str, Any]:
    """A prompt of about 400 tokens."""
    text = f"Story {number}. " + WORDS * times
    return {"messages": [{"role": "user", "content": text}], "max_tokens": 12, **more}


REQUESTS: list[tuple[str, dict[str, Any]]] = [
    ("/v1/chat/completions", chat(1, temperature=0, logprobs=True, top_logprobs=3)),
    ("/v1/chat/completions", chat(2, temperature=0.9, seed=7, n=2, logprobs=True)),
    (
        "/v1/chat/completions",
        chat(
            3,
            temperature=0,
            response_format={
                "type": "json_schema",
                "json_schema": {"name": "river", "schema": SCHEMA, "strict": True},
            },
        ),
    ),
    ("/v1/completions", {"prompt": "One. " + WORDS * 24, "max_tokens": 8, "temperature": 0}),
]


def post(url: str, path: str, body: dict[str, Any], **headers: str) -> dict[str, Any]:
    answer = httpx.post(
        url + path, json={"model": "smollm2", **body}, headers=HEADERS | headers, timeout=LIMIT_S
    )
    assert answer.status_code == 200, answer.text
    found: dict[str, Any] = answer.json()
    return found


def outcomes(server: RunningServer) -> dict[str, float]:
    text = httpx.get(f"{server.base_url}/metrics", headers=HEADERS).text
    rows = [line for line in text.splitlines() if line.startswith("headrace:handovers_total{")]
    found = {row.split('outcome="')[1].split('"')[0]: float(row.split()[-1]) for row in rows}
    return {name: count for name, count in found.items() if count}


@contextlib.contextmanager
def routing(decode: RunningServer, prefill: RunningServer) -> Iterator[str]:
    """The URL of a router in front of both."""
    command = "from headrace.cli.commands import main; main()"
    process = subprocess.Popen(
        [
            *(sys.executable, "-P", "-c", command, "route", decode.base_url, "--port", "0"),
            *("--prefill", prefill.base_url, "--internal-key-variable", "TEST_KEY"),
        ],
        stderr=subprocess.PIPE,
        text=True,
        env={**os.environ, "PYTHONUNBUFFERED": "1", "TEST_KEY": KEY},
    )
    assert process.stderr is not None
    lines = []
    for line in process.stderr:
        lines.append(line)
        if line.startswith("routing at "):
            break
    assert lines[-1].startswith("routing at"), lines
    assert any(line.startswith(f"prefill: {prefill.base_url}") for line in lines)
    rest = threading.Thread(target=process.stderr.read, daemon=True)  # or its pipe would fill
    rest.start()
    yield lines[-1].split()[2]
    process.send_signal(signal.SIGTERM)
    process.wait(30)
    rest.join()
    process.stderr.close()


@contextlib.contextmanager
def killing(port: int, pid: int, after: int | None) -> Iterator[int]:
    """A way to a giver's port that kills the giver once so many of its bytes went through; None:
    when all have. Its buffers are small, so that the rest is not under way already."""
    listener = socket.create_server(("127.0.0.1", 0))

    def carry() -> None:
        asker, _ = listener.accept()
        giver = socket.socket()
        giver.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 1 << 16)
        giver.connect(("127.0.0.1", port))

        def back() -> None:
            with contextlib.suppress(OSError):
                while data := asker.recv(1 << 16):
                    giver.sendall(data)

        threading.Thread(target=back, daemon=True).start()
        passed, is_killed = 0, False
        least = 1 << 40 if after is None else after
        with contextlib.suppress(OSError):
            while data := giver.recv(1 << 16):
                passed += len(data)
                asker.sendall(data)
                if passed >= least and not is_killed:
                    is_killed = True
                    os.kill(pid, signal.SIGKILL)
        if not is_killed:
            os.kill(pid, signal.SIGKILL)
        with contextlib.suppress(OSError):
            asker.shutdown(socket.SHUT_RDWR)  # `back` reads it, and would keep it open
        asker.close()
        giver.close()

    thread = threading.Thread(target=carry, daemon=True)
    thread.start()
    yield listener.getsockname()[1]
    thread.join(LIMIT_S)
    listener.close()
