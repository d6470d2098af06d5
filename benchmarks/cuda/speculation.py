"""Speculation beside plain decoding on a GPU, with a set share of right guesses, in turns.

    python benchmarks/cuda/speculation.py --out $OUT/speculation.json
    python benchmarks/cuda/speculation.py --device cpu --shape tiny --sequences 1 4 --out x.json

One runner with random weights, and two engines over it that take turns, run by run: one plain, one
that guesses with `synthetic` (speculate/synthetic.py). A run is as many sequences as asked for, all
of the same length. Random weights have many tokens of nearly the same chance, so which one wins
depends on a row's last bits, and those on a GPU on the batch: guesses would be wrong from the first
difference on. So there the weight of the last norm is zero: all logits are 0, and every answer is
the first token. Only the output layer multiplies zeros, a fifteenth of a step's work. The first two
runs of each size are not measured: right answers become known, and graphs are captured.

What to expect of an H200 and the shape of Llama-3.1-8B in bfloat16. Reading 15 GB of weights at the
data sheet's 4.8 TB/s takes 3.1 ms at any number of rows; measured steps take 3.99 ms with 1 row,
5.07 with 64, 9.07 with 256, 16.1 with 512 (benchmarks/README.md), so rows are nearly free up to 64
and cost 0.02 to 0.03 ms each beyond. Attention reads a sequence's keys once for four of its rows.
With a rate of 0.8 a sequence with k guesses yields (1 - 0.8^(k+1)) / 0.2 tokens a step: 1.8 for
k = 1, 2.4 for 2, 3.0 for 3, 4.2 for 7, 4.9 for 16. While there are guesses the device waits for the
host between two steps: 0.5 ms are assumed, 1 ms at 256 sequences. So:

    sequences  guesses each  rows   tokens   step and wait    gain   issue 17 asks for
    1          16            17     4.9      4.2 + 0.5 ms     4.1    2.0
    8          7             64     4.2      5.1 + 0.5 ms     3.0    1.7
    64         3             256    3.0      9.1 + 0.5 ms     1.6    1.1
    256        1             512    1.8      16.1 + 1 ms      0.96   0.98: nothing is to be guessed

What may make it miss: more host time than that (host_s in the file), graphs that are captured only
while it is measured (the first run of each size is for them; a draft changes the bucket of rows),
and at 256 sequences the look at one step in 17, which costs its wait.
"""

from __future__ import annotations

import argparse
import json
import random
import statistics
import sys
import tempfile
import time
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]
sys.path[:0] = [str(ROOT / "src"), str(ROOT / "benchmarks")]

from headrace.assemble import assemble  # noqa: E402
from headrace.core.config import SchedulerConfig  # noqa: E402
from headrace.core.drafter import Method  # noqa: E402
from headrace.core.request import GenerateRequest, SamplingParams  # noqa: E402
from headrace.core.step import Runner  # noqa: E402
from headrace.engine.loop import Engine  # noqa: E402
from headrace.speculate.speculator import TimedSpeculator  # noqa: E402
from headrace.speculate.synthetic import SyntheticDrafter  # noqa: E402
from shapes import SHAPES, write_shape  # noqa: E402

WARM_UP = 2  # runs of each size
TARGETS = {1: 2.0, 8: 1.7, 64: 1.1, 256: 0.98}


@dataclass(slots=True, kw_only=True)
class Run:
    seconds: float  # from the first token of the last sequence to the end
    tokens: int  # in that time
    steps: int
    guesses: int
    right: int
    host_s: float  # schedule and commit
    device_s: float


@dataclass(slots=True, kw_only=True)
class Size:
    sequences: int
    plain: list[Run] = field(default_factory=list)
    guessing: list[Run] = field(default_factory=list)

    @property
    def gains(self) -> list[float]:
        pairs = zip(self.plain, self.guessing, strict=True)
        return [b.tokens / b.seconds / (a.tokens / a.seconds) for a, b in pairs]

    def row(self) -> dict[str, Any]:
        target = TARGETS.get(self.sequences)
        gain = statistics.median(self.gains)
        return {
            "sequences": self.sequences,
            "gain": gain,
            "gains": self.gains,
            "target": target,
            "is_met": None if target is None else gain >= target,
            "plain": [asdict(run) for run in self.plain],
            "guessing": [asdict(run) for run in self.guessing],
        }


def run(engine: Engine, sequences: int, prompt_tokens: int, answer_tokens: int) -> Run:
    chooser = random.Random(sequences)
    params = SamplingParams(temperature=0.0, max_tokens=answer_tokens, ignore_eos=True)
    begun: set[str] = set()
    for number in range(sequences):
        prompt = [chooser.randrange(10, 400) for _ in range(prompt_tokens)]
        engine.add(GenerateRequest(request_id=str(number), prompt_token_ids=prompt, params=params))
    while len(begun) < sequences and engine.has_work:  # prompts are not measured
        for token in engine.step():
            if token.error is not None:
                raise SystemExit(f"a run failed: {token}")
            begun.add(token.request_id)
    stats, drafts = engine.stats, engine.stats.drafts
    before = (
        stats.steps,
        drafts.draft_tokens,
        drafts.accepted_tokens,
        stats.schedule_s + stats.commit_s,
        stats.compute_s + stats.sample_s,
    )
    tokens, began_s = 0, time.perf_counter()
    while engine.has_work:
        tokens += len(engine.step())
    seconds = time.perf_counter() - began_s
    steps, guesses, right, host_s, device_s = before
    return Run(
        seconds=seconds,
        tokens=tokens,
        steps=stats.steps - steps,
        guesses=drafts.draft_tokens - guesses,
        right=drafts.accepted_tokens - right,
        host_s=stats.schedule_s + stats.commit_s - host_s,
        device_s=stats.compute_s + stats.sample_s - device_s,
    )


def engines(runner: Runner, speculator: TimedSpeculator) -> tuple[Engine, Engine]:
    """Without a prefix cache: both use the same blocks, one after the other."""
    config = SchedulerConfig(prefix_cache=False)
    return (
        Engine(runner, frozenset(), config),
        Engine(runner, frozenset(), config, speculator=speculator),
    )


def curve_of(speculator: TimedSpeculator, sequences: int) -> dict[int, float]:
    """Milliseconds that it expects of steps in which each sequence has 0, 1, 2 ... guesses."""
    context = 200.0 * sequences
    rows = [sequences * each for each in (1, 2, 3, 4, 5, 8, 12, 17)]
    return {each: 1e3 * (speculator.curve.step_s(each, context) or 0.0) for each in rows}


def measure(args: argparse.Namespace) -> dict[str, Any]:
    began_s = time.perf_counter()
    most = max(args.sequences)
    tokens = args.prompt_tokens + args.answer_tokens + 32
    with tempfile.TemporaryDirectory() as folder:
        model = assemble(
            str(write_shape(args.shape, Path(folder))),
            device=args.device,
            load_format="dummy",
            speculate=f"synthetic:{args.rate:g}",  # graphs of steps with drafts
            kv_tokens=most * tokens,
            max_sequences=max(512, most),
            context_tokens=max(256, tokens),
        )
    report: dict[str, Any] = {
        "shape": args.shape,
        "device": args.device,
        "rate": args.rate,
        "prompt_tokens": args.prompt_tokens,
        "answer_tokens": args.answer_tokens,
        "start_s": time.perf_counter() - began_s,
        "sizes": [],
    }
    if args.device == "cuda":
        import torch

        with torch.inference_mode():
            model.runner._weights.final_norm.zero_()  # type: ignore[attr-defined]
    speculator = TimedSpeculator(Method.SYNTHETIC, synthetic=SyntheticDrafter(args.rate))
    plain, guessing = engines(model.runner, speculator)
    for sequences in args.sequences:
        size = Size(sequences=sequences)
        for at in range(-WARM_UP, args.rounds):
            for engine, runs in ((plain, size.plain), (guessing, size.guessing)):
                done = run(engine, sequences, args.prompt_tokens, args.answer_tokens)
                if at >= 0:
                    runs.append(done)
            if at >= 0 and time.perf_counter() - began_s > args.budget_s:
                break
        report["sizes"].append({**size.row(), "curve": curve_of(speculator, sequences)})
        args.out.write_text(json.dumps(report, indent=1) + "\n")
        print(line(size), flush=True)
        if time.perf_counter() - began_s > args.budget_s:
            print(f"out of time after {args.budget_s:g} s", flush=True)
            break
    model.close()
    return report


def line(size: Size) -> str:
    a, b = size.plain[-1], size.guessing[-1]
    return (
        f"{size.sequences:>4} sequences: {a.tokens / a.seconds:8.0f} → {b.tokens / b.seconds:8.0f} "
        f"tokens/s, {statistics.median(size.gains):.2f}× "
        f"({min(size.gains):.2f}-{max(size.gains):.2f}; asked for "
        f"{TARGETS.get(size.sequences, 'nothing')}); "
        f"step {1e3 * a.seconds / a.steps:.2f} → {1e3 * b.seconds / b.steps:.2f} ms, of it host "
        f"{1e3 * a.host_s / a.steps:.2f} → {1e3 * b.host_s / b.steps:.2f}; "
        f"{b.guesses / b.steps / size.sequences:.1f} guesses a sequence, "
        f"{b.right / max(1, b.guesses):.0%} right"
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--device", default="cuda", choices=["cuda", "cpu", "reference"])
    parser.add_argument("--shape", default="llama-3.1-8b", choices=SHAPES)
    parser.add_argument("--sequences", type=int, nargs="+", default=[1, 8, 64, 256])
    parser.add_argument("--rate", type=float, default=0.8)
    parser.add_argument("--prompt-tokens", type=int, default=128)
    parser.add_argument("--answer-tokens", type=int, default=192)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--budget-s", type=float, default=210.0, help="begin nothing after so long")
    measure(parser.parse_args())


if __name__ == "__main__":
    main()
