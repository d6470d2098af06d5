"""A step by operation on a GPU: its kernels' times, what they achieve, how near that is to peaks.

Each step is measured as it is served, from CUDA graphs, and launched kernel by kernel. Whole steps
are timed without a profiler, kernels with it. Of several rounds the best is kept for each
operation. Knows the CUDA backend's profiler; no server. Importing it does not import torch.
"""

from __future__ import annotations

import statistics
import time
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import replace
from itertools import groupby
from typing import TYPE_CHECKING

from headrace.backends.cuda.costs import Cost, group_of
from headrace.calibrate.engine_steps import engine_step
from headrace.calibrate.step_profile import Kernel, Operation, Peaks, Slice, StepProfile
from headrace.calibrate.steps import Point, Steps
from headrace.hardware.gpus import Gpu
from headrace.models.counting_ops import Chunk

if TYPE_CHECKING:
    from headrace.backends.cuda.kernel_trace import KernelRun
    from headrace.backends.cuda.profile import Plain, StepKernels
    from headrace.backends.cuda.runner import CudaRunner

GRAPHS, LAUNCHES = "graphs", "launches"
UNLIKE = "the graph's kernels are not those of the launches: they are shown by their own names"
NO_KERNELS = "there is no GPU: launches are timed on the host"


def profile_gpu_steps(
    runner: CudaRunner,
    vocab_size: int,
    points: Sequence[Point],
    rounds: int,
    peaks: Peaks | None,
    modes: Sequence[str],
) -> list[StepProfile]:
    from headrace.backends.cuda.profile import StepProfiler

    profiler = StepProfiler(runner)
    modes = modes if profiler.has_graphs else [LAUNCHES]
    steps = Steps(runner, vocab_size)
    steps.fill(points)
    found = []
    for point in points:
        step = _step(runner, steps, point)
        costs = profiler.costs(chunks_of(point))
        for mode in modes:
            graphs = mode == GRAPHS
            plain = profiler.plain(step, rounds, graphs=graphs)
            kernels = profiler.profiled(step, rounds, graphs=graphs)
            note = None if runner.device.type == "cuda" else NO_KERNELS
            found.append(summed(point, mode, plain, kernels, costs, peaks, note=note))
    engines = {point: engine_step(runner, point.decode_rows) for point in points}
    return [
        replace(each, engine=engines[each.point]) if each.mode == modes[0] else each
        for each in found
    ]


def range_gpu_steps(
    runner: CudaRunner, vocab_size: int, points: Sequence[Point], rounds: int, modes: Sequence[str]
) -> None:
    """Only runs the steps, inside NVTX ranges."""
    from headrace.backends.cuda.profile import StepProfiler

    profiler = StepProfiler(runner)
    steps = Steps(runner, vocab_size)
    steps.fill(points)
    for point in points:
        for mode in modes:
            profiler.ranged(_step(runner, steps, point), rounds, graphs=mode == GRAPHS)


def gpu_peaks() -> Peaks | None:
    """Measured now; None without a GPU."""
    from headrace.backends.cuda.peaks import measure_peaks

    found = measure_peaks()
    if found is None:
        return None
    rates = {name: 2 * rate for name, rate in found.multiplies_s.items()}
    return Peaks(flops_s=rates, bytes_s=found.read_bytes_s, source="measured now")


def sheet_of(gpu: Gpu) -> str:
    """The data sheet's figures, to be shown beside measured ones."""
    rates = [f"{gpu.flops[name] / 1e12:,.0f} {name}" for name in ("bf16", "fp8", "int8")
             if name in gpu.flops]  # fmt: skip
    parts = [f"{', '.join(rates)} TFLOP/s"] if rates else []
    if gpu.bandwidth_bytes_s is not None:
        parts.append(f"{gpu.bandwidth_bytes_s / 1e9:,.0f} GB/s")
    return f"{gpu.label}'s data sheet: {', '.join(parts)}"


def chunks_of(point: Point) -> list[Chunk]:
    chunks = [Chunk(tokens=1, start=point.context_tokens) for _ in range(point.decode_rows)]
    if point.prompt_tokens:
        wanted = 1 if point.draws else 0
        chunks.append(Chunk(tokens=point.prompt_tokens, start=point.prompt_start, wanted=wanted))
    return chunks


def _step(runner: CudaRunner, steps: Steps, point: Point) -> Callable[[], Plain]:
    from headrace.backends.cuda.profile import Plain

    def run() -> Plain:
        plan = steps.plan(point)
        began_s = time.perf_counter()
        runner.submit(plan)
        submit_s = time.perf_counter() - began_s
        result = runner.collect()
        whole_s = time.perf_counter() - began_s
        return Plain(whole_s=whole_s, submit_s=submit_s, device_s=result.compute_s)

    return run


def summed(
    point: Point,
    mode: str,
    plain: Sequence[Plain],
    rounds: Sequence[StepKernels],
    costs: Sequence[Cost],
    peaks: Peaks | None,
    *,
    note: str | None = None,
) -> StepProfile:
    taken = [_by_operation(each.kernels, costs) for each in rounds]
    names = dict.fromkeys(name for each in taken for name in each)
    is_known = any(run.instruction is not None for each in rounds for run in each.kernels)
    operations = [
        _operation(name, [each[name] for each in taken if name in each], costs, peaks)
        for name in names
    ]
    wholes = [each.whole_s for each in plain]
    kernels_s = statistics.median(sum(run.seconds for run in each.kernels) for each in rounds)
    best = min(rounds, key=lambda each: sum(run.seconds for run in each.kernels))
    return StepProfile(
        point=point,
        best_s=min(wholes),
        median_s=statistics.median(wholes),
        operations=tuple(sorted(operations, key=lambda each: -each.seconds)),
        outside_s=max(0.0, statistics.median(wholes) - kernels_s),
        mode=mode,
        submit_s=statistics.median(each.submit_s for each in plain),
        slices=tuple(_slices(best.kernels, costs)),
        note=note or (None if is_known else UNLIKE),
    )


def _by_operation(
    kernels: Sequence[KernelRun], costs: Sequence[Cost]
) -> dict[str, list[KernelRun]]:
    """By the name of the instruction; kernels without one by their group, or by their own name."""
    found: defaultdict[str, list[KernelRun]] = defaultdict(list)
    for run in kernels:
        found[_name(run, costs)].append(run)
    return dict(found)


def _name(run: KernelRun, costs: Sequence[Cost]) -> str:
    if run.instruction is not None:
        return costs[run.instruction].name
    group = group_of(run.name, None)
    return run.name if group == "other" else group


def _operation(
    name: str,
    rounds: Sequence[Sequence[KernelRun]],
    costs: Sequence[Cost],
    peaks: Peaks | None,
) -> Operation:
    best = min(rounds, key=lambda runs: sum(run.seconds for run in runs))
    numbers = {run.instruction for run in best if run.instruction is not None}
    mine = [costs[number] for number in numbers]
    flops, moved = sum(cost.flops for cost in mine), sum(cost.bytes for cost in mine)
    bound_s = None
    if peaks is not None and mine:
        bound_s = peaks.bound_s(flops, moved, mine[0].rate)
    group = mine[0].group if mine else group_of(best[0].name, None)
    return Operation(
        name=name,
        calls=len(numbers) or len(best),
        seconds=sum(run.seconds for run in best),
        median_s=statistics.median(sum(run.seconds for run in runs) for runs in rounds),
        flops=flops or None,
        bytes=moved or None,
        bound_s=bound_s,
        group=group,
        kernels=tuple(_kernels(best, mine[0] if mine else None)),
    )


def _kernels(runs: Sequence[KernelRun], cost: Cost | None) -> list[Kernel]:
    by_name: defaultdict[str, list[float]] = defaultdict(list)
    for run in runs:
        by_name[run.name].append(run.seconds)
    made = [
        Kernel(name=name, group=group_of(name, cost), calls=len(all_), seconds=sum(all_))
        for name, all_ in by_name.items()
    ]
    return sorted(made, key=lambda each: -each.seconds)


def _slices(kernels: Sequence[KernelRun], costs: Sequence[Cost]) -> list[Slice]:
    """Kernels as they ran, and operations above them. A kernel may begin before the one before it
    has ended, and slices of one lane can't overlap: every other kernel has a lane of its own."""
    found = [
        Slice(
            name=run.name,
            began_s=run.began_s,
            seconds=run.ended_s - run.began_s,
            lane="kernels" if at % 2 == 0 else "kernels, every other",
        )
        for at, run in enumerate(kernels)
    ]
    neighbours = groupby(
        enumerate(kernels), key=lambda pair: (pair[1].instruction, _alone(pair[0], pair[1]))
    )
    for _, pairs in neighbours:
        runs = [run for _, run in pairs]
        began_s = runs[0].ended_s - runs[0].seconds
        found.append(
            Slice(
                name=_name(runs[0], costs),
                began_s=began_s,
                seconds=runs[-1].ended_s - began_s,
            )
        )
    return found


def _alone(at: int, run: KernelRun) -> int | None:
    """Kernels without an instruction have nothing in common."""
    return at if run.instruction is None else None
