"""`headrace simulate` and `headrace calibrate`: options, exit codes, tables, JSON."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from tests.profiles import profile
from typer.testing import CliRunner

from headrace.calibrate import run as calibrating
from headrace.cli.commands import app
from headrace.hardware.profile import Profile, load_profile

KEYS = {"requests", "refused", "verdict", "output_tokens_s", "input_tokens_s", "requests_s",
        "cached_share", "steps", "preemptions", "draft_tokens", "accepted_tokens", "latency",
        "slo", "saturation", "is_good", "impossible", "deployment", "fleet", "band"}  # fmt: skip
LIGHT = ("--input", "64", "--output", "16", "--rate", "2", "--requests", "120")


@pytest.fixture
def path(tmp_path: Path) -> Path:
    profile().save(tmp_path / "profile.json")
    return tmp_path / "profile.json"


def shown(path: Path, *words: str, exit_code: int = 0) -> str:
    result = CliRunner().invoke(app, ["simulate", "--profile", str(path), *words])
    assert result.exit_code == exit_code, result.output
    if exit_code != 2:  # a message may have a path of any length in it
        assert all(len(line) <= 100 for line in result.output.splitlines())
    return result.output


def test_a_light_load_is_stable_and_the_same_by_seed(path: Path) -> None:
    text = shown(path, *LIGHT, "--explain")
    assert "stable" in text
    assert "TPOT" in text
    assert text == shown(path, *LIGHT, "--explain")
    assert text != shown(path, *LIGHT, "--explain", "--seed", "5")


def test_an_objective_decides_the_exit_code(path: Path) -> None:
    assert ": met" in shown(path, *LIGHT, "--slo", "ttft=2s,tpot=200ms,share=90%")
    assert "not met" in shown(path, *LIGHT, "--slo", "ttft=1ms", exit_code=1)


def test_guesses_are_simulated(path: Path) -> None:
    alone = ("--input", "32", "--output", "60", "--arrivals", "closed:1", "--requests", "20")
    plain, guessed = (
        json.loads(shown(path, *alone, "--json", *more)) for more in ((), ("--acceptance", "0.9"))
    )
    assert plain["draft_tokens"] == 0
    assert 0.3 < guessed["accepted_tokens"] / guessed["draft_tokens"] < 1
    assert guessed["output_tokens_s"] > 1.1 * plain["output_tokens_s"]
    assert "guesses" in shown(path, *alone, "--acceptance", "0.9")
    assert "expected 0 to 1" in shown(path, *alone, "--acceptance", "2", exit_code=2)


def test_beyond_saturation_there_are_no_latencies(path: Path) -> None:
    heavy = ("--input", "400", "--output", "100", "--rate", "20", "--requests", "300")
    assert "saturated: " in shown(path, *heavy, exit_code=1)
    facts = json.loads(shown(path, *heavy, "--json", exit_code=1))
    assert facts["verdict"] == "saturated"
    assert facts["latency"] is None


def test_json_has_its_documented_fields(path: Path) -> None:
    facts = json.loads(shown(path, *LIGHT, "--json", "--saturation", "--slo", "ttft=2s"))
    assert set(facts) == KEYS
    assert set(facts["latency"]) == {"ttft_s", "tpot_s", "e2e_s"}
    assert set(facts["latency"]["ttft_s"]) == {"mean", "p50", "p90", "p95", "p99", "most"}
    assert set(facts["slo"]) == {"objective", "met_share", "goodput_s", "is_met"}
    assert 0 < facts["saturation"]["stable"] < facts["saturation"]["saturated"]


def test_named_workloads_loops_and_traces(path: Path, tmp_path: Path) -> None:
    chat = ("--workload", "chat", "--rate", "0.2", "--requests", "60", "--slo", "ttft=60s")
    assert "from cache" in shown(path, *chat)
    loop = ("--workload", "code", "--arrivals", "closed:2", "--slo", "ttft=60s")
    assert "60 refused" not in shown(path, *loop, "--requests", "20")
    trace = tmp_path / "trace.csv"
    trace.write_text("timestamp,input_length,output_length\n0,30,5\n1,40,6\n")
    assert "requests     2," in shown(path, "--trace", str(trace))


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ((), "Expected one of --workload"),
        (("--workload", "chat", "--trace", "x.csv"), "Expected one of --workload"),
        (("--workload", "talk"), "chat, rag, code"),
        (("--input", "5"), "One of --input and --output is missing"),
        (("--input", "5", "--output", "5"), "no rate is given"),
        ((*LIGHT, "--slo", "ttft=500"), "without a unit"),
        ((*LIGHT, "--requests", "0"), "expected 1 to"),
        (("--trace", "no-such.csv"), "can't be read"),
        (("llama", *LIGHT), "is a profile of tiny.gguf, not of llama"),
        (("--workload", "batch", "--rate", "3"), "closed loop"),
    ],
)
def test_bad_input_is_refused_in_a_line(path: Path, words: tuple[str, ...], said: str) -> None:
    assert said in " ".join(shown(path, *words, exit_code=2).split())


def test_a_missing_profile_says_how_to_get_one(tmp_path: Path) -> None:
    assert "headrace calibrate" in shown(tmp_path / "none.json", *LIGHT, exit_code=2)


def calibrated(monkeypatch: pytest.MonkeyPatch, made: Profile) -> dict[str, Any]:
    asked: dict[str, Any] = {}

    def measure(model: str | None, **options: Any) -> Profile:
        options["tell"]("step times", 1, 2)
        asked.update(options, model=model)
        return made

    monkeypatch.setattr(calibrating, "calibrate", measure)
    return asked


def test_calibrate_writes_what_was_measured(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    asked = calibrated(monkeypatch, profile())
    out = tmp_path / "made.json"
    words = ["calibrate", "tiny", "--out", str(out), "--threads", "2", "--seconds", "5"]
    result = CliRunner().invoke(app, [*words, "--explain"])
    assert result.exit_code == 0, result.output
    assert all(len(line) <= 100 for line in result.output.splitlines())
    assert load_profile(out) == profile()
    assert asked["model"] == "tiny"
    assert asked["config"].threads == 2
    assert asked["flags"] == ["--device", "auto", "--threads", "2"]
    printed = CliRunner().invoke(app, [*words, "--json"])
    assert json.loads(printed.stdout) == json.loads(out.read_text())


def test_a_calibration_that_was_stopped_is_kept_and_said(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    calibrated(monkeypatch, replace(profile(serves=False), is_complete=False))
    out = tmp_path / "made.json"
    result = CliRunner().invoke(app, ["calibrate", "--out", str(out)])
    assert result.exit_code == 1
    assert "stopped early" in result.output
    assert not load_profile(out).is_complete


@pytest.mark.parametrize("words", [["--seconds", "0"], ["--out", "/no/such/folder/a.json"]])
def test_calibrate_refuses_before_it_measures(words: list[str]) -> None:
    assert CliRunner().invoke(app, ["calibrate", *words]).exit_code == 2
