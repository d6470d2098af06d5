"""What the policy `prefix` is worth: shared prompts on small real replicas, beside round robin.

    python benchmarks/routed_prefixes.py [--replicas 4] [--prefixes 16] [--requests 192]
    python benchmarks/routed_prefixes.py --prefixes 0      # nothing shared: prefix, least-pending
    python benchmarks/routed_prefixes.py --replicas 2 --prefixes 8 --policies nginx sglang-router \
        LiteLLM prefix --sglang ENV/bin/python --litellm ENV/bin/litellm --nginx PATH

Each replica is a Headrace of the default model whose KV pool holds a few of the prefixes, not all;
all pools together hold them. Requests of all prefixes come mixed, the same in every round; between
rounds the replicas are started anew, and each prefix is asked for once before the count begins.
In the place of a policy other routers may stand, with their defaults (routed_peers.py).
Counted are the prompt tokens that came from a cache, as the answers' usage has them, the time to
the first token, and the time of all.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import random
import statistics
import subprocess
import sys
import tempfile
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from headrace.calibrate.client import Server
from routed_peers import free_port, litellm_words, nginx_words, sglang_words

MODEL = "smollm2-135m-instruct"
# A folder, the port to listen at, the replicas' ports: a command.
WordsOf = Callable[[Path, int, list[int]], list[str]]
Peers = dict[str, WordsOf]

_ROUTE = "from headrace.cli.commands import main; main()"
_WORDS = [
    "river",
    "stone",
    "lamp",
    "paper",
    "cloud",
    "garden",
    "window",
    "bridge",
    "copper",
    "wheel",
]


@dataclass(frozen=True)
class Heard:
    ttft_s: float
    prompt_tokens: int
    cached_tokens: int


@contextlib.contextmanager
def fleet(replicas: int, kv_tokens: int, policy: str, peers: Peers) -> Iterator[int]:
    """The router's port."""
    with contextlib.ExitStack() as stack:
        flags = ["--threads", "1", "--kv-tokens", str(kv_tokens), "--context-tokens", "2048"]
        ports = [stack.enter_context(Server(None, flags)).port for _ in range(replicas)]
        if policy in peers:
            yield stack.enter_context(peer(peers[policy], ports))
            return
        words = [sys.executable, "-c", _ROUTE, "route", *(f":{port}" for port in ports)]
        router = subprocess.Popen(
            [*words, "--port", "0", "--policy", policy, "--heartbeat", "5"],
            stderr=subprocess.PIPE,
            text=True,
        )
        stack.callback(router.wait)
        stack.callback(router.terminate)
        assert router.stderr is not None
        lines = iter(router.stderr.readline, "")
        ready = next((line for line in lines if line.startswith("routing at")), None)
        if ready is None:
            raise SystemExit("the router did not start")
        threading.Thread(target=lambda: [None for _ in lines], daemon=True).start()
        yield int(ready.split(" ")[2].rpartition(":")[2])


@contextlib.contextmanager
def peer(words_of: WordsOf, ports: list[int]) -> Iterator[int]:
    """Another router in front of the same replicas, once it passes an answer on."""
    with tempfile.TemporaryDirectory() as folder, open(Path(folder) / "log", "w+b") as log:
        port = free_port()
        process = subprocess.Popen(
            words_of(Path(folder), port, ports), stdout=log, stderr=subprocess.STDOUT
        )
        try:
            end_s = time.monotonic() + 90
            while True:
                try:
                    ask(port, "Hello.")
                    break
                except urllib.error.HTTPError as error:
                    why = f"{error}: {error.read()[:500]!r}"
                except OSError as error:
                    why = str(error)
                if process.poll() is not None or time.monotonic() > end_s:
                    log.seek(0)
                    raise SystemExit(f"{why}\n{log.read()[-2000:].decode()}")
                time.sleep(0.3)
            yield port
        finally:
            process.terminate()
            process.wait()


def prompts(prefixes: int, requests: int, words: int) -> list[str]:
    chance = random.Random(7)
    if not prefixes:
        return [" ".join(chance.choices(_WORDS, k=words)) for _ in range(requests)]
    shared = [" ".join(chance.choices(_WORDS, k=words)) for _ in range(prefixes)]
    return [f"{chance.choice(shared)} Question {number}?" for number in range(requests)]


def ask(port: int, prompt: str) -> Heard:
    body = {
        "model": MODEL,
        "messages": [{"role": "user", "content": prompt}],
        "max_tokens": 4,
        "stream": True,
        "stream_options": {"include_usage": True},
    }
    request = urllib.request.Request(
        f"http://127.0.0.1:{port}/v1/chat/completions",
        json.dumps(body).encode(),
        {"Content-Type": "application/json"},
    )
    began_s, first_s = time.perf_counter(), 0.0
    usage: dict[str, Any] = {}
    with urllib.request.urlopen(request, timeout=300) as answer:
        for line in answer:
            if not line.startswith(b"data: {"):
                continue
            event = json.loads(line[6:])
            usage = event.get("usage") or usage
            choices = event.get("choices") or [{}]
            if not first_s and choices[0].get("delta", {}).get("content"):
                first_s = time.perf_counter()
    details = usage.get("prompt_tokens_details") or {}
    return Heard(
        (first_s or time.perf_counter()) - began_s,
        usage["prompt_tokens"],
        details.get("cached_tokens", 0),
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--replicas", type=int, default=4)
    parser.add_argument("--prefixes", type=int, default=16)
    parser.add_argument("--requests", type=int, default=192)
    parser.add_argument("--words", type=int, default=500, help="of a prefix")
    parser.add_argument("--kv-tokens", type=int, default=3072, help="of a replica")
    parser.add_argument("--concurrency", type=int, default=4)
    parser.add_argument("--policies", nargs="+", help="the first is what the last is compared with")
    parser.add_argument("--sglang", help="a Python that has sglang-router")
    parser.add_argument("--litellm", help="the program litellm")
    parser.add_argument("--nginx", help="the program nginx")
    asked = parser.parse_args()
    peers: Peers = {}
    if asked.nginx:
        peers["nginx"] = partial(nginx_words, asked.nginx)
    if asked.sglang:
        peers["sglang-router"] = lambda _, port, ports: sglang_words(asked.sglang, port, ports)
    if asked.litellm:
        peers["LiteLLM"] = partial(litellm_words, asked.litellm, model=MODEL)
    texts = prompts(asked.prefixes, asked.requests, asked.words)
    firsts = {text.partition(" Question")[0]: text for text in reversed(texts)}
    warm = [f"{text} (first)" for text in firsts.values()] if asked.prefixes else []
    found = []
    policies = asked.policies or ["round-robin", "least-pending", "prefix"][not asked.prefixes :]
    for policy in policies:
        with (
            fleet(asked.replicas, asked.kv_tokens, policy, peers) as port,
            ThreadPoolExecutor(asked.concurrency) as pool,
        ):
            list(pool.map(lambda text: ask(port, text), warm))
            began_s = time.perf_counter()
            heard = list(pool.map(lambda text: ask(port, text), texts))
            wall_s = time.perf_counter() - began_s
        times = sorted(each.ttft_s for each in heard)
        hits = sum(each.cached_tokens for each in heard) / sum(each.prompt_tokens for each in heard)
        p50, p95 = statistics.median(times), times[int(0.95 * len(times))]
        found.append((hits, p50, p95, wall_s))
        print(
            f"{policy}: {hits:.1%} of prompt tokens cached; TTFT p50 {p50:.3f} s, p95 {p95:.3f} s; "
            f"all in {wall_s:.1f} s",
            flush=True,
        )
    one, two = found[0], found[-1]
    more = f"hits {two[0] / one[0]:.2f}x, " if one[0] else ""
    print(
        f"{policies[-1]} against {policies[0]}: {more}TTFT p50 {two[1] / one[1]:.2f}x, p95 "
        f"{two[2] / one[2]:.2f}x, time of all {two[3] / one[3]:.2f}x"
    )


if __name__ == "__main__":
    main()
