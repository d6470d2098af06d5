"""From `headrace run` to the first character of its answer, and the memory it took.

    python benchmarks/startup.py [--rounds 5]

The model must be cached (`headrace models pull`).
"""

from __future__ import annotations

import argparse
import os
import statistics
import subprocess
import sys
import time
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


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--rounds", type=int, default=5)
    rounds = [measure() for _ in range(parser.parse_args().rounds)]
    for name, values, unit in (
        ("first token", [r[0] for r in rounds], "s"),
        ("whole answer", [r[1] for r in rounds], "s"),
        ("resident memory", [r[2] / 1e6 for r in rounds], "MB"),
    ):
        print(
            f"{name:16} median {statistics.median(values):.2f} {unit}  "
            f"(min {min(values):.2f}, max {max(values):.2f}, {len(values)} rounds)"
        )


if __name__ == "__main__":
    main()
