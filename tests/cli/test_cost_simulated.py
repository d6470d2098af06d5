"""`headrace cost --model`: the rate of a replica by simulating it."""

from __future__ import annotations

import json
from typing import Any

import pytest
from typer.testing import CliRunner

from headrace.cli import cost_simulated
from headrace.cli.commands import app

WORDS = ("--model", "llama-3.1-8b", "--gpu", "l40s", "--input", "200", "--output", "40",
         "--kv-dtype", "bf16", "--slo", "ttft=1s,tpot=60ms")  # fmt: skip


@pytest.fixture(autouse=True)
def one_process(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cost_simulated, "PROCESSES", 1)


def asked(*words: str) -> tuple[int, str]:
    result = CliRunner().invoke(app, ["cost", *words])
    return result.exit_code, result.output


def test_the_rate_is_simulated_and_said() -> None:
    code, output = asked(*WORDS, "--json")
    assert code in (0, 1), output
    found: dict[str, Any] = json.loads(output)
    text = json.dumps(found)
    assert "simulated: meta-llama/Meta-Llama-3.1-8B on l40s, bf16, kv bf16 holds" in text


@pytest.mark.parametrize(
    ("words", "says"),
    [
        ((*WORDS, "--rate", "500"), "Both --model and a rate"),
        (("--model", "llama-3.1-8b", "--input", "9", "--output", "9"), "without --gpu"),
        (("--model", "llama-3.1-70b", *WORDS[2:]), "can't be served on l40s"),
    ],
)
def test_bad_input(words: tuple[str, ...], says: str) -> None:
    code, output = asked(*words)
    assert code == 2, output
    assert says in " ".join(output.split())
