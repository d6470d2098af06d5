"""Time to the first token of a long prefix: computed, found in memory, and loaded from disk after a
restart; and what keeping blocks on disk costs.

    python benchmarks/prefix_disk.py [--rounds 5] [--tokens 2000] [--folder DIR]

Two servers at a time would share the cores, so they follow each other: each round starts a server
with an empty folder and asks for a prefix (computed), asks again with another ending (in memory),
stops it, starts it again and asks once more (from disk), and again after the files' pages were
dropped from memory (cold). The cost of writing is a fixed batch of
requests with and without `--prefix-disk`, in turns. Every answer is compared with the first one's.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import shutil
import socket
import statistics
import subprocess
import sys
import tempfile
import threading
import time
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

WAIT_S = 120.0


@contextmanager
def server(*flags: str) -> Iterator[str]:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    command = [str(Path(sys.executable).with_name("headrace")), "serve", "--port", str(port)]
    process = subprocess.Popen([*command, *flags], stderr=subprocess.DEVNULL)
    url = f"http://127.0.0.1:{port}"
    try:
        until = time.perf_counter() + WAIT_S
        while time.perf_counter() < until:
            try:
                with urllib.request.urlopen(f"{url}/ready"):
                    break
            except OSError:
                if process.poll() is not None:
                    raise SystemExit(f"the server ended with {process.returncode}") from None
                time.sleep(0.02)
        ask(url, [1, 2, 3])  # what is done once
        yield url
    finally:
        process.terminate()
        process.wait()


def ask(url: str, ids: list[int], tokens: int = 1) -> tuple[float, str, int]:
    """Seconds until the whole answer, its text, and how many prompt tokens were cached."""
    body = {"prompt": ids, "max_tokens": tokens, "temperature": 0, "ignore_eos": True}
    request = urllib.request.Request(
        f"{url}/v1/completions",
        json.dumps(body).encode(),
        {"Content-Type": "application/json"},
    )
    began = time.perf_counter()
    with urllib.request.urlopen(request, timeout=WAIT_S) as reply:
        found = json.load(reply)
    taken = time.perf_counter() - began
    cached = (found["usage"].get("prompt_tokens_details") or {}).get("cached_tokens", 0)
    return taken, found["choices"][0]["text"], cached


def metric(url: str, name: str) -> float:
    with urllib.request.urlopen(f"{url}/metrics") as reply:
        lines = reply.read().decode().splitlines()
    return sum(float(line.rsplit(" ", 1)[1]) for line in lines if line.startswith(name))


def drop_page_cache(folder: Path) -> None:
    """Of these files alone: dropping everybody's needs more rights, and slows a server's start."""
    os.sync()
    for path in folder.rglob("*.kv"):
        descriptor = os.open(path, os.O_RDONLY)
        os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
        os.close(descriptor)


def first_token_times(rounds: int, tokens: int, folder: Path) -> None:
    rng = random.Random(7)
    times: dict[str, list[float]] = {
        "computed": [], "in memory": [], "from disk": [], "from disk, cold": []
    }  # fmt: skip
    for number in range(rounds):
        shutil.rmtree(folder, ignore_errors=True)
        prefix = [rng.randrange(100, 40000) for _ in range(tokens)]
        flags = ("--prefix-disk", f"{folder},4GiB")
        with server(*flags) as url:
            taken, text, cached = ask(url, [*prefix, 5])
            assert cached == 0, cached
            times["computed"].append(taken)
            taken, again, cached = ask(url, [*prefix, 5])
            assert (again, cached) == (text, tokens // 16 * 16), cached
            times["in memory"].append(taken)
        for kind in ("from disk", "from disk, cold"):
            with server(*flags) as url:
                if kind.endswith("cold"):
                    drop_page_cache(folder)
                taken, again, cached = ask(url, [*prefix, 5])
                assert (again, cached) == (text, tokens // 16 * 16), cached
                times[kind].append(taken)
        print(f"round {number + 1}", {k: round(v[-1], 3) for k, v in times.items() if v})
    base = statistics.median(times["computed"])
    size = sum(path.stat().st_size for path in folder.rglob("*.kv"))
    print(
        f"\nTTFT of a prefix of {tokens} tokens ({size / 2**20:.1f} MiB on disk), {rounds} rounds"
    )
    print("| | median | least | most | of computing it |\n|---|---|---|---|---|")
    for kind, found in times.items():
        if found:
            middle = statistics.median(found)
            row = " | ".join(f"{1000 * each:.0f} ms" for each in (middle, min(found), max(found)))
            print(f"| {kind} | {row} | {middle / base:.3f}× |")


def writing_cost(rounds: int, folder: Path) -> None:
    """Tokens a second of 32 requests by 8 clients: 300 tokens of prompt, 64 of answer."""
    rates: dict[str, list[float]] = {"without": [], "with": []}
    written = dropped = 0.0
    for number in range(rounds):
        order = ("without", "with") if number % 2 == 0 else ("with", "without")
        for kind in order:
            shutil.rmtree(folder, ignore_errors=True)
            flags = ("--prefix-disk", f"{folder},4GiB") if kind == "with" else ()
            with server(*flags) as url:
                rates[kind].append(_load(url, seed=number))
                if kind == "with":
                    name = "headrace:prefix_disk"
                    written = metric(url, f'{name}_bytes_total{{direction="written"')
                    dropped = metric(url, f'{name}_blocks_total{{outcome="dropped"')
        print(f"round {number + 1}", {k: round(v[-1], 1) for k, v in rates.items()})
    print(f"\nTokens a second (prompt and answer), {rounds} rounds in turns; the last one wrote")
    print(f"{written / 2**20:.0f} MiB and dropped {dropped:.0f} blocks")
    print("| | median | least | most |\n|---|---|---|---|")
    for kind, found in rates.items():
        row = " | ".join(f"{each:.1f}" for each in (statistics.median(found), *_ends(found)))
        print(f"| {kind} `--prefix-disk` | {row} |")
    pairs = [w / o for w, o in zip(rates["with"], rates["without"], strict=True)]
    print(f"with / without, by round: {', '.join(f'{each:.3f}' for each in pairs)}")


def _ends(values: list[float]) -> tuple[float, float]:
    return min(values), max(values)


def _load(url: str, seed: int, clients: int = 8, each: int = 4) -> float:
    rng = random.Random(seed)
    prompts = [[rng.randrange(100, 40000) for _ in range(300)] for _ in range(clients * each)]
    began = time.perf_counter()

    def run(own: list[list[int]]) -> None:
        for prompt in own:
            ask(url, prompt, tokens=64)

    threads = [threading.Thread(target=run, args=(prompts[at::clients],)) for at in range(clients)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return len(prompts) * 364 / (time.perf_counter() - began)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--tokens", type=int, default=2000)
    parser.add_argument("--folder", type=Path, help="where to write; default: a temporary folder")
    parser.add_argument("--only", choices=["first", "writing"])
    asked = parser.parse_args()
    with tempfile.TemporaryDirectory(dir=asked.folder) as made:
        if asked.only != "writing":
            first_token_times(asked.rounds, asked.tokens, Path(made) / "disk")
        if asked.only != "first":
            writing_cost(asked.rounds, Path(made) / "disk")


if __name__ == "__main__":
    main()
