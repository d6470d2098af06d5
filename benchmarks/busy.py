"""Decode speed of one stream on a machine that does other things too.

    python benchmarks/busy.py [--busy 0 2 4 8] [--threads 1 2 0] [--rounds 3] [--llama]

Starts that many processes that compute without end, and decodes beside them with each number of
threads in turn, 0 being the default; tokens over wall time, since a median step hides stalls. With
--llama, llama.cpp's batched benchmark runs in the same rounds (built by peers/environments.py when
it is not there yet). The last line of each is the default against the best fixed number of threads.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import statistics
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from headrace.assemble import Assembled, assemble
from headrace.core.step import StepPlan
from headrace.fetch.resolve import resolve_model
from peers.environments import prepare_llama_cpp
from speed import add_row, blocks_for, fill, step_s

CONTEXT_TOKENS = 128
MOST_STEPS = 4096  # of a measurement; also what the blocks are for
LLAMA_STEPS = 32


def compute_without_end() -> None:
    value = 1
    while True:
        value = value * 48271 % 2147483647


@contextmanager
def busy_processes(count: int) -> Iterator[None]:
    processes = [
        multiprocessing.Process(target=compute_without_end, daemon=True) for _ in range(count)
    ]
    for process in processes:
        process.start()
    time.sleep(0.5 if processes else 0)  # until the scheduler has spread them
    try:
        yield
    finally:
        for process in processes:
            process.kill()
            process.join()


def decode_for(model: Assembled, seconds: float) -> float:
    """Tokens a second, over wall time, of one sequence."""
    blocks = blocks_for(CONTEXT_TOKENS + MOST_STEPS)
    fill(model.runner, 0, [5] * CONTEXT_TOKENS, blocks)
    steps = 0
    began = time.perf_counter()
    while (took := time.perf_counter() - began) < seconds and steps < MOST_STEPS:
        plan = StepPlan()
        add_row(plan, 0, [7], CONTEXT_TOKENS + steps, blocks)
        step_s(model.runner, plan)
        steps += 1
    return steps / took


def llama_speed(program: Path, model: str, threads: int) -> float:
    command = [
        *(str(program), "-m", model, "-t", str(threads), "-tb", str(threads), "-fa", "on", "-pps"),
        *("-c", "1024", "-npp", str(CONTEXT_TOKENS), "-ntg", str(LLAMA_STEPS), "-npl", "1"),
        *("--output-format", "jsonl"),
    ]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    line = next(line for line in done.stdout.splitlines() if line.startswith("{"))
    return float(json.loads(line)["speed_tg"])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--model")
    parser.add_argument("--busy", type=int, nargs="+", default=[0, 2, 4, 8])
    parser.add_argument("--threads", type=int, nargs="+", default=[1, 2, 0])
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--seconds", type=float, default=6)
    parser.add_argument("--llama", action="store_true")
    args = parser.parse_args()
    names = {count: str(count) if count else "default" for count in args.threads}
    models = {
        name: assemble(
            args.model, threads=count or None, kv_tokens=CONTEXT_TOKENS + MOST_STEPS + 64
        )
        for count, name in names.items()
    }
    program = None
    if args.llama:
        prepared = prepare_llama_cpp(["llama-batched-bench"])
        program = Path(prepared.env["PEERS_LLAMA_BIN"]) / "llama-batched-bench"
    path = str(resolve_model(args.model))
    for busy in args.busy:
        found: dict[str, list[float]] = {}
        with busy_processes(busy):
            for _ in range(args.rounds):
                for name, model in models.items():
                    speed = decode_for(model, args.seconds)
                    found.setdefault(f"{name} threads", []).append(speed)
                if program is not None:
                    for threads in sorted({1, os.cpu_count() or 1}):
                        speed = llama_speed(program, path, threads)
                        found.setdefault(f"llama.cpp {threads}", []).append(speed)
        for name, speeds in found.items():
            print(
                f"{busy} busy  {name:16} {statistics.median(speeds):7.1f} tokens/s over wall time "
                f"({min(speeds):.1f} to {max(speeds):.1f})",
                flush=True,
            )
        fixed = [statistics.median(found[f"{n} threads"]) for n in names.values() if n != "default"]
        if fixed and "default threads" in found:
            share = statistics.median(found["default threads"]) / max(fixed)
            print(f"{busy} busy  default / best fixed: {share:.2f}", flush=True)


if __name__ == "__main__":
    main()
