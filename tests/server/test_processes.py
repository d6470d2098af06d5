"""The engine process dies, hangs, or can't start: what clients and operators see."""

from __future__ import annotations

import os
import signal
from typing import Any

import httpx

QUESTION = {
    "messages": [{"role": "user", "content": "What is 2+2?"}],
    "temperature": 0,
    "max_tokens": 8,
}


def ask(base_url: str) -> str:
    reply = httpx.post(f"{base_url}/v1/chat/completions", json=QUESTION, timeout=60)
    assert reply.status_code == 200, reply.text
    content: str = reply.json()["choices"][0]["message"]["content"]
    return content


def test_a_killed_engine_comes_back_and_answers_the_same(start_server: Any) -> None:
    server = start_server()
    before = ask(server.base_url)
    (pid,) = server.engine_pids()
    os.kill(pid, signal.SIGKILL)
    server.wait_for(lambda: server.engine_pids() not in ([], [pid]))
    server.wait_ready()
    assert ask(server.base_url) == before
    assert "was killed by signal 9" in server.log
