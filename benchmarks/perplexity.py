"""Perplexity of a model on a text, through one or more backends, in one run.

    python benchmarks/perplexity.py                          # cpu against reference
    python benchmarks/perplexity.py --backends cpu --tokens 4000

The text is cut into windows that are scored apart; every token but a window's first counts. All
backends see the same windows in the same steps.
"""

from __future__ import annotations

import argparse
import json
import math
import time
from pathlib import Path

from headrace.assemble import Assembled, assemble
from headrace.core.step import StepEntry, StepPlan

TEXT = Path(__file__).parent / "texts" / "jargon-file-4.4.7.txt"


def score(assembled: Assembled, token_ids: list[int], window: int) -> tuple[float, int]:
    """Sum of the logprobs, and how many there are."""
    runner = assembled.runner
    limits = runner.limits
    table = list(range(-(-window // limits.block_tokens)))
    total, count = 0.0, 0
    for at in range(0, len(token_ids) - 1, window):
        tokens = token_ids[at : at + window]
        for start in range(0, len(tokens) - 1, limits.max_batch_tokens):
            end = min(start + limits.max_batch_tokens, len(tokens) - 1)
            entry = StepEntry(
                sequence_id=at,
                token_ids=tokens[start:end],
                start=start,
                block_table=table,
                targets=tokens[start + 1 : end + 1],
            )
            runner.submit(StepPlan(entries=[entry]))
            logprobs = runner.collect().entries[0].target_logprobs
            total += math.fsum(logprobs)
            count += len(logprobs)
    return total, count


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--model", help="as for `headrace run`; the default model if left out")
    parser.add_argument("--text", type=Path, default=TEXT)
    parser.add_argument("--backends", nargs="+", default=["reference", "cpu"])
    parser.add_argument("--window", type=int, default=1024, help="tokens scored together")
    parser.add_argument("--tokens", type=int, help="use only the first so many tokens")
    parser.add_argument("--json", type=Path, help="write the figures here too")
    args = parser.parse_args()

    figures: dict[str, dict[str, float]] = {}
    for backend in args.backends:
        assembled = assemble(args.model, backend=backend)
        token_ids = assembled.tokenizer.encode(args.text.read_text())[: args.tokens]
        began = time.perf_counter()
        total, count = score(assembled, token_ids, min(args.window, assembled.spec.context_tokens))
        took = time.perf_counter() - began
        figures[backend] = {
            "tokens": count,
            "perplexity": math.exp(-total / count),
            "tokens_per_s": count / took,
        }
        assembled.file.close()
        print(
            f"{backend:10} {count} tokens  perplexity {figures[backend]['perplexity']:.4f}  "
            f"({count / took:.0f} tokens/s)",
            flush=True,
        )
    first = figures[args.backends[0]]["perplexity"]
    for backend in args.backends[1:]:
        change = figures[backend]["perplexity"] / first - 1
        print(f"{backend} against {args.backends[0]}: {change:+.3%}")
    if args.json:
        args.json.write_text(json.dumps(figures, indent=2) + "\n")


if __name__ == "__main__":
    main()
