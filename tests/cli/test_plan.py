"""`headrace plan`: the ranking, its numbers again from JSON, exit statuses, bad input, emitting."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest
from tests.profiles import profile
from typer.testing import CliRunner

from headrace.cli import plan as plan_command
from headrace.cli.commands import app
from headrace.dialects.read import read_command
from headrace.hardware.gpus import all_gpus
from headrace.search.planner import Planner

SMALL = (
    "llama-3.1-8b", "--rps", "6", "--input", "64", "--output", "16",
    "--slo", "ttft=400ms,tpot=50ms", "--gpu", "l40s", "--gpu", "rtx-4090",
    "--quant", "fp8", "--quant", "nvfp4", "--tp", "1",
)  # fmt: skip
UNPRICED = next(
    gpu.name
    for gpu in all_gpus()
    if gpu.kind == "gpu"
    and gpu.price() is None
    and (gpu.memory_bytes or 0) > 40e9
    and gpu.bandwidth_bytes_s
    and "bf16" in gpu.flops
)
QUICK = (*SMALL, "--no-changes")


@pytest.fixture(autouse=True)
def one_process(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(plan_command, "PROCESSES", 1)


def shown(*words: str, exit_code: int = 0) -> str:
    result = CliRunner().invoke(app, ["plan", *words])
    assert result.exit_code == exit_code, result.output
    if exit_code != 2:
        assert max(map(len, result.output.splitlines())) <= 100, result.output
    return result.output


def facts(*words: str, exit_code: int = 0) -> dict[str, Any]:
    result = CliRunner().invoke(app, ["plan", *words, "--json"])
    assert result.exit_code == exit_code, result.output
    found: dict[str, Any] = json.loads(result.output)
    return found


@pytest.fixture(scope="module")
def found() -> dict[str, Any]:
    result = CliRunner().invoke(app, ["plan", *QUICK, "--json", "--emit", "vllm"])
    assert result.exit_code == 0, result.output
    answer: dict[str, Any] = json.loads(result.output)
    return answer


def test_the_answer_in_words(tmp_path: Path) -> None:
    picture = tmp_path / "front.svg"
    text = shown(*SMALL, "--explain", "--svg", str(picture), "--emit", "vllm")
    assert "Work: 6/s x (64 + 16 tokens) x 2 x 8.03B parameters = 7.71 TFLOP/s" in text
    assert "cost/month" in text
    assert "Why others lost" in text
    assert "What to change, from meta-llama/Meta-Llama-3.1-8B on" in text
    assert "bound of the steady state" in text
    assert "vllm serve meta-llama/Meta-Llama-3.1-8B" in text
    ElementTree.parse(picture)


def test_every_row_follows_from_its_numbers(found: dict[str, Any]) -> None:
    assert found["rows"]
    for row in found["rows"]:
        hours = row["gpus"] * 720
        assert row["gpus"] == row["replicas"] * row["deployment"]["tp"]
        assert row["gpu_hours_month"] == hours
        assert row["usd_month"] == pytest.approx(hours * row["usd_per_gpu_hour"])
        tokens = 6 * 80 * 720 * 3600
        assert row["usd_million_tokens"] == pytest.approx(row["usd_month"] / tokens * 1e6)
        p99s = [trial["ttft_s"]["p99"] for trial in row["trials"]]
        assert row["ttft_p99_s"]["low"] == min(p99s)
        assert row["ttft_p99_s"]["high"] == max(p99s)
        assert all(trial["holds"] for trial in row["trials"][:2])
    costs = [row["usd_month"] for row in found["rows"]]
    assert costs == sorted(costs)


def test_the_same_seed_gives_the_same_answer(found: dict[str, Any]) -> None:
    assert facts(*QUICK, "--emit", "vllm") == found


def test_the_emitted_command_is_the_winner(found: dict[str, Any]) -> None:
    read = read_command(found["emitted"]["text"])
    winner = found["rows"][0]["deployment"]
    assert not read.unknown
    assert read.deployment.model == winner["model"]
    assert read.deployment.tensor_parallel == winner["tp"]
    assert read.deployment.replicas == found["rows"][0]["replicas"]
    assert read.deployment.max_sequences == winner["max_sequences"]
    assert read.deployment.max_batch_tokens == winner["batch_tokens"]
    assert read.deployment.kv_dtype in (winner["kv_dtype"], None)
    assert (read.deployment.quantization or "bf16") == winner["precision"]


def test_several_models_in_one_table() -> None:
    text = shown("llama-3.1-8b", "qwen2.5-7b", *QUICK[1:], "--slo", "tpot=17ms")
    assert "Meta-Llama-3.1-8B; kv" in text
    assert "Qwen2.5-7B; kv" in text


def test_an_impossible_objective_names_the_bound() -> None:
    text = shown(*QUICK[:-1], "--no-changes", "--slo", "tpot=1ms", exit_code=1)
    assert "Nothing holds this objective." in text
    assert "The bound: " in text
    assert "a token takes at least" in text
    assert facts(*QUICK, "--slo", "tpot=1ms", exit_code=1)["rows"] == []


def test_a_gpu_without_a_price_is_counted_in_hours() -> None:
    words = ("llama-3.1-8b", "--rps", "1", "--input", "64", "--output", "8", "--quant", "bf16")
    text = shown(*words, "--gpu", UNPRICED, "--tp", "1", "--no-changes")
    assert re.search(r"1 +720 h +- ", text)
    assert f"no on-demand price of {UNPRICED} is known" in " ".join(text.split())
    priced = facts(*words, "--gpu", UNPRICED, "--tp", "1", "--no-changes", "--price",
                   f"{UNPRICED}=2")  # fmt: skip
    assert priced["rows"][0]["usd_month"] == 1440


def test_an_interrupt_shows_what_is_known(monkeypatch: pytest.MonkeyPatch) -> None:
    whole = Planner.search

    def interrupted(self: Planner) -> Iterator[str]:
        for doing in whole(self):
            if self.sized:
                raise KeyboardInterrupt
            yield doing

    monkeypatch.setattr(Planner, "search", interrupted)
    text = shown(*QUICK, exit_code=130)
    assert "Interrupted: this is what was known" in text
    assert "cost/month" in text


def test_a_trace_has_its_own_rate(tmp_path: Path) -> None:
    trace = tmp_path / "trace.csv"
    rows = [f"{i * 0.25},{60 + i % 7},{8 + i % 5}" for i in range(200)]
    trace.write_text("\n".join(["timestamp,input_length,output_length", *rows]) + "\n")
    words = ("llama-3.1-8b", "--trace", str(trace), "--gpu", "h100-sxm", "--quant", "fp8")
    answer = facts(*words, "--tp", "1", "--no-changes")
    assert answer["question"]["requests_s"] == pytest.approx(4.0)


BENCH = {"output_throughput": 480.0, "total_input_tokens": 6400, "total_output_tokens": 1600,
         "completed": 100}  # fmt: skip


def test_a_measured_result_gives_lengths_and_rate(tmp_path: Path) -> None:
    file = tmp_path / "bench.json"
    file.write_text(json.dumps(BENCH))
    words = ("llama-3.1-8b", "--measured", str(file), "--gpu", "h100-sxm", "--quant", "fp8")
    question = facts(*words, "--tp", "1", "--no-changes")["question"]
    assert (question["requests_s"], question["prompt_tokens"]) == (30.0, 64)


@pytest.mark.parametrize(
    ("words", "says"),
    [
        ([], "No MODEL"),
        (["llama-3.1-8b"], "Expected one of --input and --output"),
        (["llama-3.1-8b", "--input", "5", "--output", "5"], "--rps is missing"),
        (["llama-3.1-8b", "--rps", "1", "--input", "5"], "--output is missing"),
        (["no-such-model", *QUICK[1:]], "no-such-model"),
        ([*QUICK, "--gpu", "h100"], "more than one GPU"),
        ([*QUICK, "--gpu", "h1000"], "No GPU called"),
        ([*QUICK, "--slo", "ttft=500"], "without a unit"),
        ([*QUICK, "--rps", "0"], "--rps is 0"),
        ([*QUICK, "--budget", "0"], "--budget is 0"),
        ([*QUICK, "--workload", "rag"], "found --input and --output and --workload"),
        ([*QUICK, "--price", "h100-sxm"], "expected GPU=USD"),
        ([*QUICK, "--price-kind", "cheap"], "--price-kind"),
        ([*QUICK, "--emit", "nothing"], "--emit is 'nothing'"),
        ([*QUICK, "--engine", "nothing"], "step times are known for"),
        ([*QUICK, "--quant", "fp9"], "not a precision"),
        ([*QUICK, "--input", "200000"], "context of"),
        (["llama-3.1-8b", "--rps", "1", "--trace", "/nowhere.csv"], "/nowhere.csv"),
    ],
)
def test_bad_input_is_status_2(words: list[str], says: str) -> None:
    assert says in " ".join(shown(*words, exit_code=2).split())


def test_fp8_where_no_gpu_has_it_is_bad_input() -> None:
    words = ("llama-3.1-8b", "--rps", "1", "--input", "9", "--output", "9", "--quant", "fp8")
    text = " ".join(shown(*words, "--gpu", "a100-sxm-80gb", exit_code=2).split())
    assert "a100-sxm-80gb has no fp8 arithmetic" in text
    assert "try: Use --quant int8 or awq" in text


@pytest.fixture
def calibrated(tmp_path: Path) -> str:
    made = profile()
    path = tmp_path / "profile.json"
    replace(made, model={**made.model, "name": "Meta-Llama-3.1-8B-Q4.gguf"}).save(path)
    return str(path)


HERE = ("--gpu", "this-machine", "--slo", "ttft=2s,tpot=100ms", "--no-changes")
LIGHT = ("--rps", "3", "--input", "64", "--output", "16")


def test_a_measured_machine_is_planned_with_its_profile(calibrated: str) -> None:
    words = ("llama-3.1-8b", *LIGHT, *HERE, "--profile", calibrated)
    found = facts(*words, "--price", "this-machine=0.5")
    (row,) = found["rows"]
    assert row["deployment"]["gpu"] == "this-machine"
    # Its truth: 5 ms, 1 ms a row and 0.8 ms a prompt token; a request alone needs 51 ms and more
    # for its prompt, and 16 tokens at 6 ms.
    assert 0.051 < row["ttft_p50_s"]["low"] < 0.3
    assert 0.0055 < row["tpot_p50_s"]["low"] < 0.06
    assert found["rows"][0]["usd_month"] == pytest.approx(row["replicas"] * 0.5 * 720)
    assert "this-machine's" in " ".join(found["notes"])
    text = shown(*words, "--explain")
    assert "KV for" in text
    assert "this-machine has no price" in " ".join(text.split())


def test_a_measured_machine_beside_rented_ones(calibrated: str) -> None:
    words = ("llama-3.1-8b", *LIGHT, "--slo", "ttft=2s,tpot=100ms", "--no-changes")
    more = ("--gpu", "this-machine", "--gpu", "l40s", "--quant", "fp8", "--tp", "1")
    found = facts(*words, *more, "--profile", calibrated, "--price", "this-machine=0.01")
    assert [row["deployment"]["gpu"] for row in found["rows"]] == ["this-machine", "l40s"]


def test_a_profile_of_another_model_is_refused(calibrated: str) -> None:
    text = shown("llama-3.1-70b", *LIGHT, *HERE, "--profile", calibrated, exit_code=2)
    assert "is a profile of Meta-Llama-3.1-8B-Q4.gguf" in " ".join(text.split())
    text = shown("llama-3.1-8b", *LIGHT, *HERE, exit_code=2)
    assert "headrace calibrate" in text


def test_a_request_that_the_measured_machine_has_no_room_for(calibrated: str) -> None:
    words = ("--rps", "1", "--input", "90000", "--output", "16", *HERE)
    text = shown("llama-3.1-8b", *words, "--profile", calibrated, exit_code=1)
    assert "it was measured with room for" in " ".join(text.split())
