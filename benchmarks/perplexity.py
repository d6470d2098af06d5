"""Perplexity of a model on a text, through one or more backends, in one run.

    python benchmarks/perplexity.py                          # cpu against reference
    python benchmarks/perplexity.py --backends cpu --tokens 4000
    python benchmarks/perplexity.py --backends cpu --kv-dtype f16 f32 bf16 int8 --tokens 8000

The text is cut into windows that are scored apart; every token but a window's first counts. All
backends see the same windows in the same steps. With several KV types the CPU runs once with each.
"""

from __future__ import annotations

import argparse
import json
import math
import time
from pathlib import Path

from headrace.assemble import assemble
from headrace.backends.cpu.kv import DEFAULT_KV_DTYPE
from headrace.core.step import Runner, StepEntry, StepPlan

TEXT = Path(__file__).parent / "texts" / "jargon-file-4.4.7.txt"


def score(runner: Runner, token_ids: list[int], window: int) -> tuple[float, int]:
    """Sum of the logprobs, and how many there are."""
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
    parser.add_argument(
        "--backends", nargs="+", default=["reference", "cpu"], choices=["reference", "cpu"]
    )
    parser.add_argument(
        "--kv-dtype", nargs="+", default=[DEFAULT_KV_DTYPE], help="of the CPU's KV cache"
    )
    parser.add_argument("--window", type=int, default=1024, help="tokens scored together")
    parser.add_argument("--tokens", type=int, help="use only the first so many tokens")
    parser.add_argument("--json", type=Path, help="write the figures here too")
    args = parser.parse_args()

    figures: dict[str, dict[str, float]] = {}
    for backend in args.backends:
        for kv_dtype in args.kv_dtype if backend == "cpu" else ["f32"]:
            name = f"{backend} {kv_dtype}"
            assembled = assemble(
                args.model, backend=backend, kv_dtype=kv_dtype, context_tokens=args.window
            )
            token_ids = assembled.tokenizer.encode(args.text.read_text())[: args.tokens]
            began = time.perf_counter()
            total, count = score(assembled.runner, token_ids, args.window)
            took = time.perf_counter() - began
            assembled.close()
            figures[name] = {
                "tokens": count,
                "perplexity": math.exp(-total / count),
                "tokens_per_s": count / took,
            }
            print(
                f"{name:14} {count} tokens  perplexity {figures[name]['perplexity']:.4f}  "
                f"({count / took:.0f} tokens/s)",
                flush=True,
            )
    first, *others = figures
    for name in others:
        change = figures[name]["perplexity"] / figures[first]["perplexity"] - 1
        print(f"{name} against {first}: {change:+.3%}")
    if args.json:
        args.json.write_text(json.dumps(figures, indent=2) + "\n")


if __name__ == "__main__":
    main()
