"""Operations of a step: sums and bounds by hand, and a real model's against its arithmetic."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from headrace.assemble import assemble
from headrace.backends.cpu.profile import OperationProfile
from headrace.backends.cpu.runner import CpuRunner
from headrace.calibrate.operations import Round, cpu_peaks, profile_steps, summed
from headrace.calibrate.step_profile import Peaks, trace_of
from headrace.calibrate.steps import Point
from headrace.plan.fit_work import work_of

PEAKS = Peaks(flops_s={"int8": 2e9, "fp32": 2e8}, bytes_s=1e9, source="by hand")


def rounds(*times_s: float) -> list[Round]:
    """A quantized product of 1e6 multiply-adds over 2e6 bytes, and a float one of 1e6."""
    found: list[Round] = []
    for time_s in times_s:
        operations = [
            OperationProfile("norm, linear 4 x 4 u4", 3, time_s, time_s, 1e6, 2e6),
            OperationProfile("attention", 2, 2 * time_s, 4 * time_s, 1e6, 0.0),
            OperationProfile("embed", 1, 1e-6, 1e-6, 0.0, 0.0),
        ]
        found.append((4 * time_s, operations))
    return found


def test_the_best_round_counts_and_bounds_are_those_of_the_peaks() -> None:
    step = summed(Point(decode_rows=8), rounds(0.02, 0.01, 0.04), PEAKS, threads=2)
    attention, product, embed = step.operations
    assert (product.seconds, product.median_s, product.calls) == (0.01, 0.02, 3)
    assert product.flops == 2e6
    assert product.busy_share == 0.5
    assert attention.busy_share == 1.0
    # 1e6 multiply-adds at 1e9 a second take 1 ms; 2e6 bytes at 1e9 a second take 2 ms.
    assert product.bound_s == pytest.approx(2e-3)
    assert product.of_peak == pytest.approx(0.2)
    # float32 ones at 1e8 a second take 10 ms.
    assert attention.bound_s == pytest.approx(0.01)
    assert (embed.bound_s, embed.flops, embed.of_peak, embed.busy_share) == (None,) * 4
    assert (step.best_s, step.median_s) == (0.04, 0.08)
    assert step.tokens_s == 200
    assert step.outside_s == pytest.approx(0.02, abs=1e-4)


def test_without_peaks_there_is_no_share() -> None:
    step = summed(Point(decode_rows=8), rounds(0.02), None, threads=2)
    assert all(operation.of_peak is None for operation in step.operations)


def test_a_trace_has_every_operation_inside_its_step() -> None:
    points = [Point(decode_rows=8), Point(prompt_tokens=64)]
    made = [summed(point, rounds(0.02), PEAKS, threads=2) for point in points]
    events = json.loads(json.dumps(trace_of(made)))["traceEvents"]
    timed = [event for event in events if event["ph"] == "X"]
    steps = [event for event in timed if event["tid"] == 0]
    assert [step["name"] for step in steps] == ["8 decode after 32", "prompt of 64"]
    assert steps[0]["ts"] + steps[0]["dur"] < steps[1]["ts"]
    inside = [event for event in timed if event["tid"] == 1]
    assert len(inside) == 6
    for event in inside:
        assert any(
            step["ts"] <= event["ts"]
            and event["ts"] + event["dur"] <= step["ts"] + step["dur"] + 1e-6
            for step in steps
        )


def test_a_models_products_are_those_of_its_arithmetic(default_model_path: Path) -> None:
    loaded = assemble(str(default_model_path), kv_tokens=2048, device="cpu")
    try:
        runner = loaded.runner
        assert isinstance(runner, CpuRunner)
        peaks = cpu_peaks(runner)
        points = [Point(decode_rows=4, context_tokens=32)]
        [step] = profile_steps(runner, loaded.spec.vocab_size, points, 2, peaks)
    finally:
        loaded.close()
    products = sum(each.flops or 0.0 for each in step.operations if "linear" in each.name)
    assert products == pytest.approx(4 * work_of(loaded.spec, {}).token_flops, rel=1e-6)
    assert min(*peaks.flops_s.values(), peaks.bytes_s) > 0
    assert step.engine is not None
    assert 0 < step.engine.host_s < step.engine.step_s
    assert step.best_s > 0
