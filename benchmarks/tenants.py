"""One key fans out, another asks a small question a second: what does the second one see?

    python benchmarks/tenants.py [--source SRC ...] [--seconds 60] [--every 1] [--json FILE]

A real server with the default model and two keys without limits. The crowd's key sends `--calls`
completions of 128 prompts × n=16 × 2,000 tokens, none of which will end; the honest one sends a
chat of 16 tokens `--every` second, whether or not the last was answered. Given are its times to the
first token and to the last, without the crowd and beside it, and how many came to nothing: refused,
or not answered by the end (these count as slower than all others). `--source` is the src folder of
a checkout, several to compare builds; default: this one's.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import httpx

from source_check import check_source

OWN_SOURCE = Path(__file__).resolve().parent.parent / "src"
CROWD, HONEST = "the-crowds-key", "the-honest-key"
PROMPTS, CONTINUATIONS, ANSWER_TOKENS = 128, 16, 2000
HONEST_TOKENS = 16
GRACE_S = 20.0  # for the last of the honest requests
SETTLE_S = 5.0  # until the crowd has all places


@dataclass(frozen=True, kw_only=True)
class Seen:
    """One honest request. None: it never came to that."""

    status: int | None
    first_s: float | None
    total_s: float | None


@dataclass(frozen=True, kw_only=True)
class Summary:
    sent: int
    answered: int
    refused: int
    first_p50_s: float
    first_p99_s: float
    total_p50_s: float
    total_p99_s: float


@contextmanager
def serving(source: Path, folder: Path) -> Iterator[str]:
    keys = folder / "keys.toml"
    keys.write_text(
        "".join(
            f'[[keys]]\nname = "{name}"\nkey = "{key}"\n'
            for name, key in (("crowd", CROWD), ("honest", HONEST))
        )
    )
    keys.chmod(0o600)
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    run = "from headrace.cli.commands import main; main()"
    flags = ["--port", str(port), "--api-keys-file", str(keys), "--kv-tokens", "32768"]
    process = subprocess.Popen(
        [
            sys.executable,
            "-c",
            run,
            "serve",
            *flags,
            "--log-level",
            "error",
            "--drain-timeout",
            "1",
        ],
        env={**os.environ, "PYTHONPATH": str(source)},
        stderr=subprocess.DEVNULL,
    )
    url = f"http://127.0.0.1:{port}"
    try:
        for _ in range(600):
            try:
                if httpx.get(f"{url}/ready").status_code == 200:
                    break
            except httpx.HTTPError:
                pass
            time.sleep(0.1)
        else:
            raise SystemExit("the server did not get ready within 60 s")
        yield url
    finally:
        process.terminate()
        process.wait(60)


async def crowd(client: httpx.AsyncClient, number: int) -> None:
    prompts = [f"Crowd {number}, prompt {i}: tell a long story." for i in range(PROMPTS)]
    body = {"prompt": prompts, "n": CONTINUATIONS, "max_tokens": ANSWER_TOKENS, "ignore_eos": True}
    reply = await client.post("/v1/completions", json=body, headers=bearer(CROWD), timeout=None)
    print(f"  the crowd was answered with {reply.status_code}: {reply.text[:200]}", flush=True)


async def ask(client: httpx.AsyncClient, number: int) -> Seen:
    body = {
        "messages": [{"role": "user", "content": f"Question {number}: what is {number} + 2?"}],
        "max_tokens": HONEST_TOKENS,
        "ignore_eos": True,
        "temperature": 0,
        "stream": True,
    }
    status = first_s = None
    began = time.perf_counter()
    try:
        async with client.stream(
            "POST", "/v1/chat/completions", json=body, headers=bearer(HONEST), timeout=None
        ) as reply:
            status = reply.status_code
            async for line in reply.aiter_lines():
                if status == 200 and first_s is None and '"content":"' in line.replace(" ", ""):
                    first_s = time.perf_counter() - began
        total_s = time.perf_counter() - began if status == 200 else None
        return Seen(status=status, first_s=first_s, total_s=total_s)
    except asyncio.CancelledError:  # the end: as far as it came
        return Seen(status=status, first_s=first_s, total_s=None)


async def ask_for(client: httpx.AsyncClient, seconds: float, every_s: float) -> list[Seen]:
    tasks = []
    for number in range(int(seconds / every_s)):
        tasks.append(asyncio.create_task(ask(client, number)))
        await asyncio.sleep(every_s)
    _, late = await asyncio.wait(tasks, timeout=GRACE_S)
    for task in late:
        task.cancel()
    return await asyncio.gather(*tasks)


async def measure(url: str, seconds: float, every_s: float, calls: int) -> dict[str, Summary]:
    limits = httpx.Limits(max_connections=1000)
    async with httpx.AsyncClient(base_url=url, limits=limits) as client:
        alone = await ask_for(client, 10 * every_s, every_s)
        attack = [asyncio.create_task(crowd(client, number)) for number in range(calls)]
        await asyncio.sleep(SETTLE_S)
        beside = await ask_for(client, seconds, every_s)
        for task in attack:
            task.cancel()
        await asyncio.gather(*attack, return_exceptions=True)
    return {"alone": summarize(alone), "beside the crowd": summarize(beside)}


def summarize(seen: list[Seen]) -> Summary:
    return Summary(
        sent=len(seen),
        answered=sum(each.total_s is not None for each in seen),
        refused=sum(each.status not in (200, None) for each in seen),
        first_p50_s=percentile([each.first_s for each in seen], 0.50),
        first_p99_s=percentile([each.first_s for each in seen], 0.99),
        total_p50_s=percentile([each.total_s for each in seen], 0.50),
        total_p99_s=percentile([each.total_s for each in seen], 0.99),
    )


def percentile(found_s: list[float | None], share: float) -> float:
    """Of all that were sent: those that came to nothing are slower than any."""
    ordered = sorted(float("inf") if each is None else each for each in found_s)
    return ordered[min(len(ordered) - 1, int(share * len(ordered)))]


def bearer(key: str) -> dict[str, str]:
    return {"authorization": f"Bearer {key}"}


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--source", type=Path, nargs="+", default=[OWN_SOURCE])
    parser.add_argument("--seconds", type=float, default=60)
    parser.add_argument("--every", type=float, default=1)
    parser.add_argument("--calls", type=int, default=2)
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    results: dict[str, Any] = {}
    for source in args.source:
        check_source(source)
    for source in args.source:
        print(source, flush=True)
        with tempfile.TemporaryDirectory() as folder, serving(source, Path(folder)) as url:
            found = asyncio.run(measure(url, args.seconds, args.every, args.calls))
        for when, each in found.items():
            print(
                f"  {when:17} {each.answered} of {each.sent} answered ({each.refused} refused)  "
                f"first token p50 {each.first_p50_s:.2f} s, p99 {each.first_p99_s:.2f} s  "
                f"whole p50 {each.total_p50_s:.2f} s, p99 {each.total_p99_s:.2f} s",
                flush=True,
            )
        results[str(source)] = {when: asdict(each) for when, each in found.items()}
    if args.json:
        args.json.write_text(json.dumps(results, indent=1))


if __name__ == "__main__":
    main()
