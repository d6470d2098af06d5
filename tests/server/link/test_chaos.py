"""Half a minute of many clients that misbehave while the engine is killed three times: nothing may
be left.

Afterwards every block is free, no descriptor and no memory has leaked, and the answers are those
of before, to the last bit of their logprobs.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import random
import re
import signal
import time
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import httpx

# What clients do is bounded by their own waits, not by the server: 36 of them do in 25 s what 12 do
# in a minute, some 400 requests of all kinds.
CHAOS_S = float(os.environ.get("HEADRACE_TEST_CHAOS_S", "15"))
CLIENTS = 36
KILLS = 3

PROBES: list[dict[str, Any]] = [
    {"temperature": 0},
    {"temperature": 0.9, "seed": 7},
    {"temperature": 1.2, "seed": 3, "top_p": 0.9, "n": 3},
]


def answers(base_url: str) -> list[Any]:
    """What a lone client gets: texts and logprobs."""
    found = []
    for number, extra in enumerate(PROBES):
        body = {
            "messages": [{"role": "user", "content": f"Name {number + 2} rivers."}],
            "max_tokens": 24,
            "logprobs": True,
            "top_logprobs": 3,
            **extra,
        }
        reply = httpx.post(f"{base_url}/v1/chat/completions", json=body, timeout=120)
        assert reply.status_code == 200, reply.text
        found.append([(c["message"], c["logprobs"]) for c in reply.json()["choices"]])
    return found


@contextlib.asynccontextmanager
async def sent(port: int, data: bytes) -> AsyncIterator[asyncio.StreamReader]:
    """A connection that has said `data`; dropped, read to its end or not."""
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    try:
        writer.write(data)
        yield reader
    finally:
        writer.transport.abort()
        with contextlib.suppress(OSError):
            await writer.wait_closed()


def post(body: bytes) -> bytes:
    head = (
        "POST /v1/chat/completions HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n"
        f"Content-Type: application/json\r\nContent-Length: {len(body)}\r\n\r\n"
    )
    return head.encode() + body


def good_body(chooser: random.Random, **extra: Any) -> bytes:
    words = " ".join(chooser.choice(("mill", "wheel", "stone", "river")) for _ in range(60))
    body = {
        "messages": [{"role": "user", "content": words}],
        "max_tokens": chooser.randint(1, 40),
        "n": chooser.choice((1, 1, 1, 3)),
        **extra,
    }
    return json.dumps(body).encode()


async def whole(port: int, chooser: random.Random) -> None:
    async with sent(port, post(good_body(chooser))) as reader:
        await reader.read()


async def streamed(port: int, chooser: random.Random) -> None:
    async with sent(port, post(good_body(chooser, stream=True))) as reader:
        await reader.read()


async def leaves(port: int, chooser: random.Random) -> None:
    body = good_body(chooser, stream=chooser.random() < 0.7, max_tokens=2000, ignore_eos=True)
    async with sent(port, post(body)) as reader:
        if chooser.random() < 0.5:
            await reader.read(200)
        await asyncio.sleep(chooser.random() * 0.5)


async def stops_reading(port: int, chooser: random.Random) -> None:
    body = good_body(chooser, stream=True, max_tokens=400, ignore_eos=True)
    async with sent(port, post(body)) as reader:
        await reader.read(100)
        await asyncio.sleep(chooser.uniform(1, 5))


async def garbage(port: int, chooser: random.Random) -> None:
    data = chooser.choice(
        (
            chooser.randbytes(chooser.randint(1, 2000)),
            post(b"{" * chooser.randint(1, 5000)),
            post(good_body(chooser))[: chooser.randint(1, 300)],
            post(good_body(chooser, temperature=-5)),
            post(json.dumps({"messages": [{"role": "user", "content": "\ud800"}]}).encode()),
            b"GET /nowhere HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n",
        )
    )
    async with sent(port, data) as reader:
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(chooser.uniform(0.1, 2)):
                await reader.read()


async def client(port: int, chooser: random.Random, end_s: float) -> None:
    kinds = (whole, streamed, leaves, stops_reading, garbage)
    while time.monotonic() < end_s:
        try:
            async with asyncio.timeout(20):  # one that takes longer is one more that leaves
                await chooser.choice(kinds)(port, chooser)
        except OSError:  # a timeout is one too
            await asyncio.sleep(0.05)


async def chaos(server: Any, seconds: float, kills: int, seed: int) -> None:
    end_s = time.monotonic() + seconds
    clients = [client(server.port, random.Random(seed + i), end_s) for i in range(CLIENTS)]

    async def kill() -> None:
        for _ in range(kills):
            await asyncio.sleep(seconds / (kills + 1))
            while not (pids := server.engine_pids()):  # the next one is about to be started
                await asyncio.sleep(0.05)
            for pid in pids:
                os.kill(pid, signal.SIGKILL)

    await asyncio.gather(kill(), *clients)


def used_blocks(server: Any) -> int:
    text = httpx.get(f"{server.base_url}/metrics", timeout=30).text
    found = re.search(r'^headrace:kv_blocks\{.*state="used".*\} (\S+)$', text, re.MULTILINE)
    assert found, text
    return int(float(found[1]))


def held(pid: int) -> tuple[int, int]:
    """(open descriptors, resident bytes) of a process."""
    status = Path(f"/proc/{pid}/status").read_text()
    resident = re.search(r"VmRSS:\s+(\d+) kB", status)
    assert resident
    return len(list(Path(f"/proc/{pid}/fd").iterdir())), int(resident[1]) * 1024


def settle(server: Any) -> None:
    server.wait_ready()
    server.wait_for(lambda: used_blocks(server) == 0)


def test_chaos(start_server: Any) -> None:
    server = start_server(
        server={"client_timeout_s": 3.0, "max_restarts": 10, "max_waiting_requests": 64},
        engine={"max_sequences": 8, "kv_tokens": 4096, "debug_invariants": True},
    )
    before = answers(server.base_url)
    # What a server allocates once (buffers, arenas, imports) is not a leak: warm up, kill included.
    asyncio.run(chaos(server, max(5.0, CHAOS_S / 4), 1, seed=1000))
    settle(server)
    descriptors, resident = held(server.process.pid)
    asyncio.run(chaos(server, CHAOS_S, KILLS, seed=0))
    settle(server)
    # Connections that the server has closed linger for a moment.
    server.wait_for(lambda: held(server.process.pid)[0] <= descriptors * 1.05)
    assert held(server.process.pid)[1] <= resident * 1.05
    assert answers(server.base_url) == before
    assert server.log.count("was killed by signal 9; starting another") == KILLS + 1
    assert "Traceback" not in server.log, server.log
