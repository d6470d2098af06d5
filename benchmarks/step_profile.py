"""Where a step's time goes, by operation, against what the machine can do.

    python benchmarks/step_profile.py [--model M] [--threads N] [--rows 1 4 16 32 512] [--rounds 20]
    python benchmarks/step_profile.py --rows 16 --json profile.json

Steps of 1 to 127 rows decode one token of so many sequences after --context tokens; larger ones
prefill one prompt. Of each operation the best of all rounds is shown, because noise only adds time,
and beside it the median; peaks are measured before and after, on the same threads. The last column
is the part of an operation's time that it would take at the peaks of int8 (or float) multiply-adds
and of reading. Below the table: what is outside the operations of a step that comes by itself; at
the end, what Python adds to steps of one sequence and of sixteen when the engine runs them.
"""

from __future__ import annotations

import argparse
import json
import random
import statistics
import time
from dataclasses import asdict
from pathlib import Path
from typing import Any

from headrace.assemble import assemble
from headrace.backends.cpu.profile import OperationProfile, Peaks, measure_peaks
from headrace.backends.cpu.runner import CpuRunner
from headrace.core.request import GenerateRequest, SamplingParams
from headrace.core.step import DrawParams, StepPlan
from headrace.engine.loop import Engine

BLOCK_TOKENS = 16
PREFILL_ROWS = 128  # a step of so many rows or more is one prompt
GREEDY = DrawParams(temperature=0.0)
ENGINE_SEQUENCES = (1, 16)
ENGINE_PROMPT = 32
ENGINE_STEPS = 200


def blocks_for(tokens: int) -> int:
    return -(-tokens // BLOCK_TOKENS)


def plan(rows: int, tokens: list[int], context: int) -> StepPlan:
    made = StepPlan()
    if rows >= PREFILL_ROWS:
        made.add(0, tokens[:rows], 0, list(range(blocks_for(rows))), draw=GREEDY)
        return made
    blocks = blocks_for(context + 1)
    for n in range(rows):
        table = list(range(n * blocks, (n + 1) * blocks))
        made.add(n, [tokens[n]], context, table, draw=GREEDY)
    return made


def measure(runner: CpuRunner, step: StepPlan, rounds: int) -> dict[str, list[OperationProfile]]:
    """Each operation's profiles, one a round; the whole step among them."""
    found: dict[str, list[OperationProfile]] = {}
    for _ in range(rounds):
        runner.profile(True)
        began = time.perf_counter()
        runner.submit(step)
        runner.collect()
        whole = time.perf_counter() - began
        operations = runner.take_profile()
        runner.profile(False)
        native = sum(operation.seconds for operation in operations)
        found.setdefault("whole step", []).append(
            OperationProfile("whole step", 1, whole, native, 0, 0)
        )
        for operation in operations:
            found.setdefault(operation.name, []).append(operation)
    return found


def show(rows: int, found: dict[str, list[OperationProfile]], peaks: Peaks, threads: int) -> None:
    steps = found["whole step"]
    best = {name: min(all_, key=lambda o: o.seconds) for name, all_ in found.items()}
    total = sum(o.seconds for name, o in best.items() if name != "whole step")
    middle = statistics.median(o.seconds for o in steps)
    print(
        f"\n{rows} rows: {rows / best['whole step'].seconds:.0f} tokens/s at best, "
        f"{rows / middle:.0f} in the median; operations alone {rows / total:.0f}"
    )
    print(
        f"{'operation':46} {'calls':>5} {'best ms':>8} {'median':>8} {'share':>6} {'busy':>5}"
        f" {'GMAC/s':>7} {'GB/s':>6} {'of peak':>7}"
    )
    for name, o in sorted(best.items(), key=lambda item: -item[1].seconds):
        if name == "whole step":
            continue
        median = statistics.median(one.seconds for one in found[name])
        of_peak = f"{o.bound_s(peaks) / o.seconds:7.0%}" if o.multiplies else ""
        print(
            f"{name:46} {o.calls:5} {o.seconds * 1e3:8.3f} {median * 1e3:8.3f}"
            f" {o.seconds / total:6.1%} {o.worked_s / threads / o.seconds:5.0%}"
            f" {o.multiplies / o.seconds / 1e9:7.1f} {o.bytes / o.seconds / 1e9:6.1f} {of_peak}"
        )
    outside = statistics.median(o.seconds - o.worked_s for o in steps)
    print(f"outside the operations: {outside * 1e6:.0f} µs a step in the median (plan to arrays,")
    print(f"rope tables, waking threads, results), {outside / middle:.1%} of it")


def python_share(runner: CpuRunner, sequences: int) -> None:
    """Of decode steps that the engine makes one after the other: all that is not native."""
    engine = Engine(runner, frozenset())
    params = SamplingParams(max_tokens=ENGINE_STEPS, temperature=0.0, ignore_eos=True)
    for number in range(sequences):
        prompt = [number + 1] * ENGINE_PROMPT
        engine.add(GenerateRequest(request_id=str(number), prompt_token_ids=prompt, params=params))
    steps, python = [], []
    while engine.has_work:
        began = time.perf_counter()
        tokens_of_step = len(engine.step())
        took = time.perf_counter() - began
        if tokens_of_step == sequences:
            steps.append(took)
            python.append(took - runner.native_s)
    share = statistics.median(p / s for p, s in zip(python, steps, strict=True))
    print(
        f"{sequences} in the engine: {statistics.median(steps) * 1e3:.2f} ms a step in the median, "
        f"{statistics.median(python) * 1e6:.0f} µs of it Python, {share:.1%}"
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--model")
    parser.add_argument("--threads", type=int)
    parser.add_argument("--rows", type=int, nargs="+", default=[1, 4, 16, 32, 512])
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument("--context", type=int, default=128, help="tokens before the decoded ones")
    parser.add_argument("--json", type=Path, help="write the best of each operation here too")
    args = parser.parse_args()
    most = max((rows for rows in args.rows if rows < PREFILL_ROWS), default=1)
    kv_tokens = BLOCK_TOKENS * max(
        most * blocks_for(args.context + 1),
        max(ENGINE_SEQUENCES) * blocks_for(ENGINE_PROMPT + ENGINE_STEPS),
        *(blocks_for(rows) for rows in args.rows),
    )
    model = assemble(args.model, device="cpu", kv_tokens=kv_tokens, threads=args.threads)
    runner = model.runner
    assert isinstance(runner, CpuRunner)
    chooser = random.Random(0)
    tokens = [chooser.randrange(model.spec.vocab_size) for _ in range(max(*args.rows, most, 2))]

    # Every block is written once: unwritten memory would be read too fast.
    for block in range(kv_tokens // BLOCK_TOKENS):
        whole = StepPlan()
        whole.add(0, tokens[:1] * BLOCK_TOKENS, 0, [block], version=block)
        runner.submit(whole)
        runner.collect()
    threads = runner.threads
    before = measure_peaks(threads, runner.weight_bytes)
    results = {
        rows: measure(runner, plan(rows, tokens, args.context), args.rounds) for rows in args.rows
    }
    after = measure_peaks(threads, runner.weight_bytes)
    peaks = Peaks(
        *(max(pair) for pair in zip(asdict(before).values(), asdict(after).values(), strict=True))
    )
    print(
        f"{threads} threads; peaks: {peaks.dots / 1e9:.0f} G int8 and {peaks.floats / 1e9:.0f} G"
        f" float multiply-adds/s, {peaks.bytes / 1e9:.1f} GB/s of reading"
    )
    for rows, found in results.items():
        show(rows, found, peaks, threads)
    print()
    for sequences in ENGINE_SEQUENCES:
        python_share(runner, sequences)
    if args.json:
        written: dict[str, Any] = {"threads": threads, "peaks": asdict(peaks), "rows": {}}
        for rows, found in results.items():
            written["rows"][rows] = [
                asdict(min(o, key=lambda one: one.seconds)) for o in found.values()
            ]
        args.json.write_text(json.dumps(written, indent=2) + "\n")


if __name__ == "__main__":
    main()
