"""A step by operation on a CPU: how long each takes, what it achieves, how near that is to the
peaks.

The native program times its operations and counts what they multiply and read. Of several rounds
the best is kept, because noise only adds time. Knows the CPU's runner; no server.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial

from headrace.backends.cpu.profile import OperationProfile, measure_peaks
from headrace.backends.cpu.runner import CpuRunner
from headrace.calibrate.engine_steps import engine_step
from headrace.calibrate.step_profile import Operation, Peaks, StepProfile
from headrace.calibrate.steps import Point, Steps

LEAST_BUSY_S = 2e-5  # shorter ones end before the clock can tell

Round = tuple[float, list[OperationProfile]]  # the whole step, and its operations


def profile_steps(
    runner: CpuRunner, vocab_size: int, points: Sequence[Point], rounds: int, peaks: Peaks | None
) -> list[StepProfile]:
    steps = Steps(runner, vocab_size)
    steps.fill(points)
    found = []
    for point in points:
        steps.seconds(point)  # the first of a shape may allocate
        taken = [_round(runner, partial(steps.seconds, point)) for _ in range(rounds)]
        step = summed(point, taken, peaks, runner.threads)
        engine = engine_step(runner, point.decode_rows, lambda: runner.native_s)
        found.append(replace(step, engine=engine))
    return found


def cpu_peaks(runner: CpuRunner) -> Peaks:
    """Measured now, on the runner's threads: the best of three."""
    found = [measure_peaks(runner.threads, max(runner.weight_bytes, 128 << 20)) for _ in range(3)]
    return Peaks(
        flops_s={
            "int8": 2 * max(each.dots for each in found),
            "fp32": 2 * max(each.floats for each in found),
        },
        bytes_s=max(each.bytes for each in found),
        source=f"measured now on {runner.threads} threads",
    )


def _round(runner: CpuRunner, step: Callable[[], float]) -> Round:
    runner.profile(True)
    try:
        began = time.perf_counter()
        step()
        whole_s = time.perf_counter() - began
        return whole_s, runner.take_profile()
    finally:
        runner.profile(False)


def summed(point: Point, rounds: Sequence[Round], peaks: Peaks | None, threads: int) -> StepProfile:
    by_name: dict[str, list[OperationProfile]] = {}
    for _, operations in rounds:
        for each in operations:
            by_name.setdefault(each.name, []).append(each)
    made = [_operation(all_, peaks, threads) for all_ in by_name.values()]
    wholes = [whole_s for whole_s, _ in rounds]
    outside = [whole_s - sum(o.seconds for o in operations) for whole_s, operations in rounds]
    return StepProfile(
        point=point,
        best_s=min(wholes),
        median_s=statistics.median(wholes),
        operations=tuple(sorted(made, key=lambda each: -each.seconds)),
        outside_s=max(0.0, statistics.median(outside)),
    )


def _operation(rounds: Sequence[OperationProfile], peaks: Peaks | None, threads: int) -> Operation:
    best = min(rounds, key=lambda each: each.seconds)
    is_counted = best.multiplies > 0
    is_long = best.seconds > LEAST_BUSY_S
    flops = 2 * best.multiplies
    bound_s = None
    if peaks is not None and is_counted:
        bound_s = peaks.bound_s(flops, best.bytes, "int8" if best.quantized else "fp32")
    return Operation(
        name=best.name,
        calls=best.calls,
        seconds=best.seconds,
        median_s=statistics.median(each.seconds for each in rounds),
        busy_share=best.worked_s / threads / best.seconds if is_long else None,
        flops=flops if is_counted else None,
        bytes=best.bytes if is_counted else None,
        bound_s=bound_s,
    )
