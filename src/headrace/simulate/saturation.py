"""At which rate a setup is saturated by a workload: a bracket, from runs with several seeds.

A rate is stable if the queue grew with no seed, and saturated if it grew with every one; in
between, chance decides, and the bracket is as wide as that. Runs are long enough to be judged.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace

from headrace.core.errors import ConfigError
from headrace.simulate.replica import UNBOUNDED, Edge, Setup
from headrace.simulate.report import Report
from headrace.simulate.serve import serve
from headrace.simulate.verdict import Bracket, Verdict, find_saturation
from headrace.workload.ask import Ask
from headrace.workload.workload import Workload

BURST_REQUESTS = 400  # and four for each place, so that most of the burst finds a full batch
LEAST_REQUESTS = 400
TURNS = 8  # a run is this many times as long as a request, or a session


def burst(asks: Iterable[Ask], setup: Setup) -> Report:
    """All requests at once, without the queue's bounds: what it serves with no lack of work."""
    at_once = (replace(ask, at_s=0.0, session=None, turn=0, after_s=None) for ask in asks)
    return serve(at_once, replace(setup, edge=Edge(), queue=UNBOUNDED))


def saturation(
    workload: Workload,
    setup: Setup,
    *,
    seeds: Sequence[int] = (0, 1, 2),
    tolerance: float = 0.05,
    most_requests: int = 20_000,
    replicas: int = 1,
    run: Callable[[Iterable[Ask]], Report] | None = None,
) -> Bracket:
    """Of a workload that has a rate. Long sessions need many requests to be judged: with too few
    all rates are unclear, and the bracket is open. `run` is a fleet of so many replicas; None: one
    with this setup."""
    count = max(BURST_REQUESTS, 4 * setup.limits.max_sequences)
    asks = list(workload.asks(seeds[0], count))
    first = burst(asks, setup)
    if not first.requests_s:
        raise ConfigError(
            f"None of the {len(first.served)} requests of workload {workload.name} could be served "
            "by this setup; expected some.",
            "Give it more memory, a longer context or shorter requests.",
        )
    times = [each.e2e_s - each.queue_s for each in first.done]
    span_s = _span_s(asks, math.fsum(times) / len(times))

    def serve_one(asks: Iterable[Ask]) -> Report:
        return serve(asks, setup)

    served = run or serve_one

    def judged(rate: float) -> Verdict:
        wanted = math.ceil(TURNS * rate * span_s)
        count = min(most_requests, max(LEAST_REQUESTS, wanted))
        verdicts = {served(workload.at_rate(rate).asks(seed, count)).verdict for seed in seeds}
        return verdicts.pop() if len(verdicts) == 1 else Verdict.UNCLEAR

    return find_saturation(judged, first.requests_s * replicas, tolerance=tolerance)


def _span_s(asks: Sequence[Ask], service_s: float) -> float:
    """The mean time of a session, or of a request if there are none."""
    sessions = len({ask.session for ask in asks if ask.session is not None})
    alone = sum(1 for ask in asks if ask.session is None)
    between_s = math.fsum(ask.after_s or 0.0 for ask in asks)
    return (between_s + service_s * len(asks)) / (sessions + alone)
