"""`headrace fit` with pipeline stages: of its own flag, and of other engines' commands."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from headrace.cli.commands import app

H100 = ("--gpu", "h100-sxm")


def asked(*words: str, exit_code: int = 0) -> dict[str, Any]:
    result = CliRunner().invoke(app, ["fit", *words, "--json"])
    assert result.exit_code == exit_code, result.output
    facts: dict[str, Any] = json.loads(result.output)
    return facts


def shown(*words: str, exit_code: int = 0) -> str:
    result = CliRunner().invoke(app, ["fit", *words])
    assert result.exit_code == exit_code, result.output
    if exit_code != 2:
        assert all(len(line) <= 100 for line in result.output.splitlines())
    return result.output


@pytest.mark.parametrize(
    ("command", "divided"),
    [
        ("vllm serve llama-3.1-70b --pipeline-parallel-size 2", "as vllm"),
        ("python -m sglang.launch_server --model-path llama-3.1-70b --pp-size 2", "as sglang"),
        ("trtllm-serve llama-3.1-70b --pp_size 2", "as trtllm"),
        ("llama-server -hf llama-3.1-70b -ts 1,1 -c 4096", "as llama.cpp"),
    ],
)
def test_every_engine_that_divides_layers_gets_an_answer(command: str, divided: str) -> None:
    facts = asked("--from", command, *H100, "--context", "4096")
    assert (facts["gpus"], facts["tp"], facts["pp"], facts["replicas"]) == (2, 1, 2, 1)
    assert any(divided in note for note in facts["notes"])
    assert facts["fits"]
    # Half of the layers and one table: 141.1 GB in all. llama.cpp gives the first 41 of 80.
    assert facts["ledger"]["weights_bytes"] == pytest.approx(141.1e9 / 2, rel=0.03)


def test_the_fullest_stage_decides() -> None:
    facts = asked("llama-3.1-70b", *H100, "--pp", "3", "--context", "4096")
    # 26, 28 and 26 layers would be as even; vLLM gives 27, 27 and 26, so the first has its table.
    assert facts["stage"] == {"number": 0, "first_layer": 0, "layers": 27}
    whole = asked("llama-3.1-70b", *H100, "--gpus", "8", "--context", "4096")
    stages = asked("llama-3.1-70b", *H100, "--pp", "8", "--context", "4096")
    # Both hold an eighth of the layers; a stage has a whole table or none.
    layers = ("attention", "mlp")
    for part in layers:
        mine, other = stages["ledger"]["weights"][part], whole["ledger"]["weights"][part]
        assert mine == pytest.approx(other, rel=1e-6)
    assert stages["ledger"]["kv_bytes_per_token"] == whole["ledger"]["kv_bytes_per_token"]
    tables = {"embedding", "output"} & stages["ledger"]["weights"].keys()
    assert len(tables) == 1
    # A token passes all stages, one after the other: its floor is that of one GPU.
    one = asked("llama-3.1-70b", *H100, "--context", "4096", exit_code=1)
    assert stages["floors"]["tpot_one_s"] == pytest.approx(one["floors"]["tpot_one_s"], rel=0.01)
    assert stages["floors"]["ttft_s"] <= one["floors"]["ttft_s"]


def test_limits_hold_on_every_stage() -> None:
    words = ("llama-3.1-70b", *H100, "--pp", "2", "--tp", "2", "--context", "8192")
    most = asked(*words)["most_sequences"]
    assert asked(*words, "--concurrency", str(most))["fits"]
    assert not asked(*words, "--concurrency", str(most + 1), exit_code=1)["fits"]


def test_text_says_which_stage_and_changes_keep_the_stages() -> None:
    text = " ".join(shown("llama-3.1-70b", *H100, "--pp", "2", "--explain").split())
    assert "on each GPU of stage" in text
    assert "of 2, layers" in text
    assert "/ 2 stages" in text
    refused = shown("llama-3.1-405b", *H100, "--pp", "2", "--tp", "2", exit_code=1)
    assert "--pp 2" in refused
    assert "does not divide a model among GPUs" in refused


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (("llama-3.1-8b", *H100, "--pp", "33"), "33 pipeline stages do not divide 32 layers"),
        (("llama-3.1-8b", *H100, "--gpus", "3", "--pp", "2"), "3 GPUs are not a multiple of tp x"),
        (("llama-3.1-8b", "--gpu", "ddr5-8ch-4800", "--gpu-memory", "64GiB", "--pp", "2"),
         "is a CPU host"),
    ],
)  # fmt: skip
def test_bad_input(words: tuple[str, ...], said: str) -> None:
    assert said in " ".join(shown(*words, exit_code=2).split())


def test_a_file_may_be_divided(default_model_path: Path) -> None:
    """Once: 'file' is not a precision that Headrace knows."""
    file, one = str(default_model_path), ("--gpu", "l4", "--context", "512")
    whole = asked(file, *one)["ledger"]["weights"]
    for flags in (("--tp", "3"), ("--pp", "3")):
        part = asked(file, *one, *flags)["ledger"]["weights"]
        assert part["mlp"] == pytest.approx(whole["mlp"] / 3, rel=1e-6)


def test_a_file_in_another_type_is_counted_in_that_type(default_model_path: Path) -> None:
    """Once the file's own bytes were shown as if they were of the type that was asked for."""
    file = str(default_model_path)
    for where in ((), ("--gpu", "l4")):
        words = (file, "--context", "512", *where)
        four, eight = (asked(*words, "--quant", type_) for type_ in ("q4_0", "q8_0"))
        mlp = [each["ledger"]["weights"]["mlp"] for each in (four, eight)]
        assert mlp[1] == pytest.approx(2 * mlp[0], rel=0.01)


def test_what_a_command_does_not_say() -> None:
    assert "names no model" in shown("--from", "vllm serve -tp 2", *H100, exit_code=2)
    text = shown("llama-3.1-8b", "--from", "llama-server -ts 3,1 -c 4096", *H100)
    assert "the shares of -ts (3,1) are counted as even" in " ".join(text.split())
