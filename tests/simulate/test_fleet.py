"""Replicas behind a router: against one replica, against theory, and token by token."""

from __future__ import annotations

import itertools
import math
import random
import tracemalloc
from collections.abc import Iterator
from dataclasses import replace

import pytest

from headrace.core.config import SchedulerConfig
from headrace.core.errors import ConfigError
from headrace.core.step import RunnerLimits
from headrace.policies.routing import Routing
from headrace.policies.scaling import ScalingRules
from headrace.simulate.cost import linear_cost
from headrace.simulate.fleet import DecodePool, FleetReport, FleetSetup, serve_fleet
from headrace.simulate.handover import Handover, Link
from headrace.simulate.replica import UNBOUNDED, Edge, Replica, Setup
from headrace.simulate.serve import serve
from headrace.simulate.served import Served
from headrace.workload.ask import Ask

LIMITS = RunnerLimits(
    max_batch_tokens=1024,
    max_sequences=16,
    total_blocks=1024,
    block_tokens=16,
    context_tokens=4096,
    steps_in_flight=2,
)
SETUP = Setup(
    limits=LIMITS,
    cost=linear_cost(0.01, 5e-5),
    host=lambda plan: 0.002,
    edge=Edge(before_s=0.004, after_s=0.001),
    queue=UNBOUNDED,
)


def documents(rate: float, count: int, seed: int = 1, kinds: int = 12) -> Iterator[Ask]:
    """Questions about some documents."""
    chooser, at_s = random.Random(seed), 0.0
    for _ in range(count):
        at_s += chooser.expovariate(rate)
        yield Ask(
            at_s=at_s,
            prompt_tokens=600,
            output_tokens=chooser.randint(1, 60),
            shared=((f"document {chooser.randrange(kinds)}", 512),),
        )


def seen(served: Served) -> tuple[float | None, ...]:
    return (
        served.arrival_s,
        served.started_s,
        served.first_s,
        served.end_s,
        served.tokens,
        served.cached_tokens,
    )


def test_a_fleet_of_one_is_a_replica() -> None:
    asks = list(documents(20, 150))
    fleet, alone = serve_fleet(asks, FleetSetup(setup=SETUP)), serve(asks, SETUP)
    assert [seen(each) for each in fleet.served] == [seen(each) for each in alone.served]
    assert (fleet.steps, fleet.preemptions) == (alone.steps, alone.preemptions)
    assert fleet.replica_s == pytest.approx(max(each.end_s or 0.0 for each in alone.served))


@pytest.mark.parametrize("routing", list(Routing))
def test_every_request_is_served_once_and_the_same_seed_gives_the_same(routing: Routing) -> None:
    asks = list(documents(60, 200))
    setup = FleetSetup(setup=SETUP, replicas=4, routing=routing, seed=3)
    one, two = serve_fleet(asks, setup), serve_fleet(asks, setup)
    assert [seen(each) for each in one.served] == [seen(each) for each in two.served]
    assert [each.ask for each in one.served] == asks
    assert all(each.tokens == each.ask.output_tokens for each in one.served)
    assert {each.replica for each in one.served} == {0, 1, 2, 3}


def test_random_routing_makes_single_servers_of_a_fleet() -> None:
    """Poisson arrivals, split at random: each replica is an M/D/1 of its own."""
    setup = Setup(
        limits=replace(LIMITS, max_sequences=1, steps_in_flight=1),
        cost=lambda plan: 1.0,
        config=SchedulerConfig(prefix_cache=False),
        queue=UNBOUNDED,
    )
    chooser, at_s, asks = random.Random(8), 0.0, []
    for _ in range(9000):
        at_s += chooser.expovariate(3 * 0.6)
        asks.append(Ask(at_s=at_s, prompt_tokens=1, output_tokens=1))
    waits = {}
    for routing in (Routing.RANDOM, Routing.LEAST_PENDING):
        report = serve_fleet(asks, FleetSetup(setup=setup, replicas=3, routing=routing))
        assert report.queue_s is not None
        waits[routing] = report.queue_s.mean
        for number in range(3):
            own = [each for each in report.served if each.replica == number]
            wait_s = 0.0
            for before, after in itertools.pairwise(own):
                wait_s = max(0.0, wait_s + 1.0 - (after.arrival_s - before.arrival_s))
                assert after.queue_s == pytest.approx(wait_s, abs=1e-6)
    assert waits[Routing.RANDOM] == pytest.approx(0.6 / (2 * (1 - 0.6)), rel=0.12)
    assert waits[Routing.LEAST_PENDING] < 0.5 * waits[Routing.RANDOM]


def test_requests_with_one_beginning_find_it_if_they_go_to_one_replica() -> None:
    small = replace(SETUP, limits=replace(LIMITS, total_blocks=260))  # room for few documents

    def run(routing: Routing) -> FleetReport:
        fleet = FleetSetup(setup=small, replicas=4, routing=routing)
        return serve_fleet(documents(40, 500, kinds=24), fleet)

    blind, sighted = run(Routing.ROUND_ROBIN), run(Routing.PREFIX)
    assert sighted.cached_share > 1.5 * blind.cached_share
    assert sighted.ttft_s is not None
    assert blind.ttft_s is not None
    assert sighted.ttft_s.mean < blind.ttft_s.mean


def test_sessions_stay_where_they_are() -> None:
    asks = [
        Ask(
            at_s=0.1 * session,
            prompt_tokens=100,
            output_tokens=20,
            session=session,
            turn=turn,
            after_s=0.5 if turn else None,
        )
        for session in range(12)
        for turn in range(5)
    ]
    fleet = FleetSetup(setup=SETUP, replicas=3, routing=Routing.SESSION, bound=100.0)
    report = serve_fleet(asks, fleet)
    homes = [
        {each.replica for each in report.served if each.ask.session == session}
        for session in range(12)
    ]
    assert all(len(home) == 1 for home in homes)
    assert len(set.union(*homes)) == 3


# -- prefill and decode apart ------------------------------------------------------------------


def apart(link_bytes_s: float = 1e9, replicas: int = 2) -> FleetSetup:
    way = Handover(kv_bytes=lambda tokens: 1e5 * tokens, link_bytes_s=link_bytes_s, latency_s=0.001)
    return FleetSetup(
        setup=SETUP,
        replicas=replicas,
        decode=DecodePool(setup=SETUP, replicas=2, handover=way),
    )


def test_a_prompt_goes_over_the_link_before_it_is_continued() -> None:
    ask = Ask(at_s=1.0, prompt_tokens=480, output_tokens=5)
    report = serve_fleet([ask], apart())
    (served,) = report.served
    alone = serve([replace(ask, output_tokens=1)], SETUP).served[0]
    assert served.first_s == alone.first_s
    assert served.tokens == 5
    assert served.first_s is not None
    assert served.end_s is not None
    sent_s = served.first_s - SETUP.edge.after_s
    # 0.049 s on the link; then a step for what is left of the last block and the second token,
    # and one for each token that follows, with the host's first time before them.
    steps_s = 0.002 + (0.01 + 5e-5 * 1) + 3 * (0.01 + 5e-5) + SETUP.edge.after_s
    assert served.end_s == pytest.approx(sent_s + 0.001 + 0.048 + steps_s, abs=1e-3)


def test_long_prompts_do_not_disturb_decoding_elsewhere() -> None:
    chooser, at_s, asks = random.Random(2), 0.0, []
    for _ in range(120):
        at_s += chooser.expovariate(8.0)
        asks.append(Ask(at_s=at_s, prompt_tokens=chooser.choice((50, 2000)), output_tokens=50))
    disaggregated = serve_fleet(asks, apart(link_bytes_s=1e12))
    together = serve_fleet(asks, FleetSetup(setup=SETUP, replicas=4))
    for report in (disaggregated, together):
        assert all(each.tokens == 50 for each in report.served)
    assert disaggregated.tpot_s is not None
    assert together.tpot_s is not None
    assert disaggregated.tpot_s.p99 < together.tpot_s.p99
    assert disaggregated.replica_s == pytest.approx(together.replica_s, rel=0.05)


def test_a_slow_link_is_the_bound() -> None:
    """Each prompt takes 0.961 s on the way: two senders send about two a second."""
    asks = [Ask(at_s=0.0, prompt_tokens=960, output_tokens=4) for _ in range(20)]
    report = serve_fleet(asks, apart(link_bytes_s=1e8))
    last_s = max(each.end_s or 0.0 for each in report.served)
    assert last_s == pytest.approx(20 / 2 * 0.961, rel=0.03)


def test_one_sequence_goes_after_the_other() -> None:
    link = Link(Handover(kv_bytes=lambda tokens: 2.0 * tokens, link_bytes_s=4.0, latency_s=0.5))
    assert [link.send(10, 0.0), link.send(10, 1.0), link.send(2, 100.0)] == [5.5, 11.0, 101.5]


def test_an_answer_of_one_token_ends_where_its_prompt_was() -> None:
    (served,) = serve_fleet([Ask(at_s=0.0, prompt_tokens=10, output_tokens=1)], apart()).served
    assert served.first_s == served.end_s


# -- size --------------------------------------------------------------------------------------


def test_a_fleet_grows_under_load_and_new_replicas_take_their_time() -> None:
    rules = ScalingRules(most=4, waiting_s=0.1, interval_s=1.0, calm_s=5.0)
    burst = documents(25, 400)  # more than one replica can do
    trickle = (Ask(at_s=25.0 + number, prompt_tokens=50, output_tokens=10) for number in range(40))
    fleet = FleetSetup(setup=SETUP, replicas=1, scaling=rules, cold_start_s=4.0, ttft_s=0.5)
    asks = sorted([*burst, *trickle], key=lambda ask: ask.at_s)
    report = serve_fleet(asks, fleet)
    assert all(each.tokens == each.ask.output_tokens for each in report.served)
    sizes = [size for _, size in report.sizes]
    assert sizes[0] == 1
    assert max(sizes) > 1
    assert sizes[-1] < max(sizes)
    grown_s = next(at_s for at_s, size in report.sizes if size > 1)
    first = min(each.arrival_s for each in report.served if each.replica > 0)
    assert first >= grown_s + fleet.cold_start_s
    # What is paid for is at most every replica all the time, and at least one.
    end_s = max(each.end_s or 0.0 for each in report.served)
    assert end_s < report.replica_s < max(sizes) * end_s


def test_a_replica_takes_little_memory() -> None:
    """256 sequences and a pool full of cached blocks: the GPU backend's block size, and the pool of
    an 8B model on 80 GB."""
    pool = replace(
        LIMITS, max_batch_tokens=8192, max_sequences=256, total_blocks=6562, block_tokens=64
    )
    setup = replace(SETUP, limits=pool)

    def fill(replica: Replica, requests: int) -> None:
        offered = 0
        while offered < requests:
            while replica.requests < 256 and offered < requests:
                ask = Ask(at_s=replica.now_s, prompt_tokens=512, output_tokens=300)
                replica.offer(Served(ask=ask, arrival_s=ask.at_s), ask.at_s)
                offered += 1
            replica.wake()

    fill(Replica(setup), 4)  # what is made once for all replicas
    tracemalloc.start()
    try:
        replica = Replica(setup)
        fill(replica, 520)
        taken_bytes = tracemalloc.get_traced_memory()[0]
    finally:
        tracemalloc.stop()
    assert replica.stats.running_sequences > 200
    assert taken_bytes < 5e6


def test_a_pool_without_replicas_is_refused() -> None:
    with pytest.raises(ConfigError, match="0 replicas"):
        FleetSetup(setup=SETUP, replicas=0)


def test_requests_in_a_fleet_obey_littles_law() -> None:
    report = serve_fleet(documents(40, 300), FleetSetup(setup=SETUP, replicas=3))
    changes = sorted(
        [(each.arrival_s, 1) for each in report.served]
        + [(each.end_s or 0.0, -1) for each in report.served]
    )
    present, area, before_s = 0, 0.0, 0.0
    for at_s, change in changes:
        area += present * (at_s - before_s)
        present, before_s = present + change, at_s
    assert area == pytest.approx(math.fsum(each.e2e_s for each in report.served))
