"""The doctor against a real `headrace serve`: one that is well, and one with a single place. Only
what does not depend on this machine's speed is looked at."""

from __future__ import annotations

from tests.server.conftest import RunningServer, StartServer

from headrace.doctor.collect import Wanted, observe
from headrace.doctor.endpoint import Endpoint
from headrace.doctor.observation import Observation
from headrace.doctor.preflight import preflight
from headrace.doctor.probe_plan import Plan
from headrace.doctor.rules import RULES
from headrace.doctor.step_curve import overlap

SMALL = Plan(
    repeats=3, answer_tokens=8, medium_tokens=64, long_tokens=128, long_repeats=1,
    prefix_tokens=128, prefix_pairs=2, concurrency=6, bursts=1, burst_tokens=24, stream_tokens=16,
    compared=1,
)  # fmt: skip


def probed(server: RunningServer) -> Observation:
    return observe(Endpoint(server.base_url), Wanted(interval_s=0.6, plan=SMALL, seed=3))


def test_a_server_that_is_well(server: RunningServer) -> None:
    seen = probed(server)
    assert seen.engine.name == "headrace"
    assert seen.engine.version
    assert seen.probe is not None
    assert seen.probe.errors == ()
    assert seen.config["device"] == "cpu"
    assert seen.config["kv_tokens"] == 16384
    # All bursts ran together, the repeated prefix was found, counters agree with the client.
    assert overlap(seen.probe.bursts[0]) > 2
    assert all((a.cached_tokens or 0) >= 64 for a in seen.probe.warm)
    assert all(a.is_counted for a in seen.probe.answers)
    for number in (1, 2, 3, 4, 9, 19, 24, 37, 38, 41):
        assert RULES[number](seen) is None, number
    passed = {c.number for c in preflight(seen) if c.answer == "pass"}
    assert {3, 5, 7, 8, 9, 10} <= passed


def test_a_server_with_one_place(start_server: StartServer) -> None:
    seen = probed(start_server(engine={"max_sequences": 1}))
    found = RULES[4](seen)
    assert found is not None
    assert any("the engine has 1 place" in line for line in found.evidence)
    assert found.fix == ("--max-sequences 8  (Headrace 0.1.0)",)
