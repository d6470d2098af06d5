"""Replicas in a few moments a request: beside whole engines on the same requests, and alone."""

from __future__ import annotations

import math
import random
import statistics
from collections.abc import Iterator

import pytest

from headrace.core.config import SchedulerConfig
from headrace.core.step import RunnerLimits
from headrace.policies.prefixes import Caches
from headrace.policies.routing import Routing, Wanted
from headrace.simulate.coarse import CoarseReplica, Job, Machine
from headrace.simulate.coarse_fleet import serve_coarsely
from headrace.simulate.cost import linear_cost
from headrace.simulate.fleet import FleetSetup, serve_fleet
from headrace.simulate.replica import UNBOUNDED, Setup
from headrace.workload.ask import Ask

MACHINE = Machine(
    base_s=0.008,
    token_s=2e-5,
    context_s=1e-8,
    max_batch_tokens=2048,
    max_sequences=64,
    kv_tokens=24_000,
)


def documents(count: int, rate: float, kinds: int = 30) -> Iterator[Ask]:
    chance, at_s = random.Random(4), 0.0
    for _ in range(count):
        at_s += chance.expovariate(rate)
        own = 1 + int(chance.expovariate(1 / 150))
        yield Ask(
            at_s=at_s,
            prompt_tokens=1200 + own,
            output_tokens=1 + int(chance.expovariate(1 / 60)),
            shared=(("system", 200), (f"document {chance.randrange(kinds)}", 1000)),
        )


@pytest.mark.parametrize("routing", [Routing.ROUND_ROBIN, Routing.PREFIX])
def test_it_is_close_to_whole_engines(routing: Routing) -> None:
    limits = RunnerLimits(
        max_batch_tokens=MACHINE.max_batch_tokens,
        max_sequences=MACHINE.max_sequences,
        total_blocks=MACHINE.kv_tokens // MACHINE.block_tokens,
        block_tokens=MACHINE.block_tokens,
        context_tokens=8192,
        steps_in_flight=1,
    )
    setup = Setup(
        limits=limits,
        cost=linear_cost(MACHINE.base_s, MACHINE.token_s, MACHINE.context_s),
        config=SchedulerConfig(max_step_growth=24),
        queue=UNBOUNDED,
    )
    asks = list(documents(400, 40.0))
    engines = serve_fleet(asks, FleetSetup(setup=setup, replicas=4, routing=routing))
    coarse = serve_coarsely(asks, MACHINE, 4, routing)
    assert len(coarse.ttft_s) == len(asks)
    assert coarse.cached_share == pytest.approx(engines.cached_share, abs=0.05)
    ttft_s = statistics.fmean(each.ttft_s for each in engines.served)
    assert statistics.fmean(coarse.ttft_s) == pytest.approx(ttft_s, rel=0.2)
    e2e_s = statistics.fmean(each.e2e_s for each in engines.served)
    assert statistics.fmean(coarse.e2e_s) == pytest.approx(e2e_s, rel=0.05)


def test_the_same_seed_gives_the_same() -> None:
    runs = [serve_coarsely(documents(300, 60.0), MACHINE, 5, Routing.PREFIX, 2) for _ in range(2)]
    assert runs[0].ttft_s == runs[1].ttft_s
    assert sum(runs[0].requests_by_replica) == 300


def alike(count: int, rate: float) -> Iterator[Ask]:
    chance, at_s = random.Random(7), 0.0
    for _ in range(count):
        at_s += chance.expovariate(rate)
        tokens = 1 + int(chance.expovariate(1 / 1500))
        answer = 1 + int(chance.expovariate(1 / 150))
        yield Ask(at_s=at_s, prompt_tokens=tokens, output_tokens=answer)


def test_counting_what_is_pending_is_worth_it_where_nothing_is_shared() -> None:
    """Where prompts stayed pending until their answers ended, round robin was a sixth faster: a
    replica with many long answers looked full, and others computed two prompts at a time."""
    ttft_s = {
        routing: statistics.fmean(serve_coarsely(alike(1200, 72.0), MACHINE, 12, routing, 1).ttft_s)
        for routing in (Routing.ROUND_ROBIN, Routing.LEAST_PENDING)
    }
    assert ttft_s[Routing.LEAST_PENDING] < 1.02 * ttft_s[Routing.ROUND_ROBIN]


def job(prompt: int, output: int, at_s: float = 0.0) -> Job:
    ask = Ask(at_s=at_s, prompt_tokens=prompt, output_tokens=output)
    return Job(ask=ask, arrival_s=at_s, counted=Wanted(prompt_tokens=prompt).counted())


def run(replica: CoarseReplica) -> list[Job]:
    ended = []
    while replica.next_s < math.inf:
        ended += replica.wake()[1]
    return ended


def test_one_request_takes_a_step_for_its_prompt_and_one_for_each_token() -> None:
    machine = Machine(base_s=1.0, token_s=0.01, max_batch_tokens=100)
    replica = CoarseReplica(machine, 0, Caches())
    replica.offer(job(250, 3), 5.0)
    (only,) = run(replica)
    assert only.first_s == pytest.approx(5.0 + 2 * 2.0 + 1.5)  # 100, 100 and 50 tokens
    assert only.end_s == pytest.approx(only.first_s + 2 * 1.01)


def test_who_comes_during_a_step_joins_the_next() -> None:
    machine = Machine(base_s=1.0, token_s=0.0)
    replica = CoarseReplica(machine, 0, Caches())
    replica.offer(job(10, 10), 0.0)
    replica.wake()
    replica.offer(job(10, 1, 3.4), 3.4)
    ended = run(replica)
    assert [each.end_s for each in ended] == [5.0, 10.0]


def test_places_and_room_are_waited_for() -> None:
    for machine in (
        Machine(base_s=1.0, token_s=0.0, max_sequences=1),
        Machine(base_s=1.0, token_s=0.0, kv_tokens=30),
    ):
        replica = CoarseReplica(machine, 0, Caches())
        for _ in range(3):
            replica.offer(job(10, 10), 0.0)
        assert [each.first_s for each in run(replica)] == [1.0, 11.0, 21.0]
