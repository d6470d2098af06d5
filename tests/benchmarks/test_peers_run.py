"""Ordering a run: turns, and peers that crash, refuse or were never installed."""

from __future__ import annotations

import argparse
import os
import sys
import textwrap
from pathlib import Path

import pytest

from peers.conversation import BENCHMARKS, PeerFailure
from peers.environments import Environment, make_environment
from peers.report import Results
from peers.run import RESTARTS, Crew, run_group
from peers.workloads import CONTENDERS, WORKLOADS, Contender

ADAPTER = """
    import os, signal
    from peers.adapter import answer_requests

    def load(model, threads):
        if "refuse" in os.environ["MANNERS"]:
            raise ValueError("no such model")
        return {"note": f"{os.path.basename(model)} {threads}"}

    def decode(sequences, context, seed):
        with open(os.environ["DIARY"], "a") as diary:
            diary.write(os.environ["MANNERS"] + " " + seed + "\\n")
        if "crash" in os.environ["MANNERS"]:
            os.kill(os.getpid(), signal.SIGILL)
        return {"value": 10.0 * sequences}

    answer_requests({"load": load, "decode": decode})
"""
ROWS = [
    workload for workload in WORKLOADS if workload.name in ("8-bit decode 1", "8-bit decode 16")
]
OURS, LLAMA, OPENVINO = CONTENDERS["8-bit"]


@pytest.fixture
def crew_of(tmp_path: Path) -> tuple[dict[str, str], Results, Path]:
    (tmp_path / "pretend_peer.py").write_text(textwrap.dedent(ADAPTER))
    env = {
        "PYTHONPATH": f"{tmp_path}{os.pathsep}{BENCHMARKS}",
        "DIARY": str(tmp_path / "diary.txt"),
    }
    return env, Results(), tmp_path / "diary.txt"


def run(
    env: dict[str, str], results: Results, manners: dict[str, str | PeerFailure], rounds: int
) -> None:
    installed: dict[str, Environment | PeerFailure] = {
        engine: manner
        if isinstance(manner, PeerFailure)
        else Environment(Path(sys.executable), "pretend_peer", {**env, "MANNERS": manner})
        for engine, manner in manners.items()
    }
    crew = Crew(installed, 2, results)
    try:
        options = argparse.Namespace(rounds=rounds, requests=1)
        run_group(crew, ROWS, [OURS, LLAMA, OPENVINO], options, results)
    finally:
        crew.close()


def failures(results: Results, who: Contender) -> list[str]:
    return [reason for row in ROWS for reason in results.cell(row, who).failures]


def test_engines_take_turns_and_each_round_begins_with_another(
    crew_of: tuple[dict[str, str], Results, Path],
) -> None:
    env, results, diary = crew_of
    run(env, results, {"headrace": "h", "llama.cpp": "l", "openvino": "o"}, 2)
    lines = [line.split()[0] for line in diary.read_text().splitlines()]
    assert "".join(lines) == "hlo" * 2 + "loh" * 2
    assert results.cell(ROWS[1], LLAMA).samples == [160.0, 160.0]
    assert results.notes["llama.cpp"] == "model-q8_0.gguf 2"


def test_a_peer_that_crashes_is_restarted_twice_and_costs_the_others_nothing(
    crew_of: tuple[dict[str, str], Results, Path],
) -> None:
    env, results, diary = crew_of
    run(env, results, {"headrace": "h", "llama.cpp": "crash", "openvino": "o"}, 3)
    reasons = failures(results, LLAMA)
    assert len(reasons) == 6
    assert all("SIGILL" in reason for reason in reasons), "the cause must not be lost"
    assert diary.read_text().count("crash") == 1 + RESTARTS
    for who in (OURS, OPENVINO):
        assert [results.cell(row, who).samples for row in ROWS] == [[10.0] * 3, [160.0] * 3]


def test_a_peer_that_can_not_load_or_is_not_installed_says_why_in_each_row(
    crew_of: tuple[dict[str, str], Results, Path],
) -> None:
    env, results, _ = crew_of
    missing = PeerFailure("not installed: no wheel")
    run(env, results, {"headrace": "h", "llama.cpp": "refuse", "openvino": missing}, 1)
    assert failures(results, LLAMA) == ["ValueError: no such model"] * 2
    assert failures(results, OPENVINO) == ["not installed: no wheel"] * 2
    assert results.cell(ROWS[0], OURS).samples == [10.0]


def test_an_environment_that_pip_refuses_is_a_failure_and_is_tried_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HEADRACE_CACHE", str(tmp_path))
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    for _ in range(2):
        with pytest.raises(PeerFailure, match=r"not installed: .*no-such-package"):
            make_environment("pretend", [str(tmp_path / "no-such-package.whl")])
    assert not (tmp_path / "peers" / "pretend" / "headrace-installed.txt").exists()
