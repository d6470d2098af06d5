"""vLLM's words on fit, plan, simulate and cost: read as ours, or answered; none is unknown."""

from __future__ import annotations

import json

import pytest
from typer.testing import CliRunner

from headrace.cli.commands import app


def output(*words: str, exit_code: int) -> str:
    result = CliRunner().invoke(app, list(words))
    assert result.exit_code == exit_code, result.output
    return result.output


def test_words_of_vllm_are_ours() -> None:
    ours = ("--tp", "2", "--context", "4096", "--quant", "fp8", "--kv-dtype", "fp8",
            "--gpu-memory", "0.8", "--max-sequences", "64",
            "--max-batch-tokens", "2048")  # fmt: skip
    theirs = ("--tensor-parallel-size=2", "--max-model-len", "4096", "-q", "fp8",
              "--kv-cache-dtype", "fp8", "--gpu-memory-utilization", "0.8", "--max-num-seqs", "64",
              "--max-num-batched-tokens=2048")  # fmt: skip
    model = ("fit", "llama-3.1-8b", "--gpu", "h100-sxm", "--json")
    found = [json.loads(output(*model, *words, exit_code=0)) for words in (ours, theirs)]
    assert found[0] == found[1]
    assert found[0]["tp"] == 2


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (("fit", "llama-3.1-8b", "--enforce-eager"), "--enforce-eager is a flag of serving"),
        (("plan", "llama-3.1-8b", "--max-model-len", "9"), "our --context, which `headrace plan`"),
        (("cost", "--dtype", "bfloat16"), "--dtype is a flag of serving"),
        (("simulate", "--seed-of-nobody", "1"), "No such option"),
    ],
)
def test_other_words_are_answered(words: tuple[str, ...], said: str) -> None:
    assert said in " ".join(output(*words, exit_code=2).split())


def test_both_words_for_a_rate() -> None:
    words = ("simulate", "llama-3.1-8b", "--gpu", "l4", "--input", "9", "--output", "2")
    several = [
        output(*words, flag, "1", "--requests", "5", exit_code=0)
        for flag in ("--rate", "--rps", "--request-rate")
    ]
    assert several[0] == several[1] == several[2]


QUICK = ("--rps", "1", "--input", "128", "--output", "32")


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (("plan", "llama-3.1-8b", *QUICK, "--gpu", "l4", "--tp", "3"), "Use 2 or 4."),
        (("plan", "llama-3.1-8b", *QUICK, "--emit", "vlm"), "Did you mean vllm?"),
        (
            ("plan", "llama-3.1-8b", *QUICK, "--svg", "/no/such/folder/a.svg"),
            "a folder that exists",
        ),
        (
            ("cost", "--rate", "9", "--output", "9", "--svg", "/no/such/a.svg"),
            "a folder that exists",
        ),
        (("plan", "llama-3.1-8b", "--rps", "1", "--workload", "chaat"), "Did you mean chat?"),
        (("plan", "llama-3.1-8b", "--rps", "1", "--input", "0", "--output", "5"), "input is '0'"),
        (("cost", "--rate", "9", "--output", "9", "--price-kind", "spto"), "Did you mean spot?"),
    ],
)
def test_bad_input_of_planning_is_refused_before_anything_runs(
    words: tuple[str, ...], said: str
) -> None:
    assert said in " ".join(output(*words, exit_code=2).split())
