"""Perplexity of a model on a text, through one or more backends, in one run.

    python benchmarks/perplexity.py                          # cpu against reference
    python benchmarks/perplexity.py --device cpu --tokens 4000
    python benchmarks/perplexity.py --device cpu --kv-dtype f16 f32 bf16 int8 --tokens 8000

    python benchmarks/perplexity.py --device reference cuda --quantization none fp8 --tokens 4000
    python benchmarks/perplexity.py --model copies/awq copies/fp8 --device reference cuda

The text is cut into windows that are scored apart; every token but a window's first counts. All
backends see the same windows. With several KV types or quantizations a backend runs once with
each; each model's figures are held against its first one, with the standard error of the
difference, token by token: what is less than two of them may be chance.
benchmarks/quantized_copies.py writes quantized models to compare backends on.
"""

from __future__ import annotations

import argparse
import json
import math
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from statistics import stdev
from typing import Any

from headrace.assemble import assemble
from headrace.backends.cpu.kv import DEFAULT_KV_DTYPE
from headrace.core.step import RowExtra, Runner, StepPlan

DEVICES = ("reference", "cpu", "cuda")
Figures = dict[str, float]
TEXT = Path(__file__).parent / "texts" / "jargon-file-4.4.7.txt"


def score(runner: Runner, token_ids: list[int], window: int) -> list[float]:
    """The logprob of each token but the windows' first."""
    limits = runner.limits
    table = list(range(-(-window // limits.block_tokens)))
    found: list[float] = []
    for at in range(0, len(token_ids) - 1, window):
        tokens = token_ids[at : at + window]
        for start in range(0, len(tokens) - 1, limits.max_batch_tokens):
            end = min(start + limits.max_batch_tokens, len(tokens) - 1)
            plan = StepPlan()
            scored = RowExtra(targets=tokens[start + 1 : end + 1])
            plan.add(at, tokens[start:end], start, table, extra=scored)
            runner.submit(plan)
            found += runner.collect().extras[0].target_logprobs
    return found


def variants(args: argparse.Namespace) -> Iterator[tuple[str, dict[str, Any]]]:
    """What to run a model as: a name, and what `assemble` is asked for."""
    for device in args.device:
        if device == "reference":
            yield "reference f32", {"device": device, "kv_dtype": "f32"}
            continue
        for kv_dtype in args.kv_dtype or [DEFAULT_KV_DTYPE if device == "cpu" else "bf16"]:
            if device == "cpu":
                yield f"cpu {kv_dtype}", {"device": device, "kv_dtype": kv_dtype}
                continue
            for quantization in args.quantization:
                settings = {"device": device, "kv_dtype": kv_dtype, "quantization": quantization}
                shown = "" if quantization == "none" else f"{quantization}, KV "
                yield f"cuda {shown}{kv_dtype}", settings


def measure(
    model: str | None, settings: dict[str, Any], args: argparse.Namespace
) -> tuple[Figures, list[float]]:
    assembled = assemble(model, context_tokens=args.window, **settings)
    try:
        token_ids = assembled.tokenizer.encode(args.text.read_text())[: args.tokens]
        began = time.perf_counter()
        logprobs = score(assembled.runner, token_ids, args.window)
        took = time.perf_counter() - began
    finally:
        assembled.close()
    count = len(logprobs)
    figures: Figures = {
        "tokens": count,
        "perplexity": math.exp(-math.fsum(logprobs) / count),
        "tokens_per_s": count / took,
    }
    return figures, logprobs


def standard_error(logprobs: list[float], others: list[float]) -> float:
    """Of the mean difference, as a share of the perplexity."""
    apart = [one - other for one, other in zip(logprobs, others, strict=True)]
    return stdev(apart) / math.sqrt(len(apart))


def parse(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument(
        "--model", nargs="+", help="as for `headrace run`; the default model if left out"
    )
    parser.add_argument("--text", type=Path, default=TEXT)
    parser.add_argument("--device", nargs="+", default=["reference", "cpu"], choices=DEVICES)
    parser.add_argument("--kv-dtype", nargs="+", help="of the KV cache, but for the reference's")
    parser.add_argument(
        "--quantization", nargs="+", default=["none"], help="on load, with the cuda backend"
    )
    parser.add_argument("--window", type=int, default=1024, help="tokens scored together")
    parser.add_argument("--tokens", type=int, help="use only the first so many tokens")
    parser.add_argument("--json", type=Path, help="write the figures here too")
    return parser.parse_args(arguments)


def main(arguments: Sequence[str] | None = None) -> None:
    args = parse(arguments)
    figures: dict[str, Figures] = {}
    for model in args.model or [None]:
        prefix = f"{Path(model).name} " if model and len(args.model) > 1 else ""
        first: tuple[str, list[float]] | None = None
        for name, settings in variants(args):
            found, logprobs = measure(model, settings, args)
            figures[prefix + name] = found
            change = ""
            if first is None:
                first = prefix + name, logprobs
            else:
                share = found["perplexity"] / figures[first[0]]["perplexity"] - 1
                found["standard_error"] = standard_error(logprobs, first[1])
                change = f"  {share:+.3%} ({found['standard_error']:.3%}) against {first[0]}"
            print(
                f"{prefix}{name:14} {found['tokens']} tokens  perplexity "
                f"{found['perplexity']:.4f}  ({found['tokens_per_s']:.0f} tokens/s){change}",
                flush=True,
            )
            if args.json:
                args.json.write_text(json.dumps(figures, indent=2) + "\n")


if __name__ == "__main__":
    main()
