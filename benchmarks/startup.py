"""From `headrace run` to the first character of its answer, and the memory it took; from
`headrace serve` until /ready says so.

    python benchmarks/startup.py [--rounds 5]

The model must be cached (`headrace models pull`).
"""

from __future__ import annotations

import argparse
import os
import socket
import statistics
import subprocess
import sys
import time
import urllib.request
from pathlib import Path

PROMPT = "What is 2+2?"


def measure() -> tuple[float, float, int]:
    """Seconds to the first byte, seconds to the end, the most resident bytes."""
    command = [str(Path(sys.executable).with_name("headrace")), "run", PROMPT, "--temperature", "0"]
    began = time.perf_counter()
    process = subprocess.Popen(command, stdout=subprocess.PIPE)
    assert process.stdout is not None
    if not os.read(process.stdout.fileno(), 1):
        raise SystemExit("headrace run gave no answer")
    first = time.perf_counter() - began
    while os.read(process.stdout.fileno(), 4096):
        pass
    _, status, usage = os.wait4(process.pid, 0)
    if status:
        raise SystemExit(f"headrace run ended with status {status}")
    process.stdout.close()
    return first, time.perf_counter() - began, usage.ru_maxrss * 1024


def measure_serve() -> float:
    """Seconds until a server takes requests."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    command = [str(Path(sys.executable).with_name("headrace")), "serve", "--port", str(port)]
    began = time.perf_counter()
    process = subprocess.Popen(command, stderr=subprocess.DEVNULL)
    try:
        while time.perf_counter() - began < 60:
            try:
                with urllib.request.urlopen(f"http://127.0.0.1:{port}/ready"):
                    return time.perf_counter() - began
            except OSError:
                time.sleep(0.01)
        raise SystemExit("the server did not get ready within 60 s")
    finally:
        process.terminate()
        process.wait()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--rounds", type=int, default=5)
    count = parser.parse_args().rounds
    rounds = [measure() for _ in range(count)]
    for name, values, unit in (
        ("first token", [r[0] for r in rounds], "s"),
        ("whole answer", [r[1] for r in rounds], "s"),
        ("resident memory", [r[2] / 1e6 for r in rounds], "MB"),
        ("server ready", [measure_serve() for _ in range(count)], "s"),
    ):
        print(
            f"{name:16} median {statistics.median(values):.2f} {unit}  "
            f"(min {min(values):.2f}, max {max(values):.2f}, {len(values)} rounds)"
        )


if __name__ == "__main__":
    main()
