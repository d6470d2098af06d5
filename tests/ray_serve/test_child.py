"""A replica's own server, without Ray: a real process, and what goes through it."""

from __future__ import annotations

import asyncio
import json
import os
import signal
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import pytest

from headrace.policies.routing import Wanted
from headrace.ray_serve.child import Child, Head, ReplicaError
from headrace.ray_serve.replica import Begun, HeadraceReplica, Sent
from headrace.ray_serve.settings import RaySettings

LIMIT_S = 120.0  # generous: machines are shared
BODY = {
    "messages": [{"role": "user", "content": "Name a river."}],
    "max_tokens": 8,
    "temperature": 0,
}
POST = b"POST /v1/chat/completions HTTP/1.1\r\ncontent-type: application/json\r\n"


@asynccontextmanager
async def running(*flags: str) -> AsyncIterator[HeadraceReplica]:
    settings = RaySettings(serve_flags=("--kv-tokens", "4096", *flags), start_s=LIMIT_S, drain_s=5)
    replica = HeadraceReplica()
    await replica.start(settings.plain())
    try:
        yield replica
    finally:
        await replica.close()


async def answer(replica: HeadraceReplica, **more: object) -> tuple[Begun, list[bytes]]:
    body = json.dumps({**BODY, **more}).encode()
    begun, *rest = [
        part async for part in replica.answer(Sent(wanted=Wanted(prompt_tokens=1)), POST, body)
    ]
    assert isinstance(begun, Begun)
    return begun, rest


def test_a_real_server(default_model_path: object) -> None:
    async def ask() -> None:
        async with running("--slo", "ttft=100s") as replica:
            await replica.check_health()
            begun, rest = await answer(replica)
            assert (begun.status, begun.is_whole, rest) == (200, True, [])
            text = json.loads(begun.body)["choices"][0]["message"]["content"]
            # A stream begins with its first bytes, and goes on as it came.
            begun, rest = await answer(replica, stream=True)
            assert (begun.status, begun.is_whole) == (200, False)
            assert ("content-type", "text/event-stream") in [
                (name, value.partition(";")[0]) for name, value in begun.headers
            ]
            events = b"".join([begun.body, *rest]).split(b"\n\n")
            chunks = [json.loads(e[6:]) for e in events if e.startswith(b"data: {")]
            deltas = [c["choices"][0]["delta"].get("content", "") for c in chunks if c["choices"]]
            assert "".join(deltas) == text
            assert len(rest) >= 4  # token by token: nothing waits for more
            # An error is an answer too, in OpenAI's shape.
            begun, _ = await answer(replica, max_tokens=-1)
            assert begun.status == 400
            assert "max_tokens" in json.loads(begun.body)["error"]["message"]
            # What the autoscaler reads; /metrics is closed to all others.
            stats = await replica.record_autoscaling_stats()
            while len(stats) < 3:  # until the engine has told how full it is
                await asyncio.sleep(0.1)
                stats = await replica.record_autoscaling_stats()
            assert stats.keys() == {"pending_prefill_s", "saturation", "headroom"}
            assert stats["pending_prefill_s"] == 0.0
            get = b"GET /metrics HTTP/1.1\r\n"
            heads = [p async for p in replica._child.ask(get) if isinstance(p, Head)]
            assert heads[0].status == 401
            # It is gone: Ray hears of it.
            os.kill(replica._child.pid, signal.SIGKILL)
            while replica._child.is_running:
                await asyncio.sleep(0.01)
            with pytest.raises(ReplicaError, match="has ended"):
                await replica.check_health()

    asyncio.run(asyncio.wait_for(ask(), LIMIT_S))


def test_a_server_that_cant_start_says_why() -> None:
    async def start() -> None:
        await Child.start(["serve", "no-such-model", "--log-format", "json"], LIMIT_S)

    with pytest.raises(ReplicaError, match=r"ended with 2.*no-such-model"):
        asyncio.run(start())
