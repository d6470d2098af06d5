"""What the host spends on a step of the CUDA backend, by part: the real engine and the real runner.

    python benchmarks/host_time.py [--sequences 1 64 256 512] [--steps 300] [--out host.json]
    python benchmarks/host_time.py --device cuda --shape llama-3.1-8b --max-layers 4

Without a GPU (the default) the runner lies on CPU tensors and its launches are left out, as a
replayed graph leaves them out: everything else of engine, runner, inputs, work lists, draws and
results is what runs on the GPU, less torch's own calls for streams, events and pinned memory. Times
are CPU times of the thread, so that other processes don't count. With --device cuda launches are
real and times are the wall's; the wait for the device is a row of its own and in no other.

`mixed` is the workload of benchmarks/offline_workloads.py: prompts join others' decoding, sequences
end. Where nothing is computed a step is said to take STEP_S and TOKEN_S for each of its tokens, so
that prompts are let in as on an H200. A row is the mean of its steps, and percentiles: where others
use the machine too, compare the 10th. The garbage collector's passes are inside the others; a row
of their own says how much they are.
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import statistics
import tempfile
import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from offline_workloads import Sizes, mixed_lengths
from shapes import SHAPES, write_shape

STEP_S, TOKEN_S = 8e-3, 24e-6  # of the 8B shape on an H200: a step, and a prompt's token in it
STEP_GROWTH = 24.0  # as on any GPU
PROMPT_TOKENS = 129
WARM_STEPS = 20
BLOCK_TOKENS = 64
CONTEXT_TOKENS = 4096


class Parts:
    """Seconds by part and step. A part's time is its own: those inside it are taken out."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._open: list[float] = []  # what parts inside each open one took
        self._step: dict[str, float] = defaultdict(float)
        self.steps: list[dict[str, float]] = []

    @contextmanager
    def part(self, name: str) -> Iterator[None]:
        began = self._clock()
        self._open.append(0.0)
        try:
            yield
        finally:
            took = self._clock() - began
            self._step[name] += took - self._open.pop()
            if self._open:
                self._open[-1] += took

    def wrap(self, owner: Any, name: str, part: str) -> None:
        """Calls of an object's (or a module's or class's) function count as a part."""
        inner = getattr(owner, name)

        def timed(*args: Any, **kwargs: Any) -> Any:
            with self.part(part):
                return inner(*args, **kwargs)

        setattr(owner, name, timed)

    def add(self, name: str, seconds: float) -> None:
        self._step[name] += seconds

    def end_step(self) -> None:
        self.steps.append(dict(self._step))
        self._step.clear()

    def clear(self) -> None:
        self._step.clear()
        self.steps.clear()


def make_runner(args: argparse.Namespace, sequences: int) -> Any:
    import torch

    from headrace.backends.cuda.runner import CudaRunner
    from headrace.weights.describe import describe_file
    from headrace.weights.load import find_weights, open_weights

    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder)
        write_shape(args.shape, path)
        config = json.loads((path / "config.json").read_text())
        config["max_position_embeddings"] = max(CONTEXT_TOKENS, config["max_position_embeddings"])
        if args.max_layers:
            config["num_hidden_layers"] = args.max_layers
        (path / "config.json").write_text(json.dumps(config))
        file = open_weights(path, "dummy")
        spec, refs = describe_file(file, CONTEXT_TOKENS)
        runner = CudaRunner(
            spec,
            find_weights(refs, file),
            total_blocks=max(sequences, 256) * 18,
            block_tokens=BLOCK_TOKENS,
            max_batch_tokens=8192,
            max_sequences=max(sequences, 256),
            context_tokens=CONTEXT_TOKENS,
            device=torch.device(args.device),
            dependent=args.device == "cuda",
        )
    if args.device == "cpu":  # launches are left out: a replay is one call, and so is this
        runner._graphs.run = lambda *_, **__: True  # type: ignore[method-assign]
    return runner


def watch(parts: Parts, engine: Any, runner: Any) -> None:
    from headrace.backends.cuda.step import results

    parts.wrap(engine.scheduler, "schedule", "schedule")
    parts.wrap(engine.scheduler, "commit", "commit")
    parts.wrap(runner, "submit", "submit: the rest")
    parts.wrap(runner, "collect", "collect: results")
    parts.wrap(runner._inputs, "fill", "submit: inputs")
    parts.wrap(runner._graphs, "run", "submit: replay or launches")
    parts.wrap(runner._inputs._work_lists, "write", "submit: attention's list")
    for name in ("__init__", "fetch"):
        parts.wrap(results.StepInFlight, name, "submit: draws and fetch")
    parts.wrap(results.StepInFlight, "wait", "wait for the device")
    passes: list[float] = []

    def collected(phase: str, _: dict[str, int]) -> None:
        if phase == "start":
            passes.append(time.perf_counter())
        else:
            parts.add("of these: collector", time.perf_counter() - passes.pop())

    gc.callbacks.append(collected)


class Paced:
    """A runner whose steps are said to take a GPU's time, where nothing is computed."""

    def __init__(self, runner: Any) -> None:
        self._runner = runner
        self._tokens: list[int] = []
        self.limits = runner.limits
        self.progress = 0

    def submit(self, plan: Any) -> None:
        self._runner.submit(plan)
        self._tokens.append(plan.batch_tokens)

    def collect(self) -> Any:
        result = self._runner.collect()
        result.compute_s = STEP_S + TOKEN_S * self._tokens.pop(0)
        return result

    def close(self) -> None:
        self._runner.close()


def add_requests(engine: Any, jobs: list[tuple[list[int], int]], first: int = 0) -> None:
    from headrace.core.request import GenerateRequest, SamplingParams

    for number, (prompt, out) in enumerate(jobs, start=first):
        params = SamplingParams(temperature=0, max_tokens=out, ignore_eos=True)
        engine.add(GenerateRequest(request_id=str(number), prompt_token_ids=prompt, params=params))


def run(engine: Any, parts: Parts, most_steps: int | None = None) -> int:
    """Steps to the end, or so many; the tokens that came."""
    tokens, steps = 0, 0
    while engine.has_work and (most_steps is None or steps < most_steps):
        with parts.part("loop"):
            tokens += len(engine.step())
        parts.end_step()
        steps += 1
    return tokens


def decode(engine: Any, parts: Parts, args: argparse.Namespace, sequences: int) -> None:
    import random

    chooser = random.Random(sequences)
    prompts = [chooser.choices(range(500), k=PROMPT_TOKENS) for _ in range(sequences)]
    total = args.steps + 10 * WARM_STEPS
    add_requests(engine, [(prompt, total) for prompt in prompts])
    while run(engine, parts, 1) < sequences:  # prompts of many take several steps
        pass
    run(engine, parts, WARM_STEPS)
    parts.clear()
    if run(engine, parts, args.steps) != sequences * args.steps:
        raise SystemExit("a sequence gave no token in a step; expected one from each")


def mixed(engine: Any, parts: Parts, args: argparse.Namespace, sequences: int) -> None:
    import random

    chooser = random.Random(0)
    lengths = mixed_lengths(Sizes())
    for first in range(2):  # the second time graphs are there
        jobs = [(chooser.choices(range(500), k=tokens), out) for tokens, out in lengths]
        parts.clear()
        add_requests(engine, jobs, first * len(jobs))
        if run(engine, parts) != sum(out for _, out in lengths):
            raise SystemExit("tokens are missing; expected as many as were asked for")


def measure(args: argparse.Namespace, name: str, sequences: int) -> dict[str, Any]:
    from headrace.backends.cuda.step.results import StepInFlight
    from headrace.core import collector
    from headrace.core.config import SchedulerConfig
    from headrace.engine.loop import Engine

    is_gpu = args.device == "cuda"
    kept = {n: getattr(StepInFlight, n) for n in ("__init__", "fetch", "wait")}
    parts = Parts(time.perf_counter if is_gpu else time.thread_time)
    runner = make_runner(args, sequences)
    config = SchedulerConfig(max_step_growth=STEP_GROWTH)
    engine = Engine(runner if is_gpu else Paced(runner), frozenset(), config)
    watch(parts, engine, runner)
    collector.settle()  # as the engine process of a server does
    try:
        with collector.rarely():
            (mixed if name == "mixed" else decode)(engine, parts, args, sequences)
    finally:
        gc.callbacks.pop()
        for attribute, method in kept.items():
            setattr(StepInFlight, attribute, method)
    runner.close()
    collector.unsettle()
    gc.collect()  # what is watched refers to itself, and the next runner needs its memory
    return summary(parts.steps)


def summary(steps: list[dict[str, float]]) -> dict[str, Any]:
    names = {name for step in steps for name in step}
    found: dict[str, Any] = {"steps": len(steps), "parts": {}}
    for name in sorted(names):
        found["parts"][name] = _figures([step.get(name, 0.0) for step in steps])
    left_out = ("wait for the device", "of these: collector")
    whole = [sum(t for n, t in step.items() if n not in left_out) for step in steps]
    found["parts"]["host, in all"] = _figures(whole)
    return found


def _figures(seconds: list[float]) -> dict[str, float]:
    values = sorted(1e6 * value for value in seconds)
    return {
        "mean_us": statistics.fmean(values),
        "p10_us": values[len(values) // 10],
        "median_us": statistics.median(values),
        "p99_us": values[min(len(values) - 1, int(0.99 * len(values)))],
        "most_us": values[-1],
    }


def show(report: dict[str, Any]) -> None:
    for name, found in report["workloads"].items():
        print(f"{name}: {found['steps']} steps")
        for part, row in found["parts"].items():
            figures = "   ".join(f"{name[:-3]} {row[name]:7.0f}" for name in row)
            print(f"  {part:28} {figures}  us")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--device", default="cpu", choices=["cpu", "cuda"])
    parser.add_argument("--shape", default="tiny", choices=SHAPES)
    parser.add_argument("--max-layers", type=int, help="of the shape: to load sooner")
    parser.add_argument("--sequences", type=int, nargs="+", default=[1, 64, 256, 512])
    parser.add_argument("--steps", type=int, default=300)
    parser.add_argument("--no-mixed", action="store_true")
    parser.add_argument("--out", type=Path, help="write the figures here as JSON")
    args = parser.parse_args()
    if args.device == "cpu":
        os.environ["TRITON_INTERPRET"] = "1"  # before triton is imported: no GPU to compile for
    report: dict[str, Any] = {"device": args.device, "shape": args.shape, "workloads": {}}
    for sequences in args.sequences:
        report["workloads"][f"decode {sequences}"] = measure(args, "decode", sequences)
    if not args.no_mixed:
        report["workloads"]["mixed"] = measure(args, "mixed", 256)
    if args.out is not None:
        args.out.write_text(json.dumps(report, indent=1) + "\n")
    show(report)


if __name__ == "__main__":
    main()
