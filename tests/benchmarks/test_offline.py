"""The offline benchmark: runs whole on a CPU, reports what it measured, and knows its floors."""

from __future__ import annotations

import json
import math
import time
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest

import offline
from headrace.core.config import EngineConfig
from headrace.core.request import FinishReason, SampledToken
from headrace.models.registry import describe_config
from headrace.models.spec import ModelSpec
from offline_anchors import TARGETS, VLLM, Floors
from offline_workloads import DRAWS, TINY, WORKLOADS, Bench, Figure, Sizes, mixed_lengths
from shapes import SHAPES


def spec_of(name: str) -> ModelSpec:
    return describe_config(SHAPES[name], [])[0]


@pytest.mark.parametrize("device", ["cpu", "reference"])
def test_every_workload_runs(
    device: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "figures.json"
    offline.main(
        ["--device", device, "--shape", "tiny", "--rounds", "1", "--out", str(out)]
    )  # fmt: skip
    report = json.loads(out.read_text())
    names = [row["name"] for row in report["figures"]]
    assert names == [
        "start-up", "decode 1", "decode 4", *(f"draws 2 {name}" for name in DRAWS),
        "prefill 48", "prefill 96", "long 2 x 128", "mixed",
        "throughput", "prefix cold", "prefix warm",
    ]  # fmt: skip
    for row in report["figures"]:
        assert math.isfinite(row["value"])  # a difference of two times may be anything here
        assert min(row["samples"]) <= row["value"] <= max(row["samples"])
        assert "vllm" not in row  # nothing of an H200 beside a CPU's figures
    assert report["left_out"] == []
    assert (report["memory"] != {}) == (device == "cpu")
    table = capsys.readouterr().out
    assert all(name in table for name in names)


def test_what_there_was_no_time_for_is_said(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "figures.json"
    offline.main(["--device", "cpu", "--shape", "tiny", "--budget-s", "0", "--out", str(out)])
    assert json.loads(out.read_text())["left_out"] == list(WORKLOADS)
    assert f"left out, for lack of time: {', '.join(WORKLOADS)}" in capsys.readouterr().out


class FakeEngine:
    """Gives each request its tokens, or an error, or one too few."""

    def __init__(self, fault: str | None = None) -> None:
        self.stats = SimpleNamespace(compute_s=0.0, sample_s=0.0)
        self.fault = fault
        self.prompts: list[list[int]] = []
        self.outputs: list[int] = []
        self._queue: list[SampledToken] = []

    @property
    def has_work(self) -> bool:
        return bool(self._queue)

    def add(self, request: object) -> None:
        tokens: int = request.params.max_tokens  # type: ignore[attr-defined]
        self.prompts.append(request.prompt_token_ids)  # type: ignore[attr-defined]
        self.outputs.append(tokens)
        error = "out of luck" if self.fault == "error" else None
        token = SampledToken(
            request_id="0", token_id=1, logprob=0.0, error=error, finish_reason=FinishReason.LENGTH
        )
        self._queue += [token] * (tokens - (1 if self.fault == "short" else 0))

    def step(self) -> list[SampledToken]:
        return [self._queue.pop()]


def bench(engine: FakeEngine, rounds: int = 3) -> Bench:
    return Bench(engine, 100, rounds=rounds)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("fault", "message"), [("error", "failed: out of luck"), ("short", "4 tokens came out")]
)
def test_a_run_that_went_wrong_gives_no_figure(fault: str, message: str) -> None:
    with pytest.raises(SystemExit, match=message):
        bench(FakeEngine(fault)).run([([1, 2], 3), ([3], 3)])


def test_steps_are_timed_with_prompts_that_were_seen_and_prompts_with_new_ones() -> None:
    engine = FakeEngine()
    figures = list(WORKLOADS["decode"](bench(engine), replace(TINY, batches=(2,))))
    assert [figure.name for figure in figures] == ["decode 2"]
    assert len(figures[0].samples) == 3
    assert len({tuple(prompt) for prompt in engine.prompts}) == 2
    assert engine.outputs == [1, 1, 4, 4] + 3 * [1, 1, 6, 6]
    engine = FakeEngine()
    list(WORKLOADS["prefill"](bench(engine), TINY))
    assert len({tuple(prompt) for prompt in engine.prompts}) == len(engine.prompts) == 2 * 11
    engine = FakeEngine()
    list(WORKLOADS["prefix"](bench(engine), TINY))
    beginnings = [tuple(prompt[:128]) for prompt in engine.prompts]
    assert beginnings[::2] == beginnings[1::2]
    assert len(set(beginnings)) == len(beginnings) // 2
    assert len({tuple(prompt) for prompt in engine.prompts}) == len(engine.prompts)


def test_the_mixed_workload_is_pythons_seed_0() -> None:
    lengths = mixed_lengths(Sizes())
    assert len(lengths) == 256
    assert lengths[0] == (964, 494)  # (randint, randint) of random.Random(0)
    assert all(100 <= n <= 1024 for pair in lengths for n in pair)


def test_floors_are_those_that_were_worked_out_by_hand() -> None:
    """ANCHORS: bytes of the weights at 4.57 TB/s for one sequence, products at 680 TF/s."""
    spec = spec_of("llama-3.1-8b")
    for precision, expected_ms in (("bf16", 3.29), ("fp8", 1.76), ("int4", 1.09)):
        assert 1e3 * Floors(spec, precision, 2).step_s(1, 0) == pytest.approx(expected_ms, rel=0.01)
    assert 1e3 * Floors(spec_of("qwen3-0.6b"), "bf16", 2).step_s(1, 0) == pytest.approx(0.26, 0.02)
    floors = Floors(spec, "bf16", 2)
    for tokens, expected_ms in ((512, 11), (2048, 42)):  # where attention is little
        assert 1e3 * floors.prompt_s(tokens) == pytest.approx(expected_ms, rel=0.07)
    long = floors.step_s(16, 8192) - floors.step_s(1, 0)
    assert 1e3 * long == pytest.approx(3.75, rel=0.03)  # 17.2 GB of keys and values
    assert floors.prompt_s(4016, 4000) < 0.1 * floors.prompt_s(4016)
    assert floors.batch_s([(512, 128)] * 1000) > 2 * 6.9e9 * 639e3 / 680e12


def test_shapes_have_their_names_sizes() -> None:
    billions = {name: spec_of(name).parameters / 1e9 for name in SHAPES}
    assert billions["llama-3.1-8b"] == pytest.approx(8.03, abs=0.01)
    assert billions["llama-3.2-1b"] == pytest.approx(1.236, abs=0.01)
    assert billions["qwen3-0.6b"] == pytest.approx(0.596, abs=0.01)


def test_anchors_are_of_figures_that_exist() -> None:
    sizes = Sizes(prefills=(512, 2048, 8192, 16000), long=((16, 8192), (64, 4096)))
    names = {"start-up", "mixed", "throughput", "prefix cold", "prefix warm"}
    names |= {f"decode {n}" for n in sizes.batches} | {f"prefill {n}" for n in sizes.prefills}
    names |= {f"long {n} x {tokens}" for n, tokens in sizes.long}
    for known in (*VLLM.values(), *TARGETS.values()):
        assert known.keys() <= names
    for (shape, precision), targets in TARGETS.items():
        floors = Floors(spec_of(shape), precision, 1 if precision == "fp8" else 2)
        for name, target in targets.items():
            floor = offline.floor_of(name, floors, sizes)
            if floor is not None:  # a target that nobody can reach is a mistake
                is_rate = name in ("mixed", "throughput")
                assert target < floor if is_rate else target > floor, name


def test_a_figure_says_how_it_stands_to_its_target() -> None:
    assert offline._verdict({"value": 3.9, "target": 4.0, "unit": "ms"}) == "met"
    assert offline._verdict({"value": 4.4, "target": 4.0, "unit": "ms"}) == "short by 10.0%"
    assert offline._verdict({"value": 9000, "target": 10000, "unit": "tokens/s"}) == (
        "short by 10.0%"
    )
    assert offline._verdict({"value": 12000, "target": 10000, "unit": "tokens/s"}) == "met"
    assert Figure.of("x", "ms", [3.0, 1.0, 2.0]).value == 2.0


def test_a_process_knows_its_age() -> None:
    began = time.time()
    age_s = offline.process_age_s(None)
    assert 0 < age_s < 86400
    assert 0 <= offline.process_age_s(began) < 600
    assert offline.parse(["--started-at", "1.5"]).started_at == 1.5


@pytest.mark.parametrize("quantization", ["none", "fp8", "int8", "int4"])
def test_what_is_asked_of_a_gpu_are_settings_of_the_engine(quantization: str) -> None:
    args = offline.parse(
        ["--quantization", quantization, "--kv-dtype", "fp8", "--gpu-memory", "0.8"]
    )  # fmt: skip
    settings = offline.engine_settings(args, offline.choose_sizes(args))
    config = EngineConfig.from_mapping(settings)
    assert (config.device, config.load_format, config.quantization) == (
        "cuda",
        "dummy",
        quantization,
    )
    assert config.max_sequences == 512
    assert config.context_tokens == 8225
    assert config.gpu_memory == "0.8"
