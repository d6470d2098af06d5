"""Prompts computed by one engine, answers by another: what a hand-over takes, and what for.

    python benchmarks/handover.py times [--tokens 64 256 512 1024 2048 4000] [--rounds 5]
    python benchmarks/handover.py first [--tokens 512 2048] [--rounds 5]
    python benchmarks/handover.py gaps [--streams 4] [--long 3000] [--rounds 3]

`times`: two engines in two processes; the prompt is computed before, so that only the hand-over is
timed, over shared memory and over TCP in turn. `first`: servers and a router, the time to the first
token of a prompt that nobody has seen, straight to one server and handed over. `gaps`: streams that
run, and a long prompt beside them; the time between a stream's tokens on one server, and where
another one computes the prompt. On two cores both engines share the same cores (`--threads` splits
them): figures of latency, not of throughput.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import itertools
import json
import os
import random
import select
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator

import httpx

KEY = "benchmark"
HEADERS = {"authorization": f"Bearer {KEY}"}
_MAIN = "from headrace.cli.commands import main; main()"
LIMIT_S = 300.0


def spread(values: list[float], unit: float = 1000.0) -> str:
    low, high = min(values) * unit, max(values) * unit
    return f"{statistics.median(values) * unit:.1f} ({low:.1f}-{high:.1f})"


def tokens_of(count: int, seed: int) -> list[int]:
    chooser = random.Random(seed)
    return [chooser.randrange(1000, 40_000) for _ in range(count)]


# -- the hand-over alone ---------------------------------------------------------------------------


def give() -> None:
    """In a process of its own: an engine that gives. Says where it listens."""
    from headrace.assemble import assemble
    from headrace.core.config import EngineConfig
    from headrace.server.handover.giver import Giver
    from headrace.server.handover.session import secret_of

    assembled = assemble(None, config=EngineConfig(kv_tokens=16_384))
    engine = assembled.engine
    giver = Giver(
        engine,
        secret=secret_of(KEY),
        fingerprint="kv",
        vocab_size=assembled.spec.vocab_size,
        host="127.0.0.1",
        port=0,
    )
    print(giver.port, flush=True)
    poll = select.poll()
    poll.register(giver.waker, select.POLLIN)
    poll.register(0, select.POLLHUP)
    while not any(number == 0 for number, _ in poll.poll(0 if engine.has_work else 100)):
        giver.turn()
        if engine.has_work:
            giver.heard(engine.step())


def times(args: argparse.Namespace) -> None:
    from headrace.assemble import assemble
    from headrace.core.config import EngineConfig
    from headrace.core.request import GenerateRequest, SamplingParams
    from headrace.server.handover.session import Peer, secret_of
    from headrace.server.handover.taker import Taker

    command = [sys.executable, "-P", __file__, "give"]
    other = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    assert other.stdout is not None
    peer = Peer("127.0.0.1", int(other.stdout.readline()))
    assembled = assemble(None, config=EngineConfig(kv_tokens=16_384))
    engine = assembled.engine
    assert engine.moves is not None
    sides = {
        name: Taker(
            engine,
            secret=secret_of(KEY),
            fingerprint="kv",
            least_tokens=16,
            patience_s=LIMIT_S,
            shares=name == "shared memory",
        )
        for name in ("shared memory", "TCP")
    }
    found: dict[tuple[int, str], list[float]] = {}
    number = 0

    def hand(tokens: list[int], side: Taker) -> float:
        nonlocal number
        number += 1
        request = GenerateRequest(
            request_id=f"r{number}", prompt_token_ids=tokens, params=SamplingParams(max_tokens=1)
        )
        # Nothing of it may be here: all cached blocks are forgotten.
        for block in list(engine.blocks._cached):
            engine.blocks._cached.pop(block)
            engine.blocks._forget(block)
            engine.blocks._free.append(block)
        poll = select.poll()
        poll.register(side.waker, select.POLLIN)
        began_s = time.perf_counter()
        assert side.fetch(request, peer)
        while not side.turn():
            poll.poll(100)
        took_s = time.perf_counter() - began_s
        assert side.counts.outcomes.keys() == {"whole"}, side.counts.outcomes
        return took_s

    size, block_tokens = engine.moves.block_bytes, engine.blocks.block_tokens
    for count in args.tokens:
        tokens = tokens_of(count + 1, count)
        hand(tokens, sides["TCP"])  # computes it
        for _ in range(args.rounds):
            for name, side in sides.items():
                found.setdefault((count, name), []).append(hand(tokens, side))
    print("| tokens | MB | shared memory, ms | GB/s | TCP, ms | GB/s |\n|---|---|---|---|---|---|")
    for count in args.tokens:
        whole = count // block_tokens * size
        row = [f"{count:,}", f"{whole / 1e6:.1f}"]
        for name in sides:
            values = found[count, name]
            row += [spread(values), f"{whole / statistics.median(values) / 1e9:.2f}"]
        print("| " + " | ".join(row) + " |")
    for side in sides.values():
        side.close()
    assert other.stdin is not None
    other.stdin.close()
    other.wait(10)
    assembled.close()


# -- servers ---------------------------------------------------------------------------------------


@contextlib.contextmanager
def started(*words: str, environment: dict[str, str] | None = None) -> Iterator[str]:
    """A server or a router; its URL."""
    with tempfile.TemporaryFile("w+") as log:
        process = subprocess.Popen(
            [sys.executable, "-P", "-c", _MAIN, *words, "--port", str(port := free_port())],
            stdout=log,
            stderr=log,
            env={**os.environ, **(environment or {})},
        )
        url = f"http://127.0.0.1:{port}"
        try:
            until_s = time.monotonic() + 60
            while True:
                with contextlib.suppress(httpx.TransportError):
                    if httpx.get(f"{url}/ready").status_code == 200:
                        break
                if process.poll() is not None or time.monotonic() > until_s:
                    log.seek(0)
                    raise SystemExit(log.read())
                time.sleep(0.05)
            yield url
        finally:
            process.send_signal(signal.SIGTERM)
            process.wait(60)


def free_port() -> int:
    import socket

    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


@contextlib.contextmanager
def apart(*flags: str) -> Iterator[tuple[str, str]]:
    """A prefill server, a decode server and a router: the router's URL, and the decode server's."""
    with (
        started("serve", "--role", "prefill", "--api-key", KEY, *flags) as first,
        started("serve", "--role", "decode", "--api-key", KEY, *flags) as second,
        started(
            *("route", second, "--prefill", first, "--internal-key-variable", "BENCH_KEY"),
            environment={"BENCH_KEY": KEY},
        ) as router,
    ):
        yield router, second


async def stream(
    client: httpx.AsyncClient, url: str, tokens: list[int], answer_tokens: int
) -> list[float]:
    """When the request was sent, and when each token came."""
    body = {
        "prompt": tokens,
        "max_tokens": answer_tokens,
        "ignore_eos": True,
        "temperature": 0,
        "stream": True,
    }
    seen = [time.perf_counter()]
    async with client.stream("POST", f"{url}/v1/completions", json=body, headers=HEADERS) as answer:
        assert answer.status_code == 200, await answer.aread()
        async for line in answer.aiter_lines():
            if line.startswith("data: {") and json.loads(line[6:])["choices"]:
                seen.append(time.perf_counter())
    return seen


async def first(args: argparse.Namespace) -> None:
    found: dict[tuple[int, str], list[float]] = {}
    flags = ["--kv-tokens", "32768"]
    with apart(*flags) as (router, _), started("serve", "--api-key", KEY, *flags) as straight:
        async with httpx.AsyncClient(timeout=LIMIT_S) as client:
            ways = {"one server": straight, "handed over": router}
            for url in ways.values():
                await stream(client, url, tokens_of(300, 1), 2)
            for count in args.tokens:
                for number in range(args.rounds):
                    for name, url in ways.items():
                        tokens = tokens_of(count, 7919 * count + number)
                        seen = await stream(client, url, tokens, 2)
                        found.setdefault((count, name), []).append(seen[1] - seen[0])
    print("| prompt | one server: TTFT, ms | handed over: TTFT, ms | added |\n|---|---|---|---|")
    for count in args.tokens:
        one, two = found[count, "one server"], found[count, "handed over"]
        added = statistics.median(two) - statistics.median(one)
        share = statistics.median(two) / statistics.median(one)
        print(
            f"| {count:,} | {spread(one)} | {spread(two)} | {added * 1000:+.1f} ms ({share:.2f}x) |"
        )


async def gaps(args: argparse.Namespace) -> None:
    """Alone, then with a long prompt in the middle of the streams."""
    threads = ["--threads", str(args.threads)] if args.threads else []
    flags = ["--kv-tokens", "32768", *threads]
    found: dict[tuple[str, str], list[float]] = {}
    long_s: dict[str, list[float]] = {}
    with apart(*flags) as (router, _), started("serve", "--api-key", KEY, *flags) as straight:
        async with httpx.AsyncClient(timeout=LIMIT_S) as client:
            for number in range(args.rounds):
                for name, url in {"one server": straight, "apart": router}.items():
                    for what in ("alone", "beside a long prompt"):
                        between, first_s = await one_round(client, url, what, args, number)
                        found.setdefault((name, what), []).extend(between)
                        if first_s is not None:
                            long_s.setdefault(name, []).append(first_s)
    print("| | streams alone: gap p50 / p99, ms | beside a long prompt: p50 / p99 / worst, ms |")
    print("|---|---|---|")
    for name in ("one server", "apart"):
        alone, beside = found[name, "alone"], found[name, "beside a long prompt"]
        print(
            f"| {name} | {at(alone, 50)} / {at(alone, 99)} | {at(beside, 50)} / {at(beside, 99)} / "
            f"{max(beside) * 1000:.1f} |"
        )
    for name, values in long_s.items():
        print(f"the long prompt's first token, {name}: {spread(values)} ms")


def at(values: list[float], percent: int) -> str:
    return f"{sorted(values)[min(len(values) - 1, len(values) * percent // 100)] * 1000:.1f}"


async def one_round(
    client: httpx.AsyncClient, url: str, what: str, args: argparse.Namespace, number: int
) -> tuple[list[float], float | None]:
    """Gaps of the streams while the long prompt has no token; alone: all gaps."""
    work = [
        asyncio.create_task(stream(client, url, tokens_of(60, 100 * number + each), args.answer))
        for each in range(args.streams)
    ]
    if what == "alone":
        seen = await asyncio.gather(*work)
        return [b - a for each in seen for a, b in itertools.pairwise(each[1:])], None
    await asyncio.sleep(1.5)
    long = await stream(client, url, tokens_of(args.long, 31 * number + len(url)), 2)
    seen = await asyncio.gather(*work)
    return [
        b - a
        for each in seen
        for a, b in itertools.pairwise(each[1:])
        if b > long[0] and a < long[1]
    ], long[1] - long[0]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("what", choices=["times", "first", "gaps", "give"])
    parser.add_argument("--tokens", type=int, nargs="+", default=None)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--streams", type=int, default=4)
    parser.add_argument("--long", type=int, default=3000)
    parser.add_argument("--answer", type=int, default=300)
    parser.add_argument("--threads", type=int, default=0)
    args = parser.parse_args()
    if args.what == "give":
        give()
    elif args.what == "times":
        args.tokens = args.tokens or [64, 256, 512, 1024, 2048, 4000]
        times(args)
    else:
        args.tokens = args.tokens or [512, 2048]
        asyncio.run(first(args) if args.what == "first" else gaps(args))


if __name__ == "__main__":
    main()
