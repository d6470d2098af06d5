"""From a naive loop to a serving engine, one change at a time, on this machine.

    python benchmarks/journey.py [--requests 24] [--rounds 3] [--threads 2] [--json FILE]

The same work at every stop: requests that begin with the same 256 tokens, have 16 to 64 tokens of
their own and want 16 to 64, all there at once. Useful output tokens a second, medians of the
rounds; rounds go through all stops in turn, so that a machine that slows down slows all of them.
The stops:

one by one   transformers' generate, one request after the other (float32)
static       transformers' generate on padded batches; a batch takes as long as its longest answer
continuous   Headrace on the same float32 weights: requests join and leave at every step
prefix       and the shared beginning is computed once
quantized    and weights of 4 bits (the GGUF that the float32 ones were made from)
speculative  and `--speculate auto`: guesses are checked in the step, as many as pay

Needs torch and transformers, and the default model on this machine.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from batching import Job, new_engine, request, run_all
from headrace.assemble import Assembled, assemble
from headrace.fetch.resolve import resolve_model
from headrace.weights.files.gguf import GgufFile
from headrace.weights.load import open_weights
from quantized_copies import write_copy

SHARED, OWN, OUTPUT = 256, (16, 64), (16, 64)
BATCH = 8
_SIZES: dict[str, Any] = {"kv_tokens": 32_768, "max_sequences": 64}


def make_jobs(count: int, vocab_size: int) -> list[Job]:
    chooser = random.Random(0)
    low = min(1000, vocab_size // 4)  # no special tokens

    def ids(number: int) -> list[int]:
        return [chooser.randrange(low, vocab_size) for _ in range(number)]

    shared = ids(SHARED)
    return [
        Job(shared + ids(chooser.randint(*OWN)), chooser.randint(*OUTPUT)) for _ in range(count)
    ]


class Transformers:
    """generate(), as it is called in most first versions."""

    def __init__(self, folder: Path, threads: int) -> None:
        import torch
        from transformers import AutoModelForCausalLM

        torch.set_num_threads(threads)
        self._torch = torch
        self._model: Any = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
        self._model.eval()

    def run(self, jobs: list[Job], batch: int) -> None:
        torch = self._torch
        for at in range(0, len(jobs), batch):
            some = jobs[at : at + batch]
            longest = max(len(job.prompt) for job in some)
            wanted = max(job.output_tokens for job in some)
            rows = [[0] * (longest - len(job.prompt)) + job.prompt for job in some]
            mask = [[0] * (longest - len(job.prompt)) + [1] * len(job.prompt) for job in some]
            with torch.no_grad():
                found = self._model.generate(
                    torch.tensor(rows), attention_mask=torch.tensor(mask), do_sample=False,
                    max_new_tokens=wanted, min_new_tokens=wanted, pad_token_id=0,
                )  # fmt: skip
            assert found.shape[1] == longest + wanted


def engine_run(assembled: Assembled, jobs: list[Job], *, prefix_cache: bool) -> None:
    """A new engine, whose prefix cache is empty."""
    engine = new_engine(assembled, prefix_cache=prefix_cache, speculator=assembled.speculator)
    run_all(engine, [request(i, job.prompt, job.output_tokens) for i, job in enumerate(jobs)])


@contextmanager
def stops(
    gguf: Path, threads: int, jobs_of: Callable[[int], list[Job]]
) -> Iterator[dict[str, Any]]:
    with tempfile.TemporaryDirectory() as folder:
        source = open_weights(gguf)
        if not isinstance(source, GgufFile):
            raise SystemExit(f"{gguf} is no GGUF file; expected the default model.")
        floats = write_copy(source, Path(folder) / "float", "float")
        source.close()
        naive = Transformers(floats, threads)
        plain = assemble(str(floats), threads=threads, **_SIZES)
        packed = assemble(str(gguf), threads=threads, **_SIZES)
        guessing = assemble(str(gguf), threads=threads, speculate="auto", **_SIZES)
        jobs = jobs_of(plain.spec.vocab_size)
        yield {
            "jobs": jobs,
            "one by one": lambda: naive.run(jobs, 1),
            "static": lambda: naive.run(jobs, BATCH),
            "continuous": lambda: engine_run(plain, jobs, prefix_cache=False),
            "prefix": lambda: engine_run(plain, jobs, prefix_cache=True),
            "quantized": lambda: engine_run(packed, jobs, prefix_cache=True),
            "speculative": lambda: engine_run(guessing, jobs, prefix_cache=True),
        }


def measure(gguf: Path, requests: int, rounds: int, threads: int) -> dict[str, list[float]]:
    """Useful output tokens a second of each stop, for each round."""
    with stops(gguf, threads, lambda vocabulary: make_jobs(requests, vocabulary)) as made:
        jobs: list[Job] = made.pop("jobs")
        useful = sum(job.output_tokens for job in jobs)
        rates: dict[str, list[float]] = {name: [] for name in made}
        for number in range(rounds):
            for name, run in made.items():
                began, began_cpu = time.perf_counter(), time.process_time()
                run()
                took_s = time.perf_counter() - began
                cores = (time.process_time() - began_cpu) / took_s  # fewer than threads: disturbed
                rates[name].append(useful / took_s)
                print(f"round {number + 1}, {name}: {useful / took_s:.1f} tokens/s on {cores:.2f} "
                      "cores", file=sys.stderr, flush=True)  # fmt: skip
    return rates


def show(rates: dict[str, list[float]]) -> None:
    print(f"{'':<12}{'tokens/s':>10}{'of rounds':>18}{'gain':>8}{'in all':>9}")
    before = first = statistics.median(next(iter(rates.values())))
    for name, values in rates.items():
        now = statistics.median(values)
        spread = f"{min(values):.1f} to {max(values):.1f}"
        print(f"{name:<12}{now:>10.1f}{spread:>18}{now / before:>7.2f}x{now / first:>8.2f}x")
        before = now


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--requests", type=int, default=24)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--threads", type=int, default=os.cpu_count() or 1)
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    print(f"{os.cpu_count()} cores, load {os.getloadavg()[0]:.1f} before the start")
    rates = measure(resolve_model(None, offline=True), args.requests, args.rounds, args.threads)
    show(rates)
    if args.json is not None:
        args.json.write_text(json.dumps(rates, indent=2) + "\n")


if __name__ == "__main__":
    main()
