"""`headrace bench`'s flags: what contradicts is refused before anything is sent."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from typer.testing import CliRunner

from headrace.cli.bench_asked import Flags, workload_of
from headrace.cli.commands import app
from headrace.core.errors import ConfigError
from headrace.workload.arrivals import ClosedLoop, OpenLoop
from headrace.workload.distribution import Constant
from headrace.workload.trace import Trace
from headrace.workload.workload import Synthetic


def test_a_closed_loop_of_eight_clients_is_the_default() -> None:
    made = workload_of(Flags())
    assert isinstance(made, Synthetic)
    assert made.arrivals == ClosedLoop(clients=8)
    assert (made.prompts.mean, made.outputs.mean) == (512, 128)


def test_rates_arrivals_prefixes_and_turns() -> None:
    made = workload_of(
        Flags(rate=4.0, arrivals="gamma:2", turns="2", prefixes=3, prefix_tokens=64, wait="1")
    )
    assert isinstance(made, Synthetic)
    assert made.arrivals == OpenLoop(rate_s=2.0, cv=2.0)  # sessions: each has two requests
    assert (made.prefixes, made.prefix_tokens, made.waits) == (3, 64, Constant(1.0))


def test_workloads_by_name_and_traces(tmp_path: Path) -> None:
    agent = workload_of(Flags(workload="agent", concurrency=3))
    assert isinstance(agent, Synthetic)
    assert agent.arrivals == ClosedLoop(clients=3)
    short = workload_of(Flags(workload="agent", output="8", turns="2", wait="0"))
    assert isinstance(short, Synthetic)
    assert (short.outputs.mean, short.turns.mean, short.waits) == (8, 2, Constant(0.0))
    assert (short.prompts, short.prefix_tokens) == (agent.prompts, 1500)
    path = tmp_path / "trace.csv"
    path.write_text("timestamp,input_length,output_length\n0,10,5\n1,10,5\n")
    trace = workload_of(Flags(trace=path, rate=2.0))
    assert isinstance(trace, Trace)
    assert [ask.at_s for ask in trace.asks()] == [0.0, 0.5]


@pytest.mark.parametrize(
    "flags",
    [
        Flags(workload="chat", prompts=Path("x")),
        Flags(rate=1.0, concurrency=2),
        Flags(prefixes=1),
        Flags(arrivals="poisson"),
        Flags(trace=Path("x"), concurrency=1),
        Flags(trace=Path("x"), output="8"),
    ],
)
def test_what_contradicts_is_refused(flags: Flags) -> None:
    with pytest.raises(ConfigError):
        workload_of(flags)


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["ftp://x"], "not a URL"),
        ([":1", "--api", "other"], "--api is 'other'"),
        ([":1", "--extra", "{"], "--extra is not JSON"),
        ([":1", "--extra", "[]"], "no JSON object"),
        ([":1", "--key-variable", "NOT_SET_ANYWHERE"], "$NOT_SET_ANYWHERE is not set"),
        ([":1", "--spend-limit", "1"], "needs to know what tokens cost"),
        ([":1", "--spend-limit", "0", "--price", "a=1/1"], "expected dollars above 0"),
        ([":1", "--save", "/no/such/folder/x"], "there is no folder"),
        ([":1", "--save-detailed"], "without --save"),
        ([":1", "--gpu", "no such thing"], "no such thing"),
        ([":1", "--slo", "ttft=5"], "without a unit"),
        ([":1", "--sweep", "--rate", "3"], "a sweep chooses its rates"),
        ([":1", "--sweep", "--duration", "60"], "each rate takes --point seconds"),
        ([":1", "--hold", "60"], "--hold is given without an objective"),
        ([":1", "--point", "5"], "--point is given without --sweep or --hold"),
        ([":1", "--max-concurrency", "4"], "without an open loop"),
        ([":1", "--wait", "2"], "--wait is given without a session"),
        ([":1", "--gpu-model", "llama-3.1-8b"], "--gpu-model is given without --gpu"),
        ([":1", "--gpu", "h100-sxm", "--gpu-model", "no such"], "'no such' is not a model"),
        ([":1", "--gpu", "h100-sxm", "--gpu-precision", "fp3"], "--gpu-precision is 'fp3'"),
        ([":1", "--price", "no-such-api"], "No price of an API called 'no-such-api'"),
        ([":1", "--sweep", "--arrivals", "gamma:2"], "can't be reached"),  # allowed together
        ([":1"], "can't be reached"),
    ],
)
def test_bad_input_is_one_line_before_anything_is_sent(words: list[str], said: str) -> None:
    found = CliRunner().invoke(app, ["bench", *words])
    assert found.exit_code not in (0, None)
    assert said in found.output
    assert "Traceback" not in found.output


def test_prompts_of_a_file_bound_what_they_may_cost(tmp_path: Path) -> None:
    path = tmp_path / "prompts.jsonl"
    path.write_text(json.dumps({"prompt": "word " * 100}) + "\n" + "short\n")
    made = workload_of(Flags(prompts=path))
    assert isinstance(made, Synthetic)
    assert made.prompts.mean == 250


def test_help_of_bench_has_the_flags_of_a_run() -> None:
    said = CliRunner().invoke(app, ["bench", "--help"]).output
    assert "compare" in said
    assert "--spend-limit" in said
    assert "headrace bench run" not in CliRunner().invoke(app, ["bench", "compare", "-h"]).output
