"""One simulated run of a replica, and what came of it in plain numbers.

A run takes as many requests as a steady state needs: several times those that are in the server at
once, or the queue's growth could not be told from the batch filling up. Knows a replica's setup and
a workload; not where the setup came from.
"""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass, replace
from typing import Any

from headrace.simulate.fleet import FleetSetup, serve_fleet
from headrace.simulate.replica import Setup
from headrace.simulate.report import Percentiles, Report
from headrace.simulate.serve import serve
from headrace.workload.slo import Slo
from headrace.workload.workload import Workload

LEAST_REQUESTS = 150  # so that one late request is not more than 1%
MOST_REQUESTS = 4000
TURNS = 5  # times the requests that are in the server at once


@dataclass(frozen=True, slots=True, kw_only=True)
class Latency:
    """In seconds."""

    p50: float
    p99: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Trial:
    """`slowness` is what step times were multiplied with, and `lateness` what first tokens were
    besides: the ends of the cost model's band."""

    rate: float  # requests/s that were offered
    replicas: int
    seed: int
    requests: int
    slowness: float
    lateness: float
    holds: bool  # the objective is met, and the queue does not grow
    verdict: str  # stable, saturated, unclear
    met_share: float
    misses: tuple[str, ...]  # which times were missed by more than the objective allows
    # None where the queue grew: latencies then depend on how long the run was, and mean nothing.
    ttft_s: Latency | None
    tpot_s: Latency | None
    e2e_s: Latency | None
    output_tokens_s: float
    cached_share: float
    preemptions: int
    steps: int

    def facts(self) -> dict[str, Any]:
        return asdict(self)


def requests_for(rate: float, e2e_s: float) -> int:
    """How many requests show a steady state: Little's law gives those that are there at once."""
    return min(MOST_REQUESTS, max(LEAST_REQUESTS, math.ceil(TURNS * rate * e2e_s)))


def run_trial(
    setup: Setup,
    workload: Workload,
    slo: Slo,
    *,
    rate: float,
    seed: int,
    requests: int,
    slowness: float = 1.0,
    lateness: float = 1.0,
    replicas: int = 1,
) -> Trial:
    """`rate` and `requests` are those of all replicas together; several stand behind a router that
    sends each request to the one with the least to do."""
    asks = workload.at_rate(rate).asks(seed, requests)
    if replicas == 1:
        report = serve(asks, setup)
    else:
        report = serve_fleet(asks, FleetSetup(setup=setup, replicas=replicas, seed=seed))
    if slo.ttft_s is not None:
        slo = replace(slo, ttft_s=slo.ttft_s / lateness)
    saturated = report.saturated
    return Trial(
        rate=rate,
        replicas=replicas,
        seed=seed,
        requests=requests,
        slowness=slowness,
        lateness=lateness,
        holds=report.meets(slo),
        verdict=str(report.verdict),
        met_share=report.met_share(slo),
        misses=_misses(report, slo),
        ttft_s=None if saturated else _latency(report.ttft_s, lateness),
        tpot_s=None if saturated else _latency(report.tpot_s),
        e2e_s=None if saturated else _latency(report.e2e_s),
        output_tokens_s=report.output_tokens_s,
        cached_share=report.cached_share,
        preemptions=report.preemptions,
        steps=report.steps,
    )


def _latency(found: Percentiles | None, factor: float = 1.0) -> Latency | None:
    return None if found is None else Latency(p50=found.p50 * factor, p99=found.p99 * factor)


def _misses(report: Report, slo: Slo) -> tuple[str, ...]:
    done = [each for each in report.measured if each.is_done]
    late = {
        "TTFT": sum(1 for each in done if slo.ttft_s is not None and each.ttft_s > slo.ttft_s),
        "TPOT": sum(1 for each in done if slo.tpot_s is not None and each.tpot_s > slo.tpot_s),
        "end-to-end time": sum(
            1 for each in done if slo.e2e_s is not None and each.e2e_s > slo.e2e_s
        ),
    }
    allowed = (1 - slo.share) * len(report.measured)
    return tuple(name for name, count in late.items() if count > allowed)
