"""The engine process dies, hangs, or can't start: what clients and operators see."""

from __future__ import annotations

import json
import os
import signal
import time
from collections.abc import Iterator
from typing import Any

import httpx

HANG_TIMEOUT_S = 2.0  # of the test whose one step takes longer

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


def test_a_stopped_engine_is_noticed_and_replaced(start_server: Any) -> None:
    server = start_server(server={"hang_timeout_s": 1.0})
    (pid,) = server.engine_pids()
    os.kill(pid, signal.SIGSTOP)
    assert httpx.get(f"{server.base_url}/health").status_code == 200
    server.wait_for(lambda: server.engine_pids() not in ([], [pid]))
    server.wait_ready()
    ask(server.base_url)
    assert "made no progress" in server.log


def test_requests_in_flight_get_an_error_event_and_new_ones_a_time_to_come_back(
    start_server: Any,
) -> None:
    server = start_server()
    events = stream(server.base_url, max_tokens=5000)
    next(events)
    (pid,) = server.engine_pids()
    os.kill(pid, signal.SIGKILL)
    last = list(events)[-1]
    assert last["error"]["type"] == "service_unavailable"
    assert last["error"]["status"] == 503
    refused = httpx.post(f"{server.base_url}/v1/chat/completions", json=QUESTION)
    if refused.status_code != 200:  # unless the engine was quicker
        assert refused.status_code == 503
        assert int(refused.headers["retry-after"]) >= 1
    server.wait_ready()
    ask(server.base_url)


def test_a_server_whose_engine_can_not_come_back_exits_with_an_error(start_server: Any) -> None:
    server = start_server(server={"max_restarts": 0})
    (pid,) = server.engine_pids()
    os.kill(pid, signal.SIGKILL)
    assert server.process.wait(60) == 3
    assert "was killed by signal 9" in server.log


def test_sigterm_lets_running_requests_finish_and_takes_no_new_ones(start_server: Any) -> None:
    server = start_server(server={"drain_timeout_s": 120})
    events = stream(server.base_url, max_tokens=200)
    next(events)
    server.process.send_signal(signal.SIGTERM)
    server.wait_for(lambda: httpx.get(f"{server.base_url}/ready").status_code == 503)
    refused = httpx.post(f"{server.base_url}/v1/chat/completions", json=QUESTION)
    assert refused.status_code == 503
    assert "shutting down" in refused.json()["error"]["message"]
    rest = list(events)
    assert rest[-1]["choices"][0]["finish_reason"] == "length"
    assert server.process.wait(30) == 0


def test_what_does_not_finish_in_time_is_told_so(start_server: Any) -> None:
    server = start_server(server={"drain_timeout_s": 0.3})
    events = stream(server.base_url, max_tokens=5000)
    next(events)
    server.process.send_signal(signal.SIGTERM)
    assert "shut down before" in list(events)[-1]["error"]["message"]
    assert server.process.wait(30) == 0


def test_a_second_signal_stops_at_once(start_server: Any) -> None:
    server = start_server()
    events = stream(server.base_url, max_tokens=5000)
    next(events)
    pids = server.engine_pids()
    server.process.send_signal(signal.SIGINT)
    server.wait_for(lambda: httpx.get(f"{server.base_url}/ready").status_code == 503)
    server.process.send_signal(signal.SIGINT)
    assert server.process.wait(10) == 130
    for _ in range(200):
        if not any(alive(pid) for pid in pids):
            return
        time.sleep(0.05)
    raise AssertionError("the engine outlived the server")


def test_an_engine_ends_with_its_server(start_server: Any) -> None:
    server = start_server()
    pids = server.engine_pids()
    server.process.kill()
    for _ in range(200):
        if not any(alive(pid) for pid in pids):
            return
        time.sleep(0.05)
    raise AssertionError("the engine outlived the server")


def alive(pid: int) -> bool:
    try:
        with open(f"/proc/{pid}/stat") as file:
            return file.read().rsplit(")", 1)[1].split()[0] != "Z"
    except OSError:
        return False


def stream(base_url: str, max_tokens: int) -> Iterator[dict[str, Any]]:
    """The events of a streamed answer."""
    body = {**QUESTION, "max_tokens": max_tokens, "ignore_eos": True, "stream": True}
    url = f"{base_url}/v1/chat/completions"
    with httpx.stream("POST", url, json=body, timeout=60) as reply:
        assert reply.status_code == 200
        for line in reply.iter_lines():
            if line.startswith("data: ") and line != "data: [DONE]":
                yield json.loads(line.removeprefix("data: "))


def test_a_long_step_is_not_mistaken_for_a_hang(start_server: Any) -> None:
    """One step of many tokens, on one thread, that takes longer than a hang may: the prompt grows
    until this machine needs as long. That progress is counted inside of instructions is
    tests/engine/test_watching.py's."""
    server = start_server(
        server={"hang_timeout_s": HANG_TIMEOUT_S},
        engine={"max_batch_tokens": 8192, "kv_tokens": 8192, "threads": 1},
    )
    longest_s = steps = 0.0
    for count in (400, 800, 1600, 2400):
        if longest_s > HANG_TIMEOUT_S:
            break
        before_s = compute_s(server) if steps else 0.0
        words = " ".join(f"river{count}{number}" for number in range(count))
        body = {**QUESTION, "messages": [{"role": "user", "content": words}], "max_tokens": 1}
        reply = httpx.post(f"{server.base_url}/v1/chat/completions", json=body, timeout=240)
        assert reply.status_code == 200, reply.text
        assert reply.json()["usage"]["prompt_tokens"] > 2 * count
        assert "made no progress" not in server.log
        server.wait_for(lambda seen=steps: scraped(server, "headrace:steps_total") > seen)
        now = scraped(server, "headrace:steps_total")  # twice a second
        # The mean: no step is longer than the longest.
        longest_s = (compute_s(server) - before_s) / (now - steps)
        steps = now
    # Without this nothing would be shown.
    assert longest_s > HANG_TIMEOUT_S, "this machine needs a longer prompt, or a shorter timeout"


def compute_s(server: Any) -> float:
    return scraped(server, "headrace:step_seconds_total", 'part="compute"')


def scraped(server: Any, name: str, label: str = "") -> float:
    lines = httpx.get(f"{server.base_url}/metrics").text.splitlines()
    (line,) = [line for line in lines if line.startswith(f"{name}{{") and label in line]
    return float(line.split()[-1])
