"""`headrace profile`: of a model and of a server, as text, JSON and a trace."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import httpx
import pytest
from tests.server.conftest import RunningServer
from tests.server.conftest import server as server
from tests.server.conftest import start_server as start_server
from typer.testing import CliRunner

from headrace.cli.commands import app
from headrace.cli.profile_server import facts_of


def run(*arguments: object) -> tuple[int, str]:
    done = CliRunner().invoke(app, ["profile", *map(str, arguments)])
    return done.exit_code, done.output


def test_a_model_by_operation(default_model_path: Path, tmp_path: Path) -> None:
    trace = tmp_path / "trace.json"
    code, said = run(
        default_model_path, "--rows", 2, "--rounds", 2, "--explain", "--trace", trace
    )  # fmt: skip
    assert code == 0, said
    assert "2 decode after 128" in said
    assert "attention" in said
    assert all(len(line) <= 100 for line in said.replace(str(trace), "").splitlines())
    assert json.loads(trace.read_text())["traceEvents"]
    code, said = run(default_model_path, "--rows", 2, "--rounds", 1, "--json")
    facts = json.loads(said[said.index("{") :])
    assert facts["schema"] == "headrace-profile-step/1"
    assert facts["steps"][0]["point"]["decode_rows"] == 2
    assert sum(o["seconds"] for o in facts["steps"][0]["operations"]) > 0


def history(**columns: list[float | None]) -> dict[str, Any]:
    names = ("steps", "step_tokens", "model_flops", "model_bytes", "step_schedule", "step_compute",
             "step_sample", "step_commit", "step_publish", "draft_tokens", "accepted_tokens",
             "drafting")  # fmt: skip
    filled: dict[str, list[float | None]] = {name: [0.0, 0.0] for name in names}
    made = {**filled, "period_s": [1.0, 2.0], **columns}
    return {"model": "m", "columns": made, "peaks": {"flops_s": 1e9, "bytes_s": 1e9}}


def test_a_servers_history_by_hand() -> None:
    facts = facts_of(
        history(
            steps=[10.0, 5.0],
            step_tokens=[40.0, 10.0],
            step_compute=[0.4, 0.3],
            step_schedule=[0.1, 0.05],
            model_flops=[1e8, None],
            model_bytes=[2e8, 1e8],
            draft_tokens=[20.0, 10.0],
            accepted_tokens=[10.0, 10.0],
            drafting=[0.01, 0.005],
        )
    )
    assert facts["steps"] == 20
    assert facts["tokens_per_step"] == 3
    assert facts["parts_s"]["compute"] == pytest.approx(1.0 / 20)
    assert facts["step_s"] == pytest.approx(1.2 / 20)
    assert facts["busy_share"] == pytest.approx(0.4)
    assert facts["mfu"] == pytest.approx(0.1)
    assert facts["bandwidth_use"] == pytest.approx(0.4)
    assert facts["guesses"] == {
        "rows_per_step": 2.0,
        "right_per_step": 1.5,
        "right_share": 0.75,
        "drafting_s": pytest.approx(0.001),
    }
    idle = facts_of(history())
    assert (idle["steps"], idle["step_s"], idle["mfu"]) == (0, None, None)


def test_a_running_server(server: RunningServer, tmp_path: Path) -> None:
    body = {"model": "smollm2", "prompt": "A river", "max_tokens": 20, "ignore_eos": True}
    assert httpx.post(f"{server.base_url}/v1/completions", json=body).status_code == 200
    url = f"{server.base_url}/history"
    # Samples have six digits, and the last steps may be in a later one.
    server.wait_for(lambda: facts_of(httpx.get(url).json())["steps"] > 19.9)
    trace = tmp_path / "trace.json"
    code, said = run(f":{server.port}", "--explain", "--trace", trace)
    assert code == 0, said
    assert "compute" in said
    assert "no peaks are known" in said
    assert {event["ph"] for event in json.loads(trace.read_text())["traceEvents"]} == {"C"}
    code, said = run(server.base_url, "--json")
    facts = json.loads(said)
    assert facts["steps"] > 19.9
    assert facts["flops_s"] > 0


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("http://127.0.0.1:9",), "can't be reached"),
        (("http://127.0.0.1:9", "--window", "2h"), "expected 5m, 1h or 24h"),
        (("smollm2", "--rows", "0"), "expected 1 to 65536"),
        (("smollm2", "--device", "reference"), "not of the reference"),
        (("smollm2", "--prompt", "70000"), "expected 1 to 65536"),
        (("smollm2", "--device", "cpu", "--nvtx"), "is for a GPU"),
        (("smollm2", "--trace", "/nowhere/t.json"), "does not exist"),
    ],
)
def test_bad_input(arguments: tuple[str, ...], words: str) -> None:
    code, said = run(*arguments)
    assert code != 0
    assert words in said
