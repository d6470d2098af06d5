"""`headrace doctor` at the command line, against fake engines and a real server."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from tests.doctor.fakes import MODELS, FakeEngine, Script, Values, render, serving
from typer.testing import CliRunner, Result

from headrace.cli.commands import app
from headrace.doctor.names import VLLM

QUEUED = Values(
    levels={"running": 4, "waiting": 12, "kv_usage": 0.1},
    counters={"generation_tokens": 100},
)
IDLE = Values(levels={"running": 0, "waiting": 0, "kv_usage": 0.0})
FAST = ("--interval", "0.2", "--concurrency", "2")


def doctor(*words: str) -> Result:
    return CliRunner().invoke(app, ["doctor", *words])


def vllm(values: Values = IDLE, script: Script | None = None) -> FakeEngine:
    return FakeEngine([render(VLLM, values)], paths={"/v1/models": MODELS}, script=script)


def test_a_finding_as_text_and_as_json() -> None:
    with serving(vllm(QUEUED)) as endpoint:
        text = doctor(endpoint.url, "--no-probe", *FAST)
        found = doctor(endpoint.url, "--no-probe", "--json", *FAST)
    assert text.exit_code == found.exit_code == 1
    assert "--max-num-seqs 16" in text.output
    assert "(rule 4)" in text.output
    body = json.loads(found.stdout)
    assert body["schema"] == "headrace-doctor/1"
    assert [f["rule"] for f in body["findings"]] == [4]
    assert body["probe"] is None
    assert body["unknown"]["ttft"]


def test_explain_lists_what_is_unknown() -> None:
    with serving(vllm()) as endpoint:
        done = doctor(endpoint.url, "--no-probe", "--explain", *FAST)
    assert done.exit_code == 0
    assert "Unknown, and why" in done.output
    assert "queue_time: vllm:request_queue_time_seconds is not on this page" in done.output


def test_probes_are_announced_and_kept() -> None:
    engine = vllm()
    with serving(engine) as endpoint:
        done = doctor(endpoint.url, "--json", *FAST)
    body = json.loads(done.stdout)
    assert "Probing http://127.0.0.1" in done.stderr
    assert "at most 60 s and 20,000 tokens" in done.stderr
    assert 0 < body["probe"]["spent_tokens"] <= 20_000
    assert body["probe"]["errors"] == []
    # The fake's counters stand still while it answers: that is a finding by itself.
    assert engine.generated > 0


def test_another_machine_is_not_probed_unasked() -> None:
    done = doctor("http://192.0.2.7:8000")
    assert done.exit_code == 2
    assert "--yes" in done.output


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (("http://127.0.0.1:9",), "can't be reached"),
        (("ftp://x",), "is not a URL"),
        ((":8000", "--gpu", "nonesuch"), "nonesuch"),
        ((":8000", "--slo", "ttft=5"), "ttft"),
        ((":8000", "--key-variable", "NO_SUCH_KEY"), "NO_SUCH_KEY is not set"),
        (("verify", "no-such-file.json"), "not a report"),
        ((":8000", "--before", "no-such-file.json"), "not a report"),
    ],
)
def test_bad_input_is_one_line(words: tuple[str, ...], says: str) -> None:
    done = doctor(*words)
    assert done.exit_code == 2
    assert says in done.output


def test_help_without_words() -> None:
    done = doctor("--help")
    assert done.exit_code == 0
    assert "verify" in done.output
    assert "preflight" in done.output


def test_verify_and_preflight(tmp_path: Path) -> None:
    saved = tmp_path / "before.json"
    with serving(vllm(script=Script(token_s=0.0005))) as endpoint:
        doctor(endpoint.url, "--save", str(saved), *FAST)
        again = doctor("verify", str(saved), "--json", *FAST)
        asked = doctor("preflight", endpoint.url, "--json", *FAST)
    found: dict[str, Any] = json.loads(again.stdout)
    assert found["schema"] == "headrace-doctor-verify/1"
    assert found["verdict"] in ("better", "worse", "inconclusive")
    assert again.exit_code == (0 if found["verdict"] == "better" else 1)
    assert "burst tokens/s" in [row["name"] for row in found["compared"]]
    checks = json.loads(asked.stdout)["checks"]
    assert [check["number"] for check in checks] == list(range(1, 11))
    assert asked.exit_code == (1 if any(c["answer"] == "fail" for c in checks) else 0)
