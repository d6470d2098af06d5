"""Whether a server's memory stays flat: many short requests, resident memory along the way.

    python benchmarks/soak.py [--requests 10000] [--concurrency 8] [--speculate auto] [--json FILE]

Chat requests of a few tokens, some streamed, some with a seed, a stop string, a schema or logprobs,
some whose answers repeat their prompt, so that tokens are guessed, some that the client leaves
early, some that are refused. Resident memory of both processes is read after 1,000 requests and
after all of them.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
import time
import urllib.request
from pathlib import Path
from typing import Any

from served import Server

FIRST = 1000
# Memory of the KV pool is resident once it was used: a small pool is, after a few hundred requests.
KV_TOKENS = 8192
WORDS = ("river", "mill", "wheel", "stone", "water", "grain")
SCHEMA = {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]}


def make_body(chooser: random.Random) -> dict[str, Any]:
    words = " ".join(chooser.choice(WORDS) for _ in range(9))
    body: dict[str, Any] = {
        "messages": [{"role": "user", "content": words}],
        "max_tokens": chooser.randint(1, 8),
    }
    kind = chooser.randrange(8)
    extras: dict[int, dict[str, Any]] = {
        0: {"stream": True},
        1: {"seed": chooser.randrange(1000)},
        2: {"stop": ["the", "\n"]},
        3: {"logprobs": True, "top_logprobs": 2},
        4: {"n": 2},
        5: {
            "response_format": {
                "type": "json_schema",
                "json_schema": {"name": "x", "schema": SCHEMA},
            }
        },
        6: {"temperature": -1},  # refused
        7: {
            "messages": [{"role": "user", "content": f"Repeat: {f'{words}. ' * 4}"}],
            "temperature": 0,
            "max_tokens": 40,
        },
    }
    return {**body, **extras.get(kind, {})}


async def ask(port: int, body: dict[str, Any], leave: bool) -> bytes:
    data = json.dumps(body).encode()
    head = (
        "POST /v1/chat/completions HTTP/1.1\r\nHost: 127.0.0.1\r\nConnection: close\r\n"
        f"Content-Type: application/json\r\nContent-Length: {len(data)}\r\n\r\n"
    )
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    writer.write(head.encode() + data)
    try:
        if leave:
            await asyncio.sleep(0.01)
            return b""
        return await reader.read()
    finally:
        writer.close()


def resident_bytes(pid: int) -> int:
    for line in Path(f"/proc/{pid}/status").read_text().splitlines():
        if line.startswith("VmRSS:"):
            return int(line.split()[1]) * 1024
    raise SystemExit(f"process {pid} has no memory: it is gone")


def processes(server: Server) -> dict[str, int]:
    children = Path(f"/proc/{server.pid}/task/{server.pid}/children").read_text().split()
    return {"http": server.pid, "engine": int(children[0])}


def guessed(server: Server) -> dict[str, float]:
    with urllib.request.urlopen(f"http://127.0.0.1:{server.port}/metrics", timeout=10) as reply:
        lines = reply.read().decode().splitlines()
    found = {}
    for name in ("draft_tokens", "accepted_tokens"):
        start = f"vllm:spec_decode_num_{name}_total"
        found[name] = sum(float(line.split()[-1]) for line in lines if line.startswith(start))
    return found


async def soak(server: Server, count: int, concurrency: int) -> list[dict[str, Any]]:
    chooser = random.Random(0)
    bodies = iter([(make_body(chooser), chooser.random() < 0.05) for _ in range(count)])
    done, statuses, samples = 0, dict[str, int](), list[dict[str, Any]]()
    pids = processes(server)

    async def client() -> None:
        nonlocal done
        for body, leave in bodies:
            reply = await ask(server.port, body, leave)
            status = reply[9:12].decode() or "left"
            statuses[status] = statuses.get(status, 0) + 1
            done += 1
            if done % 500 == 0:
                sizes = {name: resident_bytes(pid) for name, pid in pids.items()}
                samples.append({"requests": done, **sizes})
                shown = ", ".join(f"{name} {size / 1e6:.1f} MB" for name, size in sizes.items())
                print(f"{done:6} requests: {shown}", flush=True)

    await asyncio.gather(*(client() for _ in range(concurrency)))
    print("statuses:", statuses)
    return samples


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0] if __doc__ else None)
    parser.add_argument("--requests", type=int, default=10_000)
    parser.add_argument("--concurrency", type=int, default=8)
    parser.add_argument("--speculate", default="auto")
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    server = Server(options.concurrency, KV_TOKENS, "--speculate", options.speculate)
    began = time.perf_counter()
    try:
        samples = asyncio.run(soak(server, options.requests, options.concurrency))
        guesses = guessed(server)
    finally:
        server.stop()
    taken_s = time.perf_counter() - began
    first = next(s for s in samples if s["requests"] >= FIRST)
    growth = {name: samples[-1][name] / first[name] - 1 for name in ("http", "engine")}
    total = sum(samples[-1][n] for n in growth) / sum(first[n] for n in growth) - 1
    print(f"{options.requests} requests in {taken_s:.0f} s; growth since {FIRST}: {total:+.2%}")
    for name, value in growth.items():
        print(f"  {name}: {value:+.2%}")
    print(f"guessed tokens: {guesses['draft_tokens']:.0f}, right {guesses['accepted_tokens']:.0f}")
    if options.json:
        report = {"samples": samples, "growth": growth, "total": total, "seconds": taken_s}
        options.json.write_text(json.dumps({**report, "guesses": guesses}, indent=2))


if __name__ == "__main__":
    main()
