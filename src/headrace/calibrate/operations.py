"""A step by operation: how long each takes, what it achieves, and how close that is to the peaks.

On a CPU the native program times its operations and counts what they multiply and read. Of several
rounds the best is kept, because noise only adds time. Knows the CPU's runner; no server.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial

from headrace.backends.cpu.profile import OperationProfile, measure_peaks
from headrace.backends.cpu.profile import Peaks as CpuPeaks
from headrace.backends.cpu.runner import CpuRunner
from headrace.calibrate.steps import Point, Steps

LEAST_BUSY_S = 2e-5  # shorter ones end before the clock can tell


@dataclass(frozen=True, slots=True, kw_only=True)
class Peaks:
    """What the device can do at most, a second. A multiply-add is two operations."""

    flops_s: float  # of the type that the products are computed in
    float_flops_s: float  # of float32, where that is another
    bytes_s: float
    source: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Operation:
    name: str
    calls: int
    seconds: float  # in the best round
    median_s: float
    busy_share: float | None  # of the threads' time; None: not known
    flops: float | None
    bytes: float | None
    bound_s: float | None  # at the peaks; None: not known

    @property
    def of_peak(self) -> float | None:
        return None if not self.bound_s or self.seconds <= 0 else self.bound_s / self.seconds


@dataclass(frozen=True, slots=True, kw_only=True)
class Slice:
    """A bar of a trace; seconds since its step began."""

    name: str
    began_s: float
    seconds: float


@dataclass(frozen=True, slots=True, kw_only=True)
class StepProfile:
    point: Point
    best_s: float
    median_s: float
    operations: tuple[Operation, ...]  # the longest first
    outside_s: float  # of the median step: what no operation accounts for

    @property
    def tokens_s(self) -> float:
        return self.point.batch_tokens / self.best_s


Round = tuple[float, list[OperationProfile]]  # the whole step, and its operations


def profile_steps(
    runner: CpuRunner, vocab_size: int, points: Sequence[Point], rounds: int, peaks: Peaks | None
) -> list[StepProfile]:
    steps = Steps(runner, vocab_size)
    steps.fill(points)
    found = []
    for point in points:
        steps.seconds(point)  # the first of a shape may allocate, or compile a kernel
        taken = [_round(runner, partial(steps.seconds, point)) for _ in range(rounds)]
        found.append(_summed(point, taken, peaks, runner.threads))
    return found


def cpu_peaks(runner: CpuRunner) -> Peaks:
    """Measured now, on the runner's threads: the best of three."""
    found = [measure_peaks(runner.threads, max(runner.weight_bytes, 128 << 20)) for _ in range(3)]
    return Peaks(
        flops_s=2 * max(each.dots for each in found),
        float_flops_s=2 * max(each.floats for each in found),
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


def _summed(
    point: Point, rounds: Sequence[Round], peaks: Peaks | None, threads: int
) -> StepProfile:
    by_name: dict[str, list[OperationProfile]] = {}
    for _, operations in rounds:
        for each in operations:
            by_name.setdefault(each.name, []).append(each)
    made = []
    for name, all_ in by_name.items():
        best = min(all_, key=lambda each: each.seconds)
        is_counted = best.multiplies > 0
        is_long = best.seconds > LEAST_BUSY_S
        busy = best.worked_s / threads / best.seconds if is_long else None
        made.append(
            Operation(
                name=name,
                calls=best.calls,
                seconds=best.seconds,
                median_s=statistics.median(each.seconds for each in all_),
                busy_share=busy,
                flops=2 * best.multiplies if is_counted else None,
                bytes=best.bytes if is_counted else None,
                bound_s=_bound_s(best, peaks) if is_counted else None,
            )
        )
    wholes = [whole_s for whole_s, _ in rounds]
    outside = [whole_s - sum(o.seconds for o in operations) for whole_s, operations in rounds]
    return StepProfile(
        point=point,
        best_s=min(wholes),
        median_s=statistics.median(wholes),
        operations=tuple(sorted(made, key=lambda each: -each.seconds)),
        outside_s=max(0.0, statistics.median(outside)),
    )


def _bound_s(operation: OperationProfile, peaks: Peaks | None) -> float | None:
    if peaks is None:
        return None
    in_multiplies = CpuPeaks(peaks.flops_s / 2, peaks.float_flops_s / 2, peaks.bytes_s)
    return operation.bound_s(in_multiplies)


def trace_of(steps: Sequence[StepProfile]) -> dict[str, object]:
    """In the Chrome trace format, for ui.perfetto.dev or chrome://tracing. Where the times of
    single calls are not known: each operation has one slice as long as all its calls, the longest
    first."""
    return {"traceEvents": list(_events(steps)), "displayTimeUnit": "ms"}


def _events(steps: Sequence[StepProfile]) -> Iterator[dict[str, object]]:
    for lane, name in ((0, "steps"), (1, "operations")):
        yield {"name": "thread_name", "ph": "M", "pid": 1, "tid": lane, "args": {"name": name}}
    at_s = 0.0
    for step in steps:
        slices = _laid_out(step.operations)
        whole_s = max([step.best_s, *(each.began_s + each.seconds for each in slices)])
        yield _event(Slice(name=name_of(step.point), began_s=0.0, seconds=whole_s), at_s, 0)
        for each in slices:
            yield _event(each, at_s, 1)
        at_s += whole_s * 1.05


def _laid_out(operations: Sequence[Operation]) -> list[Slice]:
    """One after the other, as if each ran once."""
    found, at_s = [], 0.0
    for each in operations:
        name = f"{each.name} × {each.calls}"
        found.append(Slice(name=name, began_s=at_s, seconds=each.seconds))
        at_s += each.seconds
    return found


def _event(each: Slice, at_s: float, lane: int) -> dict[str, object]:
    began_us, long_us = (at_s + each.began_s) * 1e6, each.seconds * 1e6
    return {"name": each.name, "ph": "X", "pid": 1, "tid": lane, "ts": began_us, "dur": long_us}


def name_of(point: Point) -> str:
    parts = []
    if point.decode_rows:
        parts.append(f"{point.decode_rows} decode after {point.context_tokens}")
    if point.prompt_tokens:
        parts.append(f"prompt of {point.prompt_tokens}")
    return ", ".join(parts)
