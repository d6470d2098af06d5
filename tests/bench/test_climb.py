"""--sweep and --hold on an endpoint whose answers depend on the rate alone."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from typing import Any, cast

import pytest
from tests.bench.test_summary import failed, summary_of, whole

from headrace.bench.climb import Climbed, climb
from headrace.bench.run import SPENT, Stop
from headrace.bench.session import Asked, Session
from headrace.bench.summary import Summary
from headrace.client.answer import Failure
from headrace.client.connection import Unreachable, parse_address
from headrace.core.errors import ConfigError
from headrace.workload.arrivals import ClosedLoop, OpenLoop
from headrace.workload.slo import Slo, parse_slo
from headrace.workload.workload import Synthetic, fixed

WORKLOAD = Synthetic(prompts=fixed(10), outputs=fixed(5), arrivals=ClosedLoop(clients=8))


class Endpoint:
    """TTFT is a tenth of a second for each request a second; long runs are 4% slower."""

    def __init__(self, slo: Slo | None) -> None:
        self.asked = Asked(address=parse_address(":1"), slo=slo)
        self.runs: list[tuple[float | None, float | None]] = []  # rate, seconds
        self.is_interrupted = False
        self.patience = 1000  # runs

    async def measure(self, workload: Synthetic, stop: Stop, **more: Any) -> Summary:
        loop = workload.arrivals
        rate_s = loop.rate_s if isinstance(loop, OpenLoop) else None
        self.runs.append((rate_s, stop.duration_s))
        self.is_interrupted = len(self.runs) > self.patience
        slower = 1.04 if (stop.duration_s or 0) > 30 else 1.0
        ttft_s = 0.1 * slower * (rate_s or 1.0)
        return summary_of(
            [whole(0.1 * n, ttft_s=ttft_s, gap_s=0.1) for n in range(40)], slo=self.asked.slo
        )

    async def check(self) -> None:
        """It is still there."""


def climbed(endpoint: Endpoint, hold_s: float | None) -> Climbed:
    return asyncio.run(climb(cast(Session, endpoint), WORKLOAD, point_s=10.0, hold_s=hold_s))


def test_it_holds_where_the_objective_is_just_met() -> None:
    """TTFT within 300 ms: 3 requests a second, and 2.88 where a run is long."""
    endpoint = Endpoint(parse_slo("ttft=300ms"))
    found = climbed(endpoint, 60.0)
    low, high = found.bracket.low_s, found.bracket.high_s
    assert low is not None
    assert high is not None
    assert low <= 3.0 < high <= 1.15 * low
    assert found.held is not None
    assert found.held.is_kept
    assert 2.5 <= found.held.rate_s <= 2.885
    assert found.best is found.held
    assert endpoint.runs[0] == (None, None)  # one client alone, whose speed is the first rate
    assert endpoint.runs[1][0] == pytest.approx(2.0)  # an answer takes 0.5 s
    assert endpoint.runs[-1][1] == 60.0


def test_without_an_objective_there_is_nothing_to_hold() -> None:
    with pytest.raises(ConfigError, match="--hold needs an objective"):
        climbed(Endpoint(None), 60.0)


def test_an_endpoint_that_never_saturates() -> None:
    found = climbed(Endpoint(None), None)
    assert str(found.bracket).startswith("above")
    assert found.best.rate_s == found.bracket.low_s


def test_an_interrupted_sweep_keeps_the_rates_that_were_whole() -> None:
    endpoint = Endpoint(None)
    endpoint.patience = 3
    found = climbed(endpoint, None)
    assert [point.rate_s for point in found.bracket.points] == pytest.approx([2.0, 4.0])
    assert len(endpoint.runs) == 4  # one alone, two rates, and the one that was interrupted
    endpoint = Endpoint(parse_slo("ttft=300ms"))
    endpoint.patience = 1
    assert len(climbed(endpoint, 60.0).bracket.points) == 1
    assert climbed(endpoint, 60.0).ended_by == "it was interrupted"


class Mortal(Endpoint):
    """Is gone after so many runs: in the middle of one, or between two."""

    def __init__(self, runs: int, *, in_a_run: bool) -> None:
        super().__init__(None)
        self.left, self.in_a_run = runs, in_a_run

    async def measure(self, workload: Synthetic, stop: Stop, **more: Any) -> Summary:
        self.left -= 1
        if self.left >= 0:
            return await super().measure(workload, stop, **more)
        if not self.in_a_run:
            raise Unreachable("host:1 can't be reached: gone.")
        lost = [failed(5.0 + n, Failure.RESET) for n in range(20)]
        return summary_of([whole(0.1 * n) for n in range(10)] + lost, has_given_up=True)

    async def check(self) -> None:
        if self.left < 0:
            raise Unreachable("host:1 can't be reached: gone.")


@pytest.mark.parametrize("in_a_run", [True, False])
def test_a_sweep_of_an_endpoint_that_dies_keeps_the_rates_before(in_a_run: bool) -> None:
    """The naive answer takes the failures for saturation."""
    found = climbed(Mortal(4, in_a_run=in_a_run), None)
    assert [point.rate_s for point in found.bracket.points] == pytest.approx([2.0, 4.0, 8.0])
    assert str(found.bracket) == "above 8 requests/s"
    assert found.ended_by == "host:1 can't be reached: gone."
    with pytest.raises(Unreachable, match="gone"):
        climbed(Mortal(1, in_a_run=in_a_run), None)


def test_a_sweep_ends_with_its_money() -> None:
    class Hosted(Endpoint):
        async def measure(self, workload: Synthetic, stop: Stop, **more: Any) -> Summary:
            found = await super().measure(workload, stop, **more)
            return replace(found, ended_by=SPENT) if len(self.runs) == 4 else found

    found = climbed(Hosted(None), None)
    assert (len(found.bracket.points), found.ended_by) == (2, "the spend limit is reached")


def test_a_rate_at_which_requests_are_refused_is_not_kept() -> None:
    """A limit of requests a minute: nothing gets slower, so that slopes alone see nothing."""

    class Limited(Endpoint):
        async def measure(self, workload: Synthetic, stop: Stop, **more: Any) -> Summary:
            found = await super().measure(workload, stop, **more)
            if (self.runs[-1][0] or 0.0) <= 10.0:
                return found
            refused = [failed(0.1 * n, Failure.RATE_LIMITED) for n in range(8)]
            return summary_of([*found.records, *refused])

    found = climbed(Limited(None), None)
    low, high = found.bracket.low_s, found.bracket.high_s
    assert low is not None
    assert high is not None
    assert low <= 10.0 < high
    assert found.best.rate_s == low
