"""Whole servers with the default model: prompts computed by one, answers by another, a router in
front. The answers are those of one process, also if the first is killed half-way."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from tests.server.conftest import RunningServer, StartServer
from tests.server.handover.servers import (
    HEADERS,
    KEY,
    LIMIT_S,
    REQUESTS,
    chat,
    killing,
    outcomes,
    post,
    routing,
)


@pytest.fixture(scope="module")
def prefill(start_server: StartServer) -> RunningServer:
    return start_server({"role": "prefill", "api_key": KEY})


@pytest.fixture(scope="module")
def decode(start_server: StartServer) -> RunningServer:
    return start_server({"role": "decode", "api_key": KEY}, {"kv_tokens": 8192})


@pytest.fixture(scope="module")
def router(prefill: RunningServer, decode: RunningServer) -> Iterator[str]:
    with routing(decode, prefill) as url:
        yield url


def test_the_same_answers_as_one_server(
    server: RunningServer, decode: RunningServer, router: str
) -> None:
    for path, body in REQUESTS:
        apart, whole = post(router, path, body), post(server.base_url, path, body)
        assert apart["choices"] == whole["choices"]
        assert apart["usage"]["prompt_tokens"] == whole["usage"]["prompt_tokens"]
        cached = apart["usage"]["prompt_tokens_details"]["cached_tokens"]
        assert 0 < apart["usage"]["prompt_tokens"] - cached <= 16
    decode.wait_for(lambda: outcomes(decode) == {"whole": len(REQUESTS)})
    text = httpx.get(f"{router}/metrics").text
    assert 'headrace_router_prefill_requests_total{replica="' in text
    # A client can't say where blocks come from: its header is dropped.
    again = chat(8, temperature=0)
    found = post(router, "/v1/chat/completions", again, **{"x-headrace-prefill": "127.0.0.1:9"})
    assert found["usage"]["prompt_tokens_details"]["cached_tokens"] > 300
    assert "unreachable" not in outcomes(decode)


def test_who_may_ask_where_blocks_are(prefill: RunningServer, decode: RunningServer) -> None:
    assert httpx.get(f"{prefill.base_url}/handover").status_code == 401
    found = httpx.get(f"{prefill.base_url}/handover", headers=HEADERS).json()
    other = httpx.get(f"{decode.base_url}/handover", headers=HEADERS).json()
    assert (found["role"], other["role"]) == ("prefill", "decode")
    assert found["host"] == "127.0.0.1"
    assert found["port"]
    assert other["port"] is None
    assert found["fingerprint"] == other["fingerprint"]  # though the pools differ


# After so many bytes, and what the engine that answers counts.
KILLS: list[tuple[int | None, str]] = [(1, "cut"), (4_500_000, "cut"), (None, "whole")]


def wait_for_outcome(server: RunningServer, cause: str, count: float) -> None:
    server.wait_for(lambda: outcomes(server).get(cause, 0) == count)


def wait_for_another(server: RunningServer, pid: int) -> None:
    server.wait_for(lambda: server.engine_pids() not in ([], [pid]))


def test_the_prefill_engine_is_killed(
    start_server: StartServer, server: RunningServer, decode: RunningServer
) -> None:
    """During the greeting, in the middle of the blocks, and afterwards: the same answer, and the
    server that answers says what happened."""
    prefill = start_server({"role": "prefill", "api_key": KEY})
    facts: dict[str, Any] = {}

    def is_back() -> bool:
        answer = httpx.get(f"{prefill.base_url}/handover", headers=HEADERS)
        ready = httpx.get(f"{prefill.base_url}/ready").status_code == 200
        facts.update(answer.json() if ready and answer.status_code == 200 else {})
        return ready and prefill.engine_pids() != []

    path = "/v1/chat/completions"
    for number, (after, cause) in enumerate(KILLS):
        prefill.wait_for(is_back)
        (pid,) = prefill.engine_pids()
        before = outcomes(decode).get(cause, 0)
        body = chat(20 + number, 32, temperature=0.8, seed=number, logprobs=True, top_logprobs=1)
        with killing(facts["port"], pid, after) as port:
            place = {"x-headrace-prefill": f"127.0.0.1:{port}"}
            found = post(decode.base_url, path, body, **place)
        assert found["choices"] == post(server.base_url, path, body)["choices"]
        cached = found["usage"]["prompt_tokens_details"]["cached_tokens"]
        if after is None:
            assert found["usage"]["prompt_tokens"] - cached <= 16
        else:
            # A piece of 11 blocks has 4 MB; the template's beginning may be here already.
            assert (cached >= 11 * 16) == (after > 1)
        wait_for_outcome(decode, cause, before + 1)
        wait_for_another(prefill, pid)


@pytest.mark.parametrize(
    ("flags", "why"),
    [
        (["--role", "prefill"], "without --api-key"),
        (["--role", "decode", "--api-key", "k", "--no-prefix-cache"], "prefix cache is off"),
        (["--role", "other"], "other"),
        (
            ["--role", "prefill", "--api-key", "k", "--handover-host", "192.0.2.1"],
            "Hand-overs can't be offered at 192.0.2.1",
        ),
    ],
)
def test_roles_that_can_not_work(default_model_path: Path, flags: list[str], why: str) -> None:
    command = "from headrace.cli.commands import main; main()"
    done = subprocess.run(
        [
            sys.executable,
            "-P",
            "-c",
            command,
            "serve",
            str(default_model_path),
            "--port",
            "0",
            "--kv-tokens",
            "512",
            "--context-tokens",
            "256",
            *flags,
        ],
        capture_output=True,
        text=True,
        timeout=LIMIT_S,
        check=False,
    )
    assert done.returncode == 2
    assert why in done.stderr
