"""--sweep and --hold on an endpoint whose answers depend on the rate alone."""

from __future__ import annotations

import asyncio
from typing import Any, cast

import pytest
from tests.bench.test_summary import summary_of, whole

from headrace.bench.climb import Climbed, climb
from headrace.bench.run import Stop
from headrace.bench.session import Asked, Session
from headrace.bench.summary import Summary
from headrace.client.connection import parse_address
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
    assert "interrupted" in str(climbed(endpoint, 60.0).bracket)
