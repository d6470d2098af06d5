"""Adds the watchers to a service: metrics and the request log always, traces if enabled.

The one place that knows all of them; none of them knows another.
"""

from __future__ import annotations

import platform
import time
from collections.abc import Callable

from headrace.core.version import headrace_version
from headrace.server.link.snapshot import EngineSnapshot
from headrace.server.observe.device import DeviceWatch
from headrace.server.observe.diagnosis import Diagnoser
from headrace.server.observe.exposition import Exposition
from headrace.server.observe.history import History
from headrace.server.observe.key_metrics import KeyMetrics
from headrace.server.observe.load_metrics import LoadMetrics
from headrace.server.observe.metrics import Metrics
from headrace.server.observe.objective import Objective
from headrace.server.observe.request_log import RequestLog
from headrace.server.request.service import Service
from headrace.workload.slo import parse_slo


def watch(service: Service) -> Callable[[], None]:
    """Starts watching. Call the returned function when the last request is over."""
    version = headrace_version()
    metrics = Metrics(service.supervisor, edge=service)

    def build() -> dict[str, str]:
        return {
            "version": version,
            "fingerprint": service.fingerprint,  # empty until the engine has reported its backend
            "python_version": platform.python_version(),
        }

    by_key = KeyMetrics(metrics, service.model.name, service.keys.weights)
    slo = service.config.slo
    objective = None if slo is None else Objective(parse_slo(slo))
    device = DeviceWatch(service.config.profile)
    history = History(metrics, objective, time.monotonic(), device)
    load = LoadMetrics(history, objective, service.model.name, device)
    exposition = Exposition(metrics, service.model.name, build, by_key, load)

    def on_snapshot(snapshot: EngineSnapshot) -> None:
        metrics.on_snapshot(snapshot)
        if metrics.engine_facts is not None and metrics.engine_facts.backend.get("name") == "cuda":
            device.watch_gpus()
        history.sample(time.monotonic(), time.time())

    service.exposition, service.history, service.objective = exposition, history, objective
    service.device = device
    service.diagnoser = Diagnoser(exposition, history, None if objective is None else objective.slo)
    service.supervisor.on_snapshot = on_snapshot
    service.watchers += [metrics, by_key]
    if objective is not None:
        service.watchers.append(objective)
        service.http_watchers.append(objective)
    service.open_requests = lambda: metrics.waiting_requests + metrics.running_requests
    service.http_watchers += [metrics, by_key, RequestLog(service.config.log_content)]
    if not service.config.trace:
        return device.close
    from headrace.server.observe.tracing import start_tracing

    tracing = start_tracing(service.model.name, version)
    service.http_watchers.append(tracing)

    def close() -> None:
        device.close()
        tracing.close()

    return close
