"""Headrace on a local Ray cluster: what the way through Ray Serve costs, a killed replica, scaling.

    PYTHONPATH=src build/ray/bin/python benchmarks/ray_serve.py cost|kill|scale

`cost` asks one server straight and a cluster of one replica, in turn. `kill` kills a replica's
worker and another one's server while streams run, again and again. `scale` sends a burst to one to
three replicas. Needs Ray (`make test-ray` installs it). Counts are bounded; loopback only.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import signal
import socket
import statistics
import time
from collections.abc import Callable
from typing import Any

import httpx

PATH = "/v1/chat/completions"
LIMIT_S = 120.0


async def stream(client: httpx.AsyncClient, prompt: str, tokens: int) -> dict[str, Any]:
    body = {
        "messages": [{"role": "user", "content": prompt}],
        "max_tokens": tokens,
        "temperature": 0,
        "stream": True,
        "ignore_eos": True,
    }
    seen: dict[str, Any] = {"times": [], "whole": False, "failure": "", "status": 0}
    began_s = time.perf_counter()
    try:
        async with client.stream("POST", PATH, json=body) as answer:
            seen["status"] = answer.status_code
            async for line in answer.aiter_lines():
                if line.startswith("data: {"):
                    chunk = json.loads(line[6:])
                    if "error" in chunk:
                        seen["failure"] = chunk["error"]["message"]
                    elif chunk["choices"] and chunk["choices"][0]["delta"].get("content"):
                        seen["times"].append(time.perf_counter() - began_s)
                elif line == "data: [DONE]":
                    seen["whole"] = True
    except httpx.HTTPError as error:
        seen["failure"] = repr(error)
    return seen


async def load(
    url: str, count: int, at_once: int, tokens: int, words: int = 20, tag: str = ""
) -> list[dict[str, Any]]:
    gate = asyncio.Semaphore(at_once)
    limits = httpx.Limits(max_connections=at_once, max_keepalive_connections=at_once)
    async with httpx.AsyncClient(base_url=url, timeout=LIMIT_S, limits=limits) as client:

        async def one(number: int) -> dict[str, Any]:
            async with gate:
                return await stream(client, f"{tag}{number} " + "river " * words, tokens)

        return list(await asyncio.gather(*map(one, range(count))))


def summary(answers: list[dict[str, Any]]) -> str:
    firsts = sorted(each["times"][0] * 1e3 for each in answers if each["times"])
    gaps = sorted(
        (b - a) * 1e3
        for each in answers
        for a, b in zip(each["times"], each["times"][1:], strict=False)
    )

    def at(values: list[float], share: float) -> float:
        return values[min(len(values) - 1, int(share * len(values)))]

    return (
        f"TTFT p50 {statistics.median(firsts):.1f} p99 {at(firsts, 0.99):.1f} ms, "
        f"gap p50 {statistics.median(gaps):.1f} p99 {at(gaps, 0.99):.1f} ms, n={len(answers)}, "
        f"whole {sum(each['whole'] for each in answers)}"
    )


def cluster(settings: dict[str, Any]) -> str:
    import ray
    from ray import serve

    from headrace.ray_serve.app import build

    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    ray.init(
        num_cpus=16,
        include_dashboard=False,
        logging_level="ERROR",
        log_to_driver=False,
        object_store_memory=100 << 20,
    )
    serve.start(
        http_options={"host": "127.0.0.1", "port": port}, logging_config={"log_level": "ERROR"}
    )
    serve.run(build(settings), name="headrace", route_prefix="/")
    return f"http://127.0.0.1:{port}"


def running() -> int:
    from ray import serve

    states = serve.status().applications["headrace"].deployments["headrace"].replica_states
    return int({str(state): n for state, n in states.items()}.get("RUNNING", 0))


async def straight(words: list[str]) -> Any:
    from headrace.ray_serve.child import Child

    return await Child.start(words, LIMIT_S)


def cost() -> None:
    flags = ["--kv-tokens", "16384"]
    url = cluster({"max_replicas": 1, "serve_flags": flags})

    async def turns() -> None:
        child = await straight(["serve", "--log-format", "json", "--threads", "1", *flags])
        direct = f"http://127.0.0.1:{child.port}"
        for at_once, count in ((1, 30), (8, 64)):
            for turn in range(3):
                for name, where in (("direct", direct), ("ray", url)):
                    answers = await load(where, count, at_once, 16, tag=f"{turn}{at_once}")
                    print(f"{name:6} streams {at_once} turn {turn}: {summary(answers)}", flush=True)
        await child.stop(10.0)

    asyncio.run(turns())


def kill(rounds: int = 4) -> None:
    from ray import serve

    url = cluster(
        {
            "min_replicas": 3,
            "max_replicas": 3,
            "serve_flags": ["--kv-tokens", "16384"],
            "drain_s": 5,
        }
    )
    handle = serve.get_deployment_handle("headrace", "headrace")

    def all_processes() -> list[dict[str, Any]]:
        found: dict[int, dict[str, Any]] = {}
        end_s = time.monotonic() + LIMIT_S
        while len(found) < running() and time.monotonic() < end_s:
            facts = handle.processes.remote().result(timeout_s=30)
            found[facts["pid"]] = facts
        return list(found.values())

    async def during(act: Callable[[], None]) -> list[dict[str, Any]]:
        asked = asyncio.create_task(load(url, 60, 6, 16, tag=str(time.time())))
        await asyncio.sleep(1.0)
        await asyncio.to_thread(act)
        return await asked

    total: dict[str, int] = {"asked": 0, "whole": 0, "broken after the first token": 0, "failed": 0}
    for turn in range(rounds):
        victims = all_processes()
        which = "pid" if turn % 2 == 0 else "server_pid"
        answers = asyncio.run(during(lambda v=victims, w=which: os.kill(v[0][w], signal.SIGKILL)))  # type: ignore[misc]
        began_s = time.monotonic()
        while running() < 3 and time.monotonic() - began_s < LIMIT_S:
            time.sleep(0.2)
        broken = [a for a in answers if not a["whole"] and a["times"]]
        failed = [a for a in answers if not a["whole"] and not a["times"]]
        print(
            f"killed {which}: whole {sum(a['whole'] for a in answers)}, broken after the first "
            f"token {len(broken)}, failed before it {len(failed)} {failed[:2]}; three again "
            f"{time.monotonic() - began_s:.1f} s after the load",
            flush=True,
        )
        total["asked"] += len(answers)
        total["whole"] += sum(a["whole"] for a in answers)
        total["broken after the first token"] += len(broken)
        total["failed"] += len(failed)
    print(total, flush=True)


def scale() -> None:
    url = cluster(
        {
            "min_replicas": 1,
            "max_replicas": 3,
            "serve_flags": ["--kv-tokens", "16384", "--max-sequences", "8"],
            "calm_s": 10.0,
            "interval_s": 1.0,
            "drain_s": 10.0,
        }
    )
    began_s = time.monotonic()
    line: list[tuple[float, int]] = []

    def watch() -> None:
        now = running()
        if not line or line[-1][1] != now:
            line.append((time.monotonic() - began_s, now))

    async def burst() -> list[dict[str, Any]]:
        asked = asyncio.create_task(load(url, 160, 32, 32, words=100, tag=str(time.time())))
        while not asked.done():
            await asyncio.to_thread(watch)
            await asyncio.sleep(0.2)
        return await asked

    answers = asyncio.run(burst())
    print(f"burst: {summary(answers)}", flush=True)
    ended_s = time.monotonic() - began_s
    light = []
    while running() > 1 and time.monotonic() - began_s < ended_s + 90:
        light += asyncio.run(load(url, 2, 1, 8, tag=str(time.time())))
        watch()
    watch()
    print(f"after it: whole {sum(a['whole'] for a in light)} of {len(light)}", flush=True)
    print("replicas:", ", ".join(f"{n} at {at_s:.0f} s" for at_s, n in line), flush=True)
    print(f"the burst ended at {ended_s:.0f} s", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("what", choices=("cost", "kill", "scale"))
    what = parser.parse_args().what
    {"cost": cost, "kill": kill, "scale": scale}[what]()
    import ray
    from ray import serve

    serve.shutdown()
    ray.shutdown()


if __name__ == "__main__":
    main()
