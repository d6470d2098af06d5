"""Engines that misbehave while they are probed, one pathology at a time, on every engine. What they
do does not depend on how fast this machine is: one place, an error inside a stream, a cut stream, a
counter that stands still."""

from __future__ import annotations

from typing import Any

import pytest
from tests.doctor.fakes import MODELS, FakeEngine, Script, Values, render, serving

from headrace.doctor.collect import Wanted, observe
from headrace.doctor.names import ENGINES
from headrace.doctor.observation import Observation
from headrace.doctor.probe_plan import Plan
from headrace.doctor.rules import RULES

SMALL = Plan(
    repeats=2, answer_tokens=4, medium_tokens=32, long_tokens=64, long_repeats=1, prefix_tokens=32,
    prefix_pairs=1, concurrency=6, bursts=1, burst_tokens=6, stream_tokens=8, compared=1,
)  # fmt: skip
BY_NAME = {each.engine: each for each in ENGINES}
OLLAMA = {
    "/api/version": {"version": "0.33.0"},
    "/api/ps": {"models": [{"name": "m", "size": 10, "size_vram": 10, "context_length": 8192}]},
}
# Where each engine says how many places it has; the others don't.
PLACES: dict[str, dict[str, Any]] = {
    "headrace": {"/version": {"version": "1", "config": {"engine": {"max_sequences": 1}}}},
    "sglang": {"/get_server_info": {"max_running_requests": 1}},
    "tgi": {"/info": {"max_batch_size": 1}},
    "llama.cpp": {"/props": {"total_slots": 1, "default_generation_settings": {"n_ctx": 8192}}},
}
EVERY = [*BY_NAME, "ollama", ""]


def probed(name: str, script: Script, paths: dict[str, Any] | None = None) -> Observation:
    pages = []
    if name in BY_NAME:
        levels = {"running": 0.0, "waiting": 0.0, "kv_usage": 0.0}
        pages = [render(BY_NAME[name], Values(levels=levels, counters={"generation_tokens": 5}))]
    more = OLLAMA if name == "ollama" else {}
    engine = FakeEngine(pages, paths={"/v1/models": MODELS, **more, **(paths or {})}, script=script)
    with serving(engine) as endpoint:
        return observe(endpoint, Wanted(interval_s=0.0, plan=SMALL, seed=1))


def fired(number: int, seen: Observation) -> bool:
    return RULES[number](seen) is not None


@pytest.mark.parametrize("name", PLACES)
def test_one_place_is_named_where_the_engine_tells_it(name: str) -> None:
    seen = probed(name, Script(places=1, token_s=0.001), PLACES[name])
    finding = RULES[4](seen)
    assert finding is not None
    assert "1 place" in " ".join(finding.evidence)
    assert not fired(2, seen)


@pytest.mark.parametrize("name", [name for name in EVERY if name not in PLACES])
def test_one_place_is_no_batching_where_nothing_tells(name: str) -> None:
    seen = probed(name, Script(places=1, token_s=0.001))
    assert fired(2, seen)


@pytest.mark.parametrize("name", EVERY)
def test_errors_and_counters(name: str) -> None:
    """Two pathologies and a healthy engine in one, since each takes a server."""
    oom = probed(name, Script(error="CUDA out of memory. Tried to allocate 2 GiB"))
    assert fired(9, oom)
    cut = probed(name, Script(cuts=True))
    assert fired(24, cut)
    assert not fired(9, cut)
    good = probed(name, Script())
    assert not fired(9, good)
    assert not fired(24, good)
    # A page that stands still while tokens come is a finding; without a counter there is none.
    counts = name in BY_NAME and "generation_tokens" in BY_NAME[name].counters
    assert fired(41, good) is counts


def test_ollamas_spill_is_exact() -> None:
    spilled = {"/api/ps": {"models": [{"name": "m", "size": 1000, "size_vram": 600}]}}
    seen = probed("ollama", Script(), spilled)
    finding = RULES[1](seen)
    assert finding is not None
    assert "40% spilled" in finding.evidence[0]
    assert not fired(1, probed("ollama", Script()))


def test_a_proxy_is_compared_with_what_is_behind_it() -> None:
    """One place in front, as many as wanted behind: the same probes on both."""
    front = FakeEngine([], script=Script(places=1, token_s=0.01))
    behind = FakeEngine([], script=Script(token_s=0.01))
    with serving(front) as proxy, serving(behind) as direct:
        seen = observe(proxy, Wanted(interval_s=0.0, plan=SMALL, direct=direct, seed=1))
    assert seen.direct is not None
    assert len(behind.asked) == len(front.asked)
    assert fired(39, seen)
