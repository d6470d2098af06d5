"""What HTTP costs: the same workload through `LLM.generate` in process and through a server.

    python benchmarks/served.py [--concurrency 16] [--requests 64] [--rounds 3] [--json FILE]

Each round runs the workload in process (all prompts at once, as many sequences at a time as there
are clients), then served whole, then served streamed: 128-token prompts of their own, 64 tokens
out, greedy. Clients are plain sockets in one process, light on purpose: they run on the machine
that they measure. Output tokens a second, medians, and the ratio to in process.
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
    def __init__(self, sequences: int, kv_tokens: int = 16384) -> None:
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            self.port: int = probe.getsockname()[1]
        run = "from headrace.cli.commands import main; main()"
        command = [sys.executable, "-c", run, "serve"]
        flags = ["--port", str(self.port), "--max-sequences", str(sequences)]
        self._process = subprocess.Popen(
            [*command, *flags, "--kv-tokens", str(kv_tokens), "--log-level", "warning"],
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
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
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
    parser.add_argument("--requests", type=int, default=64)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    rates: dict[str, list[float]] = {"in process": [], "served": [], "streamed": []}
    for number in range(options.rounds + 1):  # the first warms up
        # Each in its turn has the machine to itself: an idle model takes no time, only memory.
        with LLM(max_sequences=options.concurrency, kv_tokens=16384) as llm:
            vocab_size = llm.spec.vocab_size
            prompts = make_prompts(options.requests, vocab_size, number)
            found = {"in process": in_process(llm, prompts)}
        server = Server(options.concurrency)
        try:
            for name, stream in (("served", False), ("streamed", True)):
                # Prompts of their own: the prefix cache must not help.
                own = make_prompts(options.requests, vocab_size, 1000 + 2 * number + stream)
                found[name] = asyncio.run(served(server.port, own, options.concurrency, stream))
        finally:
            server.stop()
        print({name: round(rate, 1) for name, rate in found.items()}, flush=True)
        for name, rate in found.items():
            if number:
                rates[name].append(rate)
    base = statistics.median(rates["in process"])
    report: dict[str, Any] = {}
    for name, values in rates.items():
        median = statistics.median(values)
        report[name] = {"tokens_per_s": values, "median": median, "ratio": median / base}
        spread = f"{min(values):.0f}-{max(values):.0f}"
        print(f"{name:12} {median:8.1f} tok/s  ({spread})  {median / base:.3f}x of in process")
    if options.json:
        options.json.write_text(json.dumps(report, indent=2))


if __name__ == "__main__":
    main()
