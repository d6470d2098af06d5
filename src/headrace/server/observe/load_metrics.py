"""Gauges that are worked out, not counted: how full the server is, and how its objective stands.

A gauge without a value is left out: missing is not zero. Knows metric names and the history.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator

from prometheus_client.core import Metric
from prometheus_client.registry import Collector

from headrace.server.observe.families import FamilyMaker
from headrace.server.observe.history import History
from headrace.server.observe.objective import Objective

BURN_WINDOWS_S = {"5m": 300.0, "1h": 3600.0}


class LoadMetrics(Collector):
    def __init__(self, history: History, objective: Objective | None, model_name: str) -> None:
        self._history = history
        self._objective = objective
        self._make = FamilyMaker(model_name)

    def describe(self) -> Iterable[Metric]:
        return []  # nothing is collected just to be registered

    def collect(self) -> Iterator[Metric]:
        history = self._history
        yield from self._known(
            "saturation",
            "How full: used places or KV blocks, whichever is more; 1 while sequences wait.",
            history.saturation,
        )
        yield from self._known(
            "pending_prefill_seconds",
            "How long the waiting prompt tokens will take, at the rate of the last minutes.",
            history.pending_prefill_s,
        )
        if self._objective is not None:
            yield from self._promised(self._objective)

    def _promised(self, objective: Objective) -> Iterator[Metric]:
        make, history, slo = self._make, self._history, objective.slo
        yield make.own_counter(
            "requests_within_slo", "Requests within the objective of --slo.", objective.within
        )
        yield make.own_counter(
            "requests_missed_slo",
            "Requests that missed it, by what they missed first.",
            [({"reason": reason}, n) for reason, n in objective.missed.items()],
        )
        times = {"ttft": slo.ttft_s, "tpot": slo.tpot_s, "e2e": slo.e2e_s}
        yield make.own_gauge(
            "slo_seconds",
            "The objective's times.",
            [({"part": part}, value) for part, value in times.items() if value is not None],
        )
        yield make.own_gauge("slo_share", "The share of requests that it is for.", slo.share)
        yield from self._known(
            "slo_headroom",
            "1 - (the worst time as a part of its objective, at that share of requests).",
            history.headroom,
        )
        burning = {
            window: rate
            for window, seconds in BURN_WINDOWS_S.items()
            if not math.isnan(rate := history.burn_rate(seconds))
        }
        if burning:
            yield make.own_gauge(
                "slo_burn_rate",
                "How fast the error budget is spent; 1 is what the objective allows.",
                [({"window": window}, rate) for window, rate in burning.items()],
            )

    def _known(self, name: str, words: str, value: float) -> Iterator[Metric]:
        if not math.isnan(value):
            yield self._make.own_gauge(name, words, value)
