"""What paging, continuous batching and the prefix cache are worth, each against doing without.

    python benchmarks/batching.py [throughput] [memory] [prefix] [--requests 48] [--json FILE]

throughput  A mixed workload (prompt and output lengths uniform 20 to 400) with the KV memory of
            `--sequences` full-length sequences. Continuous: requests join and leave at every step,
            blocks are taken as they are needed. Static: batches of `--sequences`, the next one when
            the last answer of a batch is done; "padded" computes every row of a batch to the length
            of its longest, as frameworks do; "idle" lets finished rows go.
memory      How many sequences of that workload the pool holds at once, against reserving the
            longest possible length for each.
prefix      Time to the first token with a 400-token prefix that was seen before, against one that
            was not.
"""

from __future__ import annotations

import argparse
import json
import random
import statistics
import time
from dataclasses import dataclass
from pathlib import Path

from headrace.assemble import Assembled, assemble
from headrace.core.config import SchedulerConfig
from headrace.core.request import GenerateRequest, SamplingParams
from headrace.core.speculation import Speculator
from headrace.engine.loop import Engine

SHORTEST, LONGEST = 20, 400
FULL_LENGTH = 2 * LONGEST  # the longest prompt and the longest answer


@dataclass(frozen=True)
class Job:
    prompt: list[int]
    output_tokens: int


def make_jobs(count: int, vocab_size: int) -> list[Job]:
    chooser = random.Random(0)
    return [
        Job(
            [chooser.randrange(vocab_size) for _ in range(chooser.randint(SHORTEST, LONGEST))],
            chooser.randint(SHORTEST, LONGEST),
        )
        for _ in range(count)
    ]


def request(number: int, prompt: list[int], output_tokens: int) -> GenerateRequest:
    params = SamplingParams(temperature=0, max_tokens=output_tokens, ignore_eos=True)
    return GenerateRequest(request_id=str(number), prompt_token_ids=prompt, params=params)


def run_all(engine: Engine, requests: list[GenerateRequest]) -> int:
    """Run requests to their end; the most that ran at one time."""
    for each in requests:
        engine.add(each)
    most = 0
    while engine.has_work:
        engine.step()
        most = max(most, engine.scheduler.running_sequences)
    return most


def new_engine(
    assembled: Assembled,
    *,
    prefix_cache: bool = False,
    max_step_growth: float = 2.0,
    speculator: Speculator | None = None,
) -> Engine:
    config = SchedulerConfig(prefix_cache=prefix_cache, max_step_growth=max_step_growth)
    return Engine(assembled.runner, frozenset(), config, speculator=speculator)


def continuous(assembled: Assembled, jobs: list[Job]) -> tuple[float, int]:
    engine = new_engine(assembled)
    began = time.perf_counter()
    most = run_all(engine, [request(i, j.prompt, j.output_tokens) for i, j in enumerate(jobs)])
    return time.perf_counter() - began, most


def static(assembled: Assembled, jobs: list[Job], size: int, padded: bool) -> float:
    engine = new_engine(assembled)
    began = time.perf_counter()
    for at in range(0, len(jobs), size):
        batch = jobs[at : at + size]
        longest_prompt = max(len(job.prompt) for job in batch)
        longest_output = max(job.output_tokens for job in batch)
        run_all(
            engine,
            [
                request(i, [0] * (longest_prompt - len(j.prompt)) + j.prompt, longest_output)
                if padded
                else request(i, j.prompt, j.output_tokens)
                for i, j in enumerate(batch)
            ],
        )
    return time.perf_counter() - began


def measure_throughput(args: argparse.Namespace) -> dict[str, float]:
    assembled = open_model(args, args.sequences * FULL_LENGTH)
    jobs = make_jobs(args.requests, assembled.spec.vocab_size)
    useful = sum(job.output_tokens for job in jobs)
    rates: dict[str, list[float]] = {"continuous": [], "static padded": [], "static idle": []}
    for _ in range(args.rounds):
        rates["continuous"].append(useful / continuous(assembled, jobs)[0])
        rates["static padded"].append(useful / static(assembled, jobs, args.sequences, True))
        rates["static idle"].append(useful / static(assembled, jobs, args.sequences, False))
    medians = {name: statistics.median(values) for name, values in rates.items()}
    print(
        f"\nthroughput: {len(jobs)} requests, KV memory of {args.sequences} x {FULL_LENGTH} tokens"
    )
    for name, values in rates.items():
        spread = f"({min(values):.0f}-{max(values):.0f}, {len(values)} rounds)"
        print(f"  {name:14} {medians[name]:7.0f} useful output tokens/s {spread}")
    for name in ("static padded", "static idle"):
        print(f"  continuous against {name}: {medians['continuous'] / medians[name]:.2f}x")
    return medians


def measure_memory(args: argparse.Namespace) -> dict[str, float]:
    """Sequences held at once, by admission alone: prompts may take all of a step, so that it is
    memory that limits how many have begun."""
    tokens = args.sequences * args.reserve_tokens
    assembled = open_model(args, tokens)
    jobs = make_jobs(8 * args.sequences, assembled.spec.vocab_size)
    engine = new_engine(assembled, max_step_growth=1e9)
    held = run_all(engine, [request(i, j.prompt, j.output_tokens) for i, j in enumerate(jobs)])
    reserved = tokens // args.reserve_tokens
    print(f"\nmemory: a pool of {tokens} tokens, lengths {SHORTEST} to {LONGEST} and as many out")
    print(f"  reserving {args.reserve_tokens} tokens each: {reserved} sequences")
    print(f"  paged: {held} sequences at once, {engine.stats.preemptions} preemptions")
    print(f"  {held / reserved:.1f}x")
    return {"reserved": reserved, "paged": held, "preemptions": engine.stats.preemptions}


def measure_prefix(args: argparse.Namespace) -> dict[str, float]:
    assembled = open_model(args, 16 * FULL_LENGTH)
    chooser = random.Random(1)

    def tokens(count: int) -> list[int]:
        return [chooser.randrange(assembled.spec.vocab_size) for _ in range(count)]

    def first_token_s(engine: Engine, prompt: list[int]) -> float:
        engine.add(request(0, prompt, 2))
        began = time.perf_counter()
        while not engine.step():
            pass
        took = time.perf_counter() - began
        engine.cancel("0")
        return took

    engine = new_engine(assembled, prefix_cache=True)
    unseen, seen = [], []
    for _ in range(args.rounds * 5):
        prefix = tokens(400)
        unseen.append(first_token_s(engine, prefix + tokens(20)))
        seen.append(first_token_s(engine, prefix + tokens(20)))
    cold, warm = statistics.median(unseen), statistics.median(seen)
    print("\nprefix: first token after 420 tokens, of which 400")
    print(
        f"  were never seen {cold * 1e3:7.1f} ms ({min(unseen) * 1e3:.1f}-{max(unseen) * 1e3:.1f})"
    )
    print(f"  were seen       {warm * 1e3:7.1f} ms ({min(seen) * 1e3:.1f}-{max(seen) * 1e3:.1f})")
    print(f"  {warm / cold:.2f}x")
    return {"unseen_s": cold, "seen_s": warm}


def open_model(args: argparse.Namespace, kv_tokens: int) -> Assembled:
    return assemble(args.model, kv_tokens=kv_tokens, max_sequences=args.max_sequences)


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("what", nargs="*", default=["throughput", "memory", "prefix"])
    parser.add_argument("--model")
    parser.add_argument("--requests", type=int, default=48)
    parser.add_argument("--sequences", type=int, default=8, help="that the KV memory holds in full")
    parser.add_argument("--max-sequences", type=int, default=64)
    parser.add_argument(
        "--reserve-tokens", type=int, default=2048, help="a server's maximum length"
    )
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    measures = {
        "throughput": measure_throughput,
        "memory": measure_memory,
        "prefix": measure_prefix,
    }
    figures = {name: measures[name](args) for name in args.what}
    if args.json:
        args.json.write_text(json.dumps(figures, indent=2) + "\n")


if __name__ == "__main__":
    main()
