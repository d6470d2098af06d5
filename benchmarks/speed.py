"""Tokens a second of a backend, without HTTP: prefill of one prompt, decode of n sequences.

    python benchmarks/speed.py [--model M] [--device cpu] [--threads N] [--rounds 5]
    python benchmarks/speed.py --context 1000 --sequences 1 16 --kv-dtype f32 f16 bf16 int8

Decode steps are taken after prompts of --context tokens. Medians over rounds, with the spread; with
several KV types, each round tries all of them, so that a busy machine is unfair to none. The first
figure of decoding is of the median step, which hides stalls; the one over wall time has them all.
"""

from __future__ import annotations

import argparse
import random
import statistics
import time

from headrace.assemble import assemble
from headrace.backends.cpu.kv import DEFAULT_KV_DTYPE
from headrace.core.step import DrawParams, Runner, StepPlan

GREEDY = DrawParams(temperature=0.0)
BLOCK_TOKENS = 16
PREFILL_TOKENS = 512
DECODE_STEPS = 32


def add_row(plan: StepPlan, number: int, tokens: list[int], start: int, blocks: int) -> None:
    table = list(range(number * blocks, (number + 1) * blocks))
    plan.add(number, tokens, start, table, version=blocks, draw=GREEDY)


def step_s(runner: Runner, plan: StepPlan) -> float:
    runner.submit(plan)
    return runner.collect().compute_s


def blocks_for(tokens: int) -> int:
    return -(-tokens // BLOCK_TOKENS)


def fill(runner: Runner, number: int, tokens: list[int], blocks: int) -> float:
    """Compute a prompt in steps; the seconds it took."""
    most = runner.limits.max_batch_tokens
    took_s = 0.0
    for at in range(0, len(tokens), most):
        plan = StepPlan()
        add_row(plan, number, tokens[at : at + most], at, blocks)
        took_s += step_s(runner, plan)
    return took_s


def fill_all(runner: Runner, tokens: list[int], sequences: int) -> None:
    """One prompt, computed once and copied: unwritten memory would be read too fast."""
    blocks = blocks_for(len(tokens) + DECODE_STEPS)
    fill(runner, 0, tokens, blocks)
    copies = [(block % blocks, block) for block in range(blocks, sequences * blocks)]
    runner.submit(StepPlan(copies=copies))
    runner.collect()


def decode(runner: Runner, tokens: list[int], sequences: int) -> tuple[float, float]:
    """Tokens a second: by the median step, and over wall time."""
    blocks = blocks_for(len(tokens) + DECODE_STEPS)
    began = time.perf_counter()
    times = []
    for step in range(DECODE_STEPS):
        plan = StepPlan()
        for n in range(sequences):
            add_row(plan, n, [tokens[n]], len(tokens) + step, blocks)
        times.append(step_s(runner, plan))
    wall_s = time.perf_counter() - began
    return sequences / statistics.median(times), sequences * DECODE_STEPS / wall_s


def measure(
    runners: dict[str, Runner], tokens: list[int], context: int, counts: list[int], rounds: int
) -> dict[str, list[float]]:
    figures: dict[str, list[float]] = {}
    for runner in runners.values():
        fill_all(runner, tokens[:context], max(counts))
    for _ in range(rounds):
        for name, runner in runners.items():
            blocks = blocks_for(PREFILL_TOKENS)
            speed = PREFILL_TOKENS / fill(runner, 0, tokens[:PREFILL_TOKENS], blocks)
            figures.setdefault(f"{name}prefill {PREFILL_TOKENS}", []).append(speed)
            for count in counts:
                speed, over_wall = decode(runner, tokens[:context], count)
                figures.setdefault(f"{name}decode {count}", []).append(speed)
                figures.setdefault(f"{name}decode {count}, wall", []).append(over_wall)
    return figures


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--model")
    parser.add_argument("--device", default="cpu", choices=["reference", "cpu"])
    parser.add_argument("--threads", type=int)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--context", type=int, default=128, help="tokens before the decoded ones")
    parser.add_argument("--sequences", type=int, nargs="+", default=[1, 4, 16, 32])
    parser.add_argument("--kv-dtype", nargs="+", default=[DEFAULT_KV_DTYPE])
    args = parser.parse_args()
    blocks = max(args.sequences) * blocks_for(args.context + DECODE_STEPS)
    kv_tokens = max(blocks, blocks_for(PREFILL_TOKENS)) * BLOCK_TOKENS
    models = {
        f"{kv_dtype} " if len(args.kv_dtype) > 1 else "": assemble(
            args.model,
            device=args.device,
            kv_dtype=kv_dtype,
            kv_tokens=kv_tokens,
            threads=args.threads,
        )
        for kv_dtype in args.kv_dtype
    }
    chooser = random.Random(0)
    vocab_size = min(model.spec.vocab_size for model in models.values())
    tokens = [chooser.randrange(vocab_size) for _ in range(max(PREFILL_TOKENS, args.context))]
    runners = {name: model.runner for name, model in models.items()}
    figures = measure(runners, tokens, args.context, args.sequences, args.rounds)
    for name, values in figures.items():
        print(
            f"{name:22} {statistics.median(values):7.0f} tokens/s  "
            f"(min {min(values):.0f}, max {max(values):.0f}, {len(values)} rounds)"
        )


if __name__ == "__main__":
    main()
