"""Gauges that are worked out, not counted: how full the server is, and how its objective stands.

A gauge without a value is left out: missing is not zero. Knows metric names and the history.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator

from prometheus_client.core import Metric
from prometheus_client.registry import Collector

from headrace.server.observe.device import DeviceWatch
from headrace.server.observe.families import FamilyMaker
from headrace.server.observe.history import History
from headrace.server.observe.objective import Objective

USE_WINDOW_S = 10.0
BURN_WINDOWS_S = {"5m": 300.0, "1h": 3600.0}


class LoadMetrics(Collector):
    def __init__(
        self,
        history: History,
        objective: Objective | None,
        model_name: str,
        device: DeviceWatch | None = None,
    ) -> None:
        self._history = history
        self._device = device
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
        if self._device is not None:
            yield from self._used(self._device)

    def _used(self, device: DeviceWatch) -> Iterator[Metric]:
        make, history = self._make, self._history
        flops, read = (history.rate(name, USE_WINDOW_S) for name in ("model_flops", "model_bytes"))
        yield from self._known(
            "model_flops_per_second",
            "The model's products of the tokens of the last seconds, without attention's scores.",
            flops,
        )
        yield from self._known(
            "model_bytes_per_second",
            "Weights and used KV blocks that the steps of the last seconds read.",
            read,
        )
        if device.peaks is not None:
            yield from self._known(
                "mfu", "That rate of products / the device's peak.", flops / device.peaks.flops_s
            )
            yield from self._known(
                "bandwidth_use",
                "Those bytes / the device's bandwidth.",
                read / device.peaks.bytes_s,
            )
        values: dict[str, tuple[str, list[float | None]]] = {
            "gpu_utilization": (
                "Share of the time in which a kernel ran, as nvidia-smi has it.",
                [gpu.busy_share for gpu in device.gpus],
            ),
            "gpu_memory_used_bytes": (
                "Memory in use on the GPU, by whatever process.",
                [gpu.used_bytes for gpu in device.gpus],
            ),
            "gpu_memory_bytes": (
                "The GPU's memory.",
                [gpu.memory_bytes for gpu in device.gpus],
            ),
        }
        for name, (words, numbers) in values.items():
            samples = [
                ({"gpu": str(place)}, number)
                for place, number in enumerate(numbers)
                if number is not None
            ]
            if samples:
                yield make.own_gauge(name, words, samples)

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
