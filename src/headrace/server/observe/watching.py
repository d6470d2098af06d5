"""Adds the watchers to a service: metrics and the request log always, traces if enabled.

The one place that knows all of them; none of them knows another.
"""

from __future__ import annotations

import platform
from collections.abc import Callable

from headrace.core.version import headrace_version
from headrace.server.observe.exposition import Exposition
from headrace.server.observe.key_metrics import KeyMetrics
from headrace.server.observe.metrics import Metrics
from headrace.server.observe.request_log import RequestLog
from headrace.server.request.service import Service


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
    service.exposition = Exposition(metrics, service.model.name, build, by_key)
    service.supervisor.on_snapshot = metrics.on_snapshot
    service.watchers += [metrics, by_key]
    service.open_requests = lambda: metrics.waiting_requests + metrics.running_requests
    service.http_watchers += [metrics, by_key, RequestLog(service.config.log_content)]
    if not service.config.trace:
        return lambda: None
    from headrace.server.observe.tracing import start_tracing

    tracing = start_tracing(service.model.name, version)
    service.http_watchers.append(tracing)
    return tracing.close
