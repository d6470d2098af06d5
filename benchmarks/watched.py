"""What watching costs: tokens/s of a server, in turn with another build, and with its page open.

    python benchmarks/watched.py [--rounds 5] [--streams 16] [--tokens 128]
    git worktree add /tmp/before COMMIT  (with its compiled _native beside it)
    python benchmarks/watched.py --before /tmp/before/src

Servers take turns, each started anew: this build's, this one's while its page is open (somebody
asks /history every second, /diagnosis and /metrics every five), and another build's, where one is
given. Every stream is read as it comes. Printed are each round's tokens/s, medians, and the range
of the ratios inside a round, against the first of them.
"""

from __future__ import annotations

import argparse
import http.client
import json
import os
import socket
import statistics
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

HERE = Path(__file__).parents[1] / "src"
START_LIMIT_S = 120.0
PROMPT = "A river begins as rain, and it carries what it meets on its way to the sea. " * 6


@contextmanager
def served(source: Path) -> Iterator[int]:
    """A server of the build in that folder, on a free port."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = int(probe.getsockname()[1])
    environment = {**os.environ, "PYTHONPATH": str(source)}
    command = [sys.executable, "-c", "from headrace.cli.commands import main; main()", "serve"]
    process = subprocess.Popen(
        [*command, "--port", str(port)],
        env=environment,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
    try:
        end_s = time.monotonic() + START_LIMIT_S
        while not _is_ready(port):
            if time.monotonic() > end_s or process.poll() is not None:
                raise SystemExit(f"the server of {source} did not start")
            time.sleep(0.1)
        yield port
    finally:
        process.terminate()
        process.wait(60)


def _is_ready(port: int) -> bool:
    try:
        return _get(port, "/ready") == 200
    except OSError:
        return False


def _get(port: int, path: str) -> int:
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=30)
    try:
        connection.request("GET", path)
        reply = connection.getresponse()
        reply.read()
        return reply.status
    finally:
        connection.close()


def stream(port: int, number: int, tokens: int) -> int:
    """Output tokens of one streamed answer."""
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=120)
    body = {
        "model": "smollm2-135m-instruct",
        "prompt": f"{number}. {PROMPT}",
        "max_tokens": tokens,
        "temperature": 0.7,
        "seed": number,
        "ignore_eos": True,
        "stream": True,
        "stream_options": {"include_usage": True},
    }
    connection.request(
        "POST", "/v1/completions", json.dumps(body), {"Content-Type": "application/json"}
    )
    reply = connection.getresponse()
    if reply.status != 200:
        raise SystemExit(reply.read().decode())
    last = b""
    for line in reply:
        if line.startswith(b"data: {"):
            last = line
    connection.close()
    return int(json.loads(last[6:])["usage"]["completion_tokens"])


def measure(port: int, streams: int, requests: int, tokens: int) -> float:
    """Output tokens a second, of so many streams that take the next request when one is over."""
    numbers = iter(range(requests))
    lock, found = threading.Lock(), list[int]()

    def work() -> None:
        while True:
            with lock:
                number = next(numbers, None)
            if number is None:
                return
            found.append(stream(port, number, tokens))

    threads = [threading.Thread(target=work) for _ in range(streams)]
    began_s = time.monotonic()
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return sum(found) / (time.monotonic() - began_s)


@contextmanager
def page_open(port: int) -> Iterator[None]:
    """What an open page, with the doctor's view, and a Prometheus ask for."""
    ended = threading.Event()

    def look() -> None:
        beat = 0
        while not ended.wait(1.0):
            beat += 1
            _get(port, f"/history?window=5m&since={time.time() - 2:.3f}")
            if beat % 5 == 0:
                _get(port, "/metrics")
                _get(port, "/diagnosis")

    thread = threading.Thread(target=look)
    thread.start()
    try:
        yield
    finally:
        ended.set()
        thread.join()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--before", type=Path, help="another build's src folder")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--streams", type=int, default=16)
    parser.add_argument("--requests", type=int, default=48)
    parser.add_argument("--tokens", type=int, default=128)
    args = parser.parse_args()
    kinds = {"now": HERE, "now, page open": HERE}
    if args.before is not None:
        kinds = {"before": args.before, **kinds}
    found: dict[str, list[float]] = {name: [] for name in kinds}
    for number in range(args.rounds):
        at = number % len(kinds)  # no one is always first
        names = [*kinds][at:] + [*kinds][:at]
        for name in names:
            with served(kinds[name]) as port:
                measure(port, args.streams, args.streams, 16)  # warm
                if name == "now, page open":
                    with page_open(port):
                        rate = measure(port, args.streams, args.requests, args.tokens)
                else:
                    rate = measure(port, args.streams, args.requests, args.tokens)
            found[name].append(rate)
            print(f"round {number + 1}, {name}: {rate:.1f} tokens/s", flush=True)
    first = next(iter(found))
    for name, rates in found.items():
        ratios = [rate / base for rate, base in zip(rates, found[first], strict=True)]
        print(
            f"{name}: median {statistics.median(rates):.1f} tokens/s ({min(rates):.1f} to "
            f"{max(rates):.1f}); against {first!r} {statistics.median(ratios):.3f} "
            f"({min(ratios):.3f} to {max(ratios):.3f})"
        )


if __name__ == "__main__":
    main()
