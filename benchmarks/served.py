"""What HTTP costs: the same workload through `LLM.generate` in process and through a server.

    python benchmarks/served.py [--concurrency 16] [--requests 48] [--rounds 8] [--json FILE]

Each round runs the workload in process (all prompts at once, as many sequences at a time as there
are clients), served whole, and served streamed: 128-token prompts of their own, 64 tokens out,
greedy. Clients are plain sockets in one process, light on purpose: they run where they
measure. Output tokens a second, and the median over rounds of the ratio to in process.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import random
import socket
import statistics
import subprocess
import sys
import time
import urllib.request
from pathlib import Path
from typing import Any

from headrace import LLM, SamplingParams

PROMPT_TOKENS, OUTPUT_TOKENS = 128, 64


def make_prompts(count: int, vocab_size: int, seed: int) -> list[list[int]]:
    chooser = random.Random(seed)
    return [
        [chooser.randrange(100, vocab_size) for _ in range(PROMPT_TOKENS)] for _ in range(count)
    ]


def in_process(llm: LLM, prompts: list[list[int]]) -> float:
    params = SamplingParams(temperature=0, max_tokens=OUTPUT_TOKENS, ignore_eos=True)
    began = time.perf_counter()
    outputs = llm.generate(prompts, params)
    taken_s = time.perf_counter() - began
    assert all(len(o.outputs[0].token_ids) == OUTPUT_TOKENS for o in outputs)
    return len(prompts) * OUTPUT_TOKENS / taken_s


class Server:
    def __init__(self, sequences: int, kv_tokens: int = 16384, *more: str) -> None:
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            self.port: int = probe.getsockname()[1]
        run = "from headrace.cli.commands import main; main()"
        command = [sys.executable, "-c", run, "serve"]
        flags = ["--port", str(self.port), "--max-sequences", str(sequences)]
        self._process = subprocess.Popen(
            [*command, *flags, "--kv-tokens", str(kv_tokens), "--log-level", "warning", *more],
            env=os.environ,
        )
        for _ in range(600):
            try:
                with urllib.request.urlopen(f"http://127.0.0.1:{self.port}/ready"):
                    return
            except OSError:
                time.sleep(0.1)
        raise SystemExit("the server did not get ready within 60 s")

    @property
    def pid(self) -> int:
        return self._process.pid

    def stop(self) -> None:
        self._process.terminate()
        self._process.wait(60)


async def ask(port: int, prompt: list[int], stream: bool) -> int:
    """One request; how many tokens came."""
    body = json.dumps(
        {
            "prompt": prompt,
            "max_tokens": OUTPUT_TOKENS,
            "temperature": 0,
            "ignore_eos": True,
            "stream": stream,
            **({"stream_options": {"include_usage": True}} if stream else {}),
        }
    ).encode()
    head = (
        "POST /v1/completions HTTP/1.1\r\nHost: 127.0.0.1\r\nConnection: close\r\n"
        f"Content-Type: application/json\r\nContent-Length: {len(body)}\r\n\r\n"
    )
    sock = socket.socket()
    # Woken up when much has come, or all: it is the server that is measured here.
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVLOWAT, 1 << 16)
    sock.setblocking(False)
    await asyncio.get_running_loop().sock_connect(sock, ("127.0.0.1", port))
    reader, writer = await asyncio.open_connection(sock=sock)
    writer.write(head.encode() + body)
    reply = await reader.read()
    writer.close()
    marker = b'"completion_tokens":'
    at = reply.rindex(marker) + len(marker)
    return int(reply[at : at + 10].split(b",")[0].split(b"}")[0])


async def served(port: int, prompts: list[list[int]], concurrency: int, stream: bool) -> float:
    waiting = iter(prompts)

    async def client() -> int:
        return sum([await ask(port, prompt, stream) for prompt in waiting])

    began = time.perf_counter()
    tokens = sum(await asyncio.gather(*(client() for _ in range(concurrency))))
    taken_s = time.perf_counter() - began
    assert tokens == len(prompts) * OUTPUT_TOKENS, f"{tokens} tokens came"
    return tokens / taken_s


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0] if __doc__ else None)
    parser.add_argument("--concurrency", type=int, default=16)
    parser.add_argument("--requests", type=int, default=48)
    parser.add_argument("--rounds", type=int, default=8)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    rates: dict[str, list[float]] = {name: [] for name in NAMES}
    server = Server(options.concurrency)
    with LLM(max_sequences=options.concurrency, kv_tokens=16384) as llm:
        try:
            for number in range(options.rounds + 1):  # the first warms up
                found = one_round(llm, server.port, number, options.requests, options.concurrency)
                print({name: round(rate, 1) for name, rate in found.items()}, flush=True)
                for name, rate in found.items() if number else ():
                    rates[name].append(rate)
        finally:
            server.stop()
    report: dict[str, Any] = {}
    for name, values in rates.items():
        # Of each round by itself: the machine is another one a minute later.
        ratios = [rate / base for rate, base in zip(values, rates["in process"], strict=True)]
        report[name] = {"tokens_per_s": values, "ratios": ratios}
        median, ratio = statistics.median(values), statistics.median(ratios)
        spread = f"{min(values):.0f}-{max(values):.0f}"
        print(
            f"{name:12} {median:8.1f} tok/s ({spread}); of in process, by rounds: {ratio:.3f} "
            f"({min(ratios):.2f}-{max(ratios):.2f})"
        )
    if options.json:
        options.json.write_text(json.dumps(report, indent=2))


NAMES = ("in process", "served", "streamed")


def one_round(
    llm: LLM, port: int, number: int, requests: int, concurrency: int
) -> dict[str, float]:
    """Each in its turn, in another order every time; an idle model takes memory, no time."""
    found: dict[str, float] = {}
    for place in range(3):
        name = NAMES[(place + number) % 3]
        # Prompts of their own: the prefix cache must not help.
        prompts = make_prompts(requests, llm.spec.vocab_size, 3 * number + place)
        if name == "in process":
            found[name] = in_process(llm, prompts)
        else:
            found[name] = asyncio.run(served(port, prompts, concurrency, name == "streamed"))
    return found


if __name__ == "__main__":
    main()
