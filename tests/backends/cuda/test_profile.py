"""Profiles of steps on a GPU: costs against the model's own count, a trace by hand, and steps run
through the interpreter."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.backends.cuda.test_assemble_cuda import folder as folder
from tests.backends.cuda.tiny import SPECS, make_weights

from headrace.backends.cuda.costs import DRAWS, INPUTS, NORMS, PRODUCTS, cost_of, group_of
from headrace.backends.cuda.kernel_trace import (
    INSTRUCTION,
    STEP,
    named_as,
    read_steps,
    with_instructions,
)
from headrace.backends.cuda.runner import CudaRunner
from headrace.calibrate.gpu_operations import NO_KERNELS, profile_gpu_steps
from headrace.calibrate.step_profile import Peaks
from headrace.calibrate.steps import Point
from headrace.models.counting import count_step
from headrace.models.counting_ops import Chunk, WeightSize
from headrace.weights.weight import Weight

LIMITS: dict[str, Any] = {"total_blocks": 32, "max_batch_tokens": 16, "max_sequences": 2}


@pytest.fixture(scope="module")
def runner(device: torch.device) -> Any:
    spec = SPECS["llama"]
    with CudaRunner(spec, make_weights(spec), **LIMITS, device=device) as made:
        yield made


@pytest.mark.parametrize("name", sorted(SPECS))
def test_products_are_those_of_the_models_own_count(name: str, device: torch.device) -> None:
    spec, weights = SPECS[name], make_weights(SPECS[name])
    chunks = [Chunk(tokens=1, start=20), Chunk(tokens=9, start=3), Chunk(tokens=5, wanted=0)]

    def size(_role: str, weight: Weight) -> WeightSize:
        shape = weight.parts[0].shape
        rows = sum(part.shape[0] for part in weight.parts) if len(shape) == 2 else 1
        return WeightSize(rows, shape[-1], 0.0)

    counted = count_step(spec, weights.map(size), chunks, kv_value_bytes=2)
    with CudaRunner(spec, weights, **LIMITS, device=device) as made:
        costs = [cost_of(each, chunks, "bf16") for each in made.program.instructions]
    assert sum(cost.flops for cost in costs) == counted.flops
    attention = [cost for cost in costs if cost.name.startswith("attention")]
    assert sum(cost.flops for cost in attention) == counted.attention_flops
    least = counted.kv_read_bytes + counted.kv_written_bytes
    assert least < sum(cost.bytes for cost in attention) < 3 * least + 1e5


def test_a_kernel_has_its_own_group() -> None:
    cost = cost_of_product = None
    assert group_of("_pieces_kernel", cost) == DRAWS
    assert group_of("Memcpy HtoD (Pinned -> Device)", cost_of_product) == INPUTS
    assert group_of("prepare_kernel", None) == NORMS
    assert group_of("nvjet_sm90_tst", None) == "other"


def event(name: str, cat: str, ts: float, dur: float, correlation: int | None = None) -> Any:
    args = {} if correlation is None else {"correlation": correlation}
    return {"ph": "X", "name": name, "cat": cat, "ts": ts, "dur": dur, "args": args}


def launched() -> dict[str, Any]:
    """A step of two instructions, the second of two kernels, and a copy that is of none."""
    return {
        "traceEvents": [
            event("fill", "kernel", 1, 2, 1),
            event(STEP, "user_annotation", 100, 200),
            event(STEP, "gpu_user_annotation", 100, 200),
            event(f"{INSTRUCTION}0", "user_annotation", 110, 10),
            event(f"{INSTRUCTION}1", "user_annotation", 121, 30),
            event("cuLaunchKernelEx", "cuda_driver", 112, 2, 7),
            event("cuLaunchKernelEx", "cuda_driver", 122, 2, 8),
            event("cudaLaunchKernel", "cuda_runtime", 130, 2, 9),
            event("cudaMemcpyAsync", "cuda_runtime", 160, 2, 10),
            event("dot_kernel", "kernel", 115, 10, 7),
            # Begins while the one before it still runs: adds 15 of its 20.
            event("prepare_kernel", "kernel", 120, 20, 8),
            event("dot_kernel", "kernel", 145, 5, 9),
            event("Memcpy DtoH", "gpu_memcpy", 165, 5, 10),
            {"ph": "i", "name": "no time", "ts": 3},
        ]
    }


def test_kernels_get_the_instruction_that_launched_them() -> None:
    [step] = read_steps(launched())
    names = ["dot_kernel", "prepare_kernel", "dot_kernel", "Memcpy DtoH"]
    assert [run.name for run in step] == names
    assert [run.instruction for run in step] == [0, 1, 1, None]
    assert [run.seconds * 1e6 for run in step] == pytest.approx([10, 15, 5, 5])
    assert step[0].began_s * 1e6 == pytest.approx(15)


def test_kernels_of_a_graph_get_theirs_by_their_order() -> None:
    [known] = read_steps(launched())
    graph = [
        event(STEP, "user_annotation", 1000, 100),
        event("cudaGraphLaunch", "cuda_runtime", 1001, 2, 30),
        *(
            event(run.name, "kernel", 1005 + 4 * at, 3, 30)
            for at, run in enumerate(known)
        ),
    ]  # fmt: skip
    found = read_steps({"traceEvents": graph})
    assert [run.instruction for run in found[0]] == [None] * 4
    assert named_as(found, known)
    assert [r.instruction for r in with_instructions(found[0], known)] == [0, 1, 1, None]
    assert not named_as(found, known[1:])
    swapped = [known[1], known[0], *known[2:]]  # a short kernel ended before the one it follows
    assert named_as([swapped], known)
    assert [r.instruction for r in with_instructions(swapped, known)] == [1, 0, 1, None]


@pytest.fixture
def short(monkeypatch: pytest.MonkeyPatch) -> None:
    """The interpreter takes a tenth of a second for a step; blocks of zeros are as good there."""
    monkeypatch.setattr("headrace.calibrate.steps.Steps.fill", lambda _steps, _points: None)
    monkeypatch.setattr("headrace.backends.cuda.profile.WARM_STEPS", 0)
    monkeypatch.setattr("headrace.calibrate.engine_steps.PROMPT_TOKENS", 4)
    monkeypatch.setattr("headrace.calibrate.engine_steps.STEPS", 3)


@pytest.mark.usefixtures("short")
def test_steps_of_a_tiny_model(runner: CudaRunner) -> None:
    point = Point(decode_rows=2, context_tokens=3)
    peaks = Peaks(flops_s={"bf16": 1e9}, bytes_s=1e9, source="by hand")
    vocab_size = SPECS["llama"].vocab_size
    found = profile_gpu_steps(runner, vocab_size, [point], 1, peaks, ["graphs", "launches"])
    step = found[-1]
    is_gpu = runner.device.type == "cuda"
    assert [each.mode for each in found] == ["graphs", "launches"][0 if is_gpu else 1 :]
    assert step.note == (None if is_gpu else NO_KERNELS)
    by_name = {each.name: each for each in step.operations}
    assert by_name["attention"].calls == 2
    product = by_name["norm, linear 32 x 128 bf16"]
    assert product.group == PRODUCTS
    assert product.flops == 2 * 2 * (2 * 32 * 128)  # layers, rows, multiply-adds
    assert all(each.seconds > 0 for each in step.operations)
    assert found[0].engine is not None
    assert found[0].engine.step_s > 0
    assert {each.lane for each in step.slices} >= {"operations", "kernels"}


@pytest.mark.usefixtures("short")
@pytest.mark.skipif(torch.cuda.is_available(), reason="the GPU is made up")
def test_the_command(folder: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    from typer.testing import CliRunner

    from headrace.backends.cuda import peaks as peaks_module
    from headrace.cli.commands import app

    made = peaks_module.Peaks(read_bytes_s=4e12, multiplies_s={"bf16": 3.5e14})
    monkeypatch.setattr(peaks_module, "measure_peaks", lambda: made)
    monkeypatch.setattr("headrace.backends.cuda.runner.CudaRunner", _on_cpu())
    asked = ["profile", str(folder), "--device", "cuda", "--load-format", "dummy"]
    asked += ["--rows", "1", "--context", "2", "--rounds", "1"]
    trace = tmp_path / "trace.json"
    shown = CliRunner().invoke(app, [*asked, "--explain", "--trace", str(trace)])
    assert shown.exit_code == 0, shown.output
    assert "peaks: 700 bf16 TFLOP/s; 4,000.0 GB/s; measured now" in shown.output
    assert "1 decode after 2, launches" in shown.output
    assert "products" in shown.output
    assert all(len(line) <= 100 for line in shown.output.replace(str(trace), "").splitlines())
    assert json.loads(trace.read_text())["traceEvents"]
    shown = CliRunner().invoke(app, [*asked, "--nvtx", "--graphs", "off"])
    assert "NVTX" in shown.output


def _on_cpu() -> Any:
    """A class, since the command asks whether a runner is of it."""

    class OnCpu(CudaRunner):
        def __init__(self, *args: Any, **settings: Any) -> None:
            super().__init__(*args, **{**settings, "device": torch.device("cpu")})

    return OnCpu
