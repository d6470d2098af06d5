"""Tokens a second of a backend, without HTTP: prefill of one prompt, decode of n sequences.

    python benchmarks/speed.py [--model M] [--backend cpu] [--threads N] [--rounds 5]

Decode steps are taken after 128-token prompts. Medians over rounds, with the spread.
"""

from __future__ import annotations

import argparse
import random
import statistics

from headrace.assemble import Assembled, assemble
from headrace.core.config import EngineConfig
from headrace.core.step import Draw, StepEntry, StepPlan

GREEDY = Draw(temperature=0.0)
PROMPT_TOKENS = 128
DECODE_STEPS = 32


def entry(number: int, tokens: list[int], start: int, blocks: int) -> StepEntry:
    table = list(range(number * blocks, (number + 1) * blocks))
    return StepEntry(
        sequence_id=number, token_ids=tokens, start=start, block_table=table, draw=GREEDY
    )


def step_s(assembled: Assembled, entries: list[StepEntry]) -> float:
    assembled.runner.submit(StepPlan(entries=entries))
    return assembled.runner.collect().compute_s


def prefill(assembled: Assembled, tokens: list[int]) -> float:
    blocks = -(-len(tokens) // assembled.runner.limits.block_tokens)
    return len(tokens) / step_s(assembled, [entry(0, tokens, 0, blocks)])


def decode(assembled: Assembled, tokens: list[int], sequences: int) -> float:
    block_tokens = assembled.runner.limits.block_tokens
    blocks = -(-(PROMPT_TOKENS + DECODE_STEPS) // block_tokens)
    for number in range(sequences):
        step_s(assembled, [entry(number, tokens[:PROMPT_TOKENS], 0, blocks)])
    times = [
        step_s(
            assembled,
            [entry(n, [tokens[n]], PROMPT_TOKENS + step, blocks) for n in range(sequences)],
        )
        for step in range(DECODE_STEPS)
    ]
    return sequences / statistics.median(times)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--model")
    parser.add_argument("--backend", default="cpu")
    parser.add_argument("--threads", type=int)
    parser.add_argument("--rounds", type=int, default=5)
    args = parser.parse_args()
    config = EngineConfig(threads=args.threads)
    assembled = assemble(args.model, backend=args.backend, config=config)
    chooser = random.Random(0)
    tokens = [chooser.randrange(assembled.spec.vocab_size) for _ in range(512)]
    figures: dict[str, list[float]] = {}
    for _ in range(args.rounds):
        figures.setdefault("prefill 512", []).append(prefill(assembled, tokens))
        for sequences in (1, 4, 16, 32):
            name = f"decode {sequences}"
            figures.setdefault(name, []).append(decode(assembled, tokens, sequences))
    for name, values in figures.items():
        print(
            f"{name:12} {statistics.median(values):7.0f} tokens/s  "
            f"(min {min(values):.0f}, max {max(values):.0f}, {len(values)} rounds)"
        )


if __name__ == "__main__":
    main()
