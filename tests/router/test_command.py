"""`headrace route`: flags that can't work, and a whole process that starts, routes and drains."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import sys
from pathlib import Path
from typing import Any

import pytest
from tests.router import fakes
from tests.router.fakes import FakeReplica, ask, get
from typer.testing import CliRunner

from headrace.cli.commands import app


@pytest.mark.parametrize(
    ("words", "why"),
    [
        ([], "No replica is given"),
        (["ftp://a"], "not a URL"),
        (["http://a:1", "http://a:1"], "given twice"),
        (["http://a:1", "--version", "b=http://b:1:1"], "URLs and --version"),
        (["--version", "a=http://a:1:-1"], "weight of version 'a' is -1"),
        (["--version", "a=http://a:1:0", "--version", "b=http://b:1:0"], "All weights are 0"),
        (["http://a:1", "--shadow", "b=http://b:1:2"], "share of shadow 'b' is 2"),
        (["--discover", "dns:a"], "expected dns:NAME:PORT"),
        (["http://a:1", "--heartbeat", "0"], "--heartbeat is 0"),
        (["http://a:1", "--bound", "0.5"], "--bound is 0.5"),
        (["http://a:1", "--max-body", "x"], "max_body"),
        (["http://a:1", "--internal-key-variable", "NO_SUCH"], "$NO_SUCH is not set"),
        (["--routes", "/no/such.toml"], "can't be read"),
    ],
)
def test_what_can_not_work(words: list[str], why: str) -> None:
    done = CliRunner().invoke(app, ["route", *words])
    assert done.exit_code == 2
    assert why in done.output
    assert "try:" in done.output


def test_a_router_from_start_to_end(tmp_path: Path) -> None:
    async def main() -> None:
        one, two = FakeReplica("one", fingerprint="hr-1"), FakeReplica("two", fingerprint="hr-1")
        await one.start()
        await two.start()
        dead = "http://127.0.0.1:9"
        router = await asyncio.create_subprocess_exec(
            *(sys.executable, "-P", "-c", "from headrace.cli.commands import main; main()"),
            *("route", one.url, two.url, dead, "--port", "0"),
            stderr=asyncio.subprocess.PIPE,
            env={**os.environ, "PYTHONUNBUFFERED": "1"},
        )
        assert router.stderr is not None
        lines: list[str] = []
        while not lines or not lines[-1].startswith("routing at"):
            lines.append((await router.stderr.readline()).decode())
            assert lines[-1], lines
        assert any(f"{dead}  out: " in line for line in lines)
        port = int(lines[-1].split(" ")[2].rpartition(":")[2])
        assert (await ask(port)).status == 200
        await drained(router, port, one, two)
        assert await router.wait() == 0
        one.kill()
        two.kill()
        await asyncio.sleep(0)

    async def drained(router: Any, port: int, *replicas: FakeReplica) -> None:
        """A request that runs is answered; the process then ends."""
        for replica in replicas:
            replica.behave = late
        running = asyncio.create_task(ask(port))
        began = [asyncio.create_task(replica.began.wait()) for replica in replicas]
        await asyncio.wait(began, return_when=asyncio.FIRST_COMPLETED)
        for task in began:
            task.cancel()
        router.send_signal(signal.SIGTERM)
        while True:
            with contextlib.suppress(ConnectionError):  # opened before, and closed as idle
                if (await get(port, "/ready")).status == 503:
                    break
            await asyncio.sleep(0.01)
        assert (await ask(port)).status == 503
        for replica in replicas:
            replica.go.set()
        found = await running
        assert (found.status, found.is_whole) == (200, True)

    async def late(replica: FakeReplica, got: Any, writer: asyncio.StreamWriter) -> None:
        await fakes.hang(replica, got, writer)
        await fakes.answer(replica, got, writer)

    asyncio.run(asyncio.wait_for(main(), 60))
