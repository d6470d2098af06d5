"""The machine's ceilings, and what the backend's own products reach of them.

What a product reaches is known of the CPU backend alone, which has counters of this kind. Knows the
backends' runners; no engine.
"""

from __future__ import annotations

import sys

from headrace.backends.cpu.profile import measure_peaks
from headrace.backends.cpu.runner import CpuRunner
from headrace.calibrate.steps import Point, Steps
from headrace.core.step import Runner
from headrace.hardware.profile import Ceilings, ProductRate

ROUNDS = 5
LEAST_READ_BYTES = 128 << 20  # less may come from caches


def measure_ceilings(runner: Runner, steps: Steps) -> Ceilings | None:
    if not isinstance(runner, CpuRunner):
        return _gpu_ceilings()
    read_bytes = max(runner.weight_bytes, LEAST_READ_BYTES)
    bandwidth = {}
    for threads in _counts(runner.threads):
        best = max(measure_peaks(threads, read_bytes).bytes for _ in range(3))
        bandwidth[str(threads)] = best
    peaks = [measure_peaks(runner.threads, read_bytes) for _ in range(3)]
    products = []
    for point in (Point(decode_rows=1), Point(prompt_tokens=runner.limits.max_batch_tokens)):
        if point.prompt_tokens < runner.limits.context_tokens:
            products += _rates(runner, steps, point)
    return Ceilings(
        read_bytes_s=bandwidth,
        multiplies_s={
            "int8": max(one.dots for one in peaks),
            "fp32": max(one.floats for one in peaks),
        },
        products=tuple(products),
    )


def _gpu_ceilings() -> Ceilings | None:
    """None where there is no GPU: the reference backend, and CUDA kernels that are interpreted."""
    if "torch" not in sys.modules:  # then no runner uses a GPU, and importing it takes seconds
        return None
    from headrace.backends.cuda.peaks import measure_peaks as measure_gpu

    found = measure_gpu()
    if found is None:
        return None
    return Ceilings(read_bytes_s={"gpu": found.read_bytes_s}, multiplies_s=found.multiplies_s)


def _counts(threads: int) -> list[int]:
    """1, 2, 4, ... and all."""
    return sorted({*(1 << power for power in range(10) if 1 << power < threads), threads})


def _rates(runner: CpuRunner, steps: Steps, point: Point) -> list[ProductRate]:
    """The best of some rounds by operation: noise only takes time away."""
    best: dict[str, ProductRate] = {}
    for _ in range(ROUNDS):
        runner.profile(True)
        try:
            steps.seconds(point)
            timed = runner.take_profile()
        finally:
            runner.profile(False)
        for one in timed:
            if one.seconds <= 0 or not one.multiplies:
                continue
            rate = ProductRate(
                operation=one.name,
                rows=point.batch_tokens,
                multiplies_s=one.multiplies / one.seconds,
                bytes_s=one.bytes / one.seconds,
            )
            before = best.get(one.name)
            if before is None or rate.multiplies_s > before.multiplies_s:
                best[one.name] = rate
    return list(best.values())
