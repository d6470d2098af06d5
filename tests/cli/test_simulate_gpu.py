"""`headrace simulate --gpu`: GPUs of the table, fleets, pools, scaling, and bad input."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from tests.profiles import profile
from typer.testing import CliRunner

from headrace.cli.commands import app
from headrace.cli.simulate_asked import AskedFleet, make_fleet, parse_autoscale

SHORT = ("--input", "128", "--output", "16")
ON_GPU = ("llama-3.1-8b", "--gpu", "h100-sxm", *SHORT, "--requests", "150")


def shown(*words: str, exit_code: int = 0) -> str:
    result = CliRunner().invoke(app, ["simulate", *words])
    assert result.exit_code == exit_code, result.output
    if exit_code != 2:
        assert all(len(line) <= 100 for line in result.output.splitlines())
    return " ".join(result.output.split())


def facts_of(*words: str, exit_code: int = 0) -> dict[str, Any]:
    result = CliRunner().invoke(app, ["simulate", *words, "--json"])
    assert result.exit_code == exit_code, result.output
    facts: dict[str, Any] = json.loads(result.output)
    return facts


def test_a_gpu_has_a_band_and_is_judged_at_its_slow_end() -> None:
    facts = facts_of(*ON_GPU, "--rate", "5", "--slo", "ttft=2s,tpot=100ms")
    band, middle = facts["band"], facts["latency"]
    assert band["fast"]["latency"]["tpot_s"]["p50"] < middle["tpot_s"]["p50"]
    assert middle["tpot_s"]["p50"] < band["slow"]["latency"]["tpot_s"]["p50"]
    assert facts["is_good"]
    # An objective between the middle and the slow end is not met.
    between_s = (middle["tpot_s"]["p99"] + band["slow"]["latency"]["tpot_s"]["p50"]) / 2
    assert middle["tpot_s"]["p99"] < between_s < band["slow"]["latency"]["tpot_s"]["p99"]
    words = (*ON_GPU, "--rate", "5", "--slo", f"tpot={between_s * 1e3:.4f}ms")
    assert "not met at the slow end of the band" in shown(*words, exit_code=1)


def test_weights_are_read_once_a_step() -> None:
    """16 GB of a step at 3.35 TB/s: one sequence's TPOT is between that floor and twice of it."""
    words = (*ON_GPU, "--arrivals", "closed:1")
    tpot_s = facts_of(*words)["latency"]["tpot_s"]["p50"]
    assert 15.0e9 / 3.35e12 < tpot_s < 2 * 16.1e9 / 3.35e12
    half_s = facts_of(*words, "--quant", "fp8")["latency"]["tpot_s"]["p50"]
    assert half_s < 0.8 * tpot_s
    two_s = facts_of(*words, "--tp", "2")["latency"]["tpot_s"]["p50"]
    assert two_s < 0.75 * tpot_s


def test_json_has_its_documented_fields() -> None:
    facts = facts_of(*ON_GPU, "--rate", "20", "--replicas", "2", "--router", "round-robin")
    document = Path(__file__).parents[2].joinpath("docs", "simulate.md").read_text("utf-8")
    table = document[document.index("## JSON") :]
    for name in (*facts, *facts["deployment"], *facts["fleet"], *facts["band"]):
        assert f"`{name}`" in table, name
    assert facts["fleet"]["requests_by_replica"] == [75, 75]
    assert facts["fleet"]["gpus"] == 2
    assert facts["fleet"]["gpu_hours"] == pytest.approx(facts["fleet"]["replica_hours"])


def test_more_replicas_hold_more() -> None:
    """A load that saturates one is held by four, and the rate at which they saturate is higher."""
    heavy = ("llama-3.1-8b", "--gpu", "l4", *SHORT, "--rate", "60", "--requests", "700",
             "--max-sequences", "32")  # fmt: skip
    one = facts_of(*heavy, exit_code=1)
    assert one["verdict"] == "saturated"
    assert one["latency"] is None
    four = facts_of(*heavy, "--gpus", "4", "--tp", "1")
    assert four["verdict"] == "stable"
    assert four["fleet"]["replicas"] == 4


def test_the_prefix_router_finds_what_is_cached() -> None:
    words = ("llama-3.1-8b", "--gpu", "h100-sxm", "--workload", "chat", "--rate", "20",
             "--requests", "80", "--replicas", "4", "--slo", "ttft=10s")  # fmt: skip
    shares = {
        router: facts_of(*words, "--router", router)["cached_share"]
        for router in ("session", "random")
    }
    assert shares["session"] > shares["random"]
    light = (*ON_GPU[:-2], "--rate", "5", "--requests", "20", "--no-prefix-cache")
    assert facts_of(*light)["cached_share"] == 0


def test_pools_apart_send_keys_over_a_link() -> None:
    words = (*ON_GPU, "--rate", "20", "--prefill-replicas", "1", "--decode-replicas", "2")
    text = shown(*words, "--explain")
    assert "1 for prompts, 2 for decoding of 1 GPU" in text
    assert "/ 450 GB/s" in text  # the H100's own, per direction
    fast, slow = (facts_of(*words, "--link", link) for link in ("450GB/s", "0.05GB/s"))
    # The handover is between the first token and the others: 128 tokens are 16.8 MB, 0.34 s.
    added_s = slow["latency"]["e2e_s"]["p50"] - fast["latency"]["e2e_s"]["p50"]
    assert added_s > 128 * 131_072 / 0.05e9
    assert fast["fleet"]["gpus"] == 3


def test_scaling_adds_replicas_after_their_cold_start() -> None:
    words = ("llama-3.1-8b", "--gpu", "l4", *SHORT, "--rate", "60", "--requests", "1200")
    scaled = ("--autoscale", "1:8,interval=1s", "--cold-start")
    cold, warm = (facts_of(*words, *scaled, time) for time in ("10s", "0s"))
    assert cold["fleet"]["sizes"][0] == {"at_s": 0.0, "replicas": 1}
    assert cold["fleet"]["sizes"][-1]["replicas"] == 8
    assert cold["fleet"]["cold_start_s"] == 10
    assert warm["latency"]["ttft_s"]["p99"] < cold["latency"]["ttft_s"]["p99"]
    # The first takes all requests until others are ready; what starts is paid for too.
    assert cold["fleet"]["requests_by_replica"][0] > 5 * cold["fleet"]["requests_by_replica"][1]
    assert cold["fleet"]["gpu_hours"] > warm["fleet"]["gpu_hours"]
    text = shown(*words, *scaled, "10s")
    assert "scaling 1 to 8, cold start 10 s: 1 at 0 s, 2 at 1 s" in text


def test_a_profile_may_have_replicas_too(tmp_path: Path) -> None:
    path = tmp_path / "profile.json"
    profile().save(path)
    words = ("--profile", str(path), "--input", "64", "--output", "16", "--rate", "2")
    facts = facts_of(*words, "--replicas", "2", "--requests", "120")
    assert facts["band"] is None
    assert facts["fleet"]["gpu_hours"] is None
    assert sum(facts["fleet"]["requests_by_replica"]) == 120
    assert "is given without --gpu" in shown(*words, "--quant", "fp8", exit_code=2)


def test_saturation_of_a_fleet() -> None:
    words = ("llama-3.1-8b", "--gpu", "l4", "--input", "64", "--output", "4", "--rate", "5")
    one = facts_of(*words, "--saturation", "--requests", "100")["saturation"]
    assert one["stable"] < one["saturated"]
    low, high = one["band"]
    assert low < one["stable"]
    assert one["saturated"] < high


@pytest.mark.parametrize(
    ("flags", "found"),
    [
        ({}, (1, 1, 0)),
        ({"gpus": 4}, (4, 1, 0)),
        ({"gpus": 4, "tp": 2}, (2, 2, 0)),
        ({"gpus": 4, "replicas": 4}, (1, 4, 0)),
        ({"tp": 2, "replicas": 3}, (2, 3, 0)),
        ({"prefill_replicas": 1, "decode_replicas": 3, "tp": 2}, (2, 1, 3)),
        ({"prefill_replicas": 1, "decode_replicas": 3, "gpus": 8}, (2, 1, 3)),
    ],
)
def test_gpus_are_tp_times_replicas(flags: dict[str, int], found: tuple[int, int, int]) -> None:
    fleet = make_fleet(AskedFleet(**flags))  # type: ignore[arg-type]
    assert (fleet.tp, fleet.replicas, fleet.decode) == found
    assert fleet.gpus == flags.get("gpus", fleet.gpus)


def test_rules_of_scaling() -> None:
    rules = parse_autoscale("2:6, waiting=100ms, busy=90%, idle=0.3, calm=2min, interval=1s")
    assert (rules.least, rules.most, rules.waiting_s) == (2, 6, 0.1)
    assert (rules.busy, rules.idle, rules.calm_s, rules.interval_s) == (0.9, 0.3, 120.0, 1.0)


BAD = [
    (("--gpu", "h100-sxm", *SHORT), "no MODEL was given"),
    (("llama-3.1-8b", "--gpu", "h100", *SHORT, "--rate", "1"), "more than one GPU: h100-sxm"),
    (("llama-3.1-8b", "--gpu", "h300", *SHORT, "--rate", "1"), "names like it"),
    (("lama-3.1-8b", "--gpu", "l4", *SHORT, "--rate", "1"), "llama-3.1-8b"),
    ((*ON_GPU, "--rate", "1", "--router", "round_robbin"), "Did you mean round-robin?"),
    ((*ON_GPU, "--rate", "1", "--engine", "tgi"), "vllm, sglang, trtllm, headrace"),
    ((*ON_GPU, "--rate", "1", "--tp", "3"), "32 attention heads. try: Use 2 or 4"),
    ((*ON_GPU, "--rate", "1", "--gpus", "3", "--replicas", "2"), "--gpus is 3, and 2 replicas of"),
    ((*ON_GPU, "--rate", "1", "--decode-replicas", "2"), "pools apart need both"),
    ((*ON_GPU, "--rate", "1", "--link", "9GB/s"), "nothing is sent"),
    ((*ON_GPU, "--rate", "1", "--cold-start", "9s"), "without --autoscale"),
    ((*ON_GPU, "--rate", "1", "--autoscale", "1:4"), "without --cold-start"),
    ((*ON_GPU, "--rate", "1", "--autoscale", "1-4", "--cold-start", "1s"), "LEAST:MOST"),
    ((*ON_GPU, "--rate", "1", "--autoscale", "1:4,bussy=1", "--cold-start", "1s"), "mean busy?"),
    ((*ON_GPU, "--rate", "1", "--autoscale", "2:4", "--cold-start", "1s"), "--replicas 2"),
    ((*ON_GPU, "--rate", "1", "--autoscale", "1:4", "--cold-start", "30"), "without a unit"),
    ((*ON_GPU, "--rate", "1", "--profile", "x.json"), "both say what to simulate"),
    (("llama-3.1-8b", "--gpu", "a100-sxm-80gb", "--quant", "fp8", *SHORT, "--rate", "1"),
     "has no fp8 arithmetic"),
    (("llama-3.1-8b", "--gpu", "l4", "--input", "200000", "--output", "9", "--rate", "1"),
     "A request has 200,009 tokens on average; the context is 131,072"),
]  # fmt: skip


@pytest.mark.parametrize(("words", "said"), BAD)
def test_bad_input_says_what_works(words: tuple[str, ...], said: str) -> None:
    assert said in shown(*words, exit_code=2)


def test_what_does_not_fit_is_an_answer() -> None:
    words = ("llama-3.1-70b", "--gpu", "h100-sxm", *SHORT, "--rate", "1")
    result = CliRunner().invoke(app, ["simulate", *words])
    assert result.exit_code == 1
    assert "can't be served on h100-sxm, bf16" in result.output


def test_sessions_are_counted_while_they_come() -> None:
    """Once the time in which the last sessions ended counted too: 3.2 requests/s of 4."""
    words = ("llama-3.1-8b", "--gpu", "h100-sxm", "--workload", "chat", "--rate", "4")
    served = facts_of(*words, "--requests", "1200", "--slo", "ttft=30s")["requests_s"]
    assert served == pytest.approx(4.0, rel=0.12)


def test_an_objective_that_no_load_allows_has_its_bound() -> None:
    words = (*ON_GPU[:-2], "--rate", "1", "--requests", "20", "--slo", "tpot=1ms")
    text = shown(*words, exit_code=1)
    assert "impossible TPOT: a token takes at least" in text
    assert "the objective is 1 ms" in text


def test_two_requests_have_no_latencies_and_say_so(tmp_path: Path) -> None:
    trace = tmp_path / "trace.csv"
    trace.write_text("timestamp,input_length,output_length\n0,30,5\n1,40,6\n")
    text = shown("llama-3.1-8b", "--gpu", "l4", "--trace", str(trace))
    assert "latencies none: no request is in the steady part" in text
    assert "band step times x" in text
