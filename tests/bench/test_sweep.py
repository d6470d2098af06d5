"""Saturation: what is one and what is not, and how the edge is bracketed."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import replace
from random import Random

import pytest
from tests.bench.test_summary import summary_of, whole
from tests.bench.virtual import Scripted, run_virtually

from headrace.bench.feed import Feed
from headrace.bench.run import Run, Stop
from headrace.bench.sweep import (
    Bracket,
    Point,
    bracket,
    is_saturated,
    judge_point,
    saturated_so_far,
)
from headrace.workload.arrivals import OpenLoop
from headrace.workload.slo import Slo
from headrace.workload.workload import Synthetic, fixed

EMPTY = summary_of([whole(0.0)])


def tried(edge_s: float, start_s: float) -> Bracket:
    """An endpoint that saturates above `edge_s`."""

    async def probe(rate_s: float) -> Point:
        kept = rate_s <= edge_s
        return Point(rate_s=rate_s, summary=EMPTY, is_saturated=not kept, is_kept=kept)

    return asyncio.run(bracket(probe, start_s))


@pytest.mark.parametrize("edge_s", [0.013, 0.7, 1.0, 5.3, 333.0])
@pytest.mark.parametrize("start_s", [0.5, 1.0, 6.0])
def test_the_edge_is_between_two_rates_that_were_tried(edge_s: float, start_s: float) -> None:
    found = tried(edge_s, start_s)
    assert found.low_s is not None
    assert found.high_s is not None
    assert found.low_s <= edge_s < found.high_s
    assert found.high_s / found.low_s <= 1.15 or len(found.points) == 14
    assert {found.low_s, found.high_s} <= {point.rate_s for point in found.points}


def test_an_endpoint_without_an_edge() -> None:
    assert str(tried(1e12, 1.0)).startswith("above 8.19e+03")
    assert str(tried(0.0, 1.0)).startswith("below")


def run_at(rate_s: float, seconds: float, seed: int = 0) -> tuple[Run, float]:
    """An endpoint with four places and 0.5 s an answer: it serves 8 requests a second."""
    workload = Synthetic(prompts=fixed(10), outputs=fixed(5), arrivals=OpenLoop(rate_s=rate_s))
    stopped: list[float] = []

    async def work(clock: Callable[[], float]) -> Run:
        server = Scripted(clock, places=4, first_s=0.3, gap_s=0.05, tokens=5)

        def enough(progress: object) -> bool:
            if run.progress.elapsed_s < seconds and saturated_so_far(run.progress, rate_s):
                stopped.append(run.progress.elapsed_s)
                return True
            return False

        run = Run(server, clock=clock, spin_s=0.0, enough=enough)
        await run.run(Feed(workload.asks(seed)), Stop(duration_s=seconds))
        return run

    run = run_virtually(work)
    return run, stopped[0] if stopped else seconds


@pytest.mark.parametrize("rate_s", [13.0, 16.0, 40.0])
def test_too_much_is_seen_early(rate_s: float) -> None:
    run, until_s = run_at(rate_s, 60.0)
    assert until_s < 40.0
    progress = run.progress
    assert is_saturated(progress.samples, progress.records, until_s=until_s, rate_s=rate_s)


@pytest.mark.parametrize("rate_s", [1.0, 4.0, 5.6])
@pytest.mark.parametrize("seed", range(3))
def test_what_is_kept_is_not_called_saturated(rate_s: float, seed: int) -> None:
    """Up to 70% of what it serves: queues come and go."""
    run, until_s = run_at(rate_s, 60.0, seed)
    assert until_s == 60.0
    progress = run.progress
    assert not is_saturated(progress.samples, progress.records, until_s=until_s, rate_s=rate_s)


def test_one_slope_alone_is_not_saturation() -> None:
    """TTFT that rises while nothing queues, as with prompts that grow; and the other way round."""
    random = Random(1)
    growing = [whole(0.2 * n, ttft_s=0.1 + 0.01 * n) for n in range(100)]
    flat = [(0.1 * n, 3 + random.randrange(2)) for n in range(200)]
    assert not is_saturated(flat, growing, until_s=20.0, rate_s=5.0)
    steady = [whole(0.2 * n, ttft_s=0.1 + 0.001 * random.random()) for n in range(100)]
    rising = [(0.1 * n, n // 4) for n in range(200)]
    assert not is_saturated(rising, steady, until_s=20.0, rate_s=5.0)
    assert is_saturated(rising, growing, until_s=20.0, rate_s=5.0)


def test_for_an_objective_a_rate_that_misses_it_is_not_kept() -> None:
    summary = summary_of([whole(0.1 * n) for n in range(40)], slo=Slo(ttft_s=0.1))
    assert judge_point(1.0, summary, 10.0, by_objective=False).is_kept
    assert not judge_point(1.0, summary, 10.0, by_objective=True).is_kept
    met = replace(summary, slo=Slo(ttft_s=1.0))
    assert judge_point(1.0, met, 10.0, by_objective=True).is_kept
