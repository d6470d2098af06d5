"""Readings from a Prometheus server instead of the endpoint: two instants, all replicas at once.

Uses the HTTP API's /api/v1/query with a time. Knows PromQL for one thing: all series whose name
begins as an engine's do.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator
from typing import Any
from urllib.parse import urlencode

from headrace.doctor.endpoint import Endpoint, EndpointError
from headrace.doctor.exposition import Sample, page_of
from headrace.doctor.names import ENGINES
from headrace.doctor.scrape import Reading, read

_SAMPLES = 5


def readings(server: Endpoint, *, interval_s: float, selector: str = "") -> list[Reading]:
    """Oldest first, `interval_s` from the first to the last."""
    names = "|".join(f"{each.prefix}.+" for each in ENGINES)
    query = f'{{__name__=~"{names}|process_.+"{f",{selector}" if selector else ""}}}'
    now = _clock(server)
    found = []
    for step in range(_SAMPLES):
        at = now - interval_s * (1 - step / (_SAMPLES - 1))
        path = f"/api/v1/query?{urlencode({'query': query, 'time': f'{at:.3f}'})}"
        reply = server.get(path)
        body = reply.json() if reply.status == 200 else {}
        if reply.status != 200 or body.get("status") != "success":
            raise EndpointError(
                f"Prometheus answers HTTP {reply.status} to a query: {reply.text[:200]!r}.",
                "Give the URL of a Prometheus server.",
            )
        reading = read(page_of(_samples(body)), at)
        if reading.names is not None:
            found.append(reading)
    if not found:
        raise EndpointError(
            "Prometheus has no series of an engine that is known here.",
            "Check its targets, or the --selector.",
        )
    return found


def _clock(server: Endpoint) -> float:
    """The time on the Prometheus server: its samples have that, and ours may be another."""
    reply = server.get("/api/v1/query?query=time()")
    with contextlib.suppress(
        EndpointError, KeyError, ValueError, TypeError, AttributeError, IndexError
    ):
        body = reply.json()
        if reply.status == 200 and body["data"].get("resultType") == "scalar":
            return float(body["data"]["result"][1])
    return time.time()


def _samples(body: dict[str, Any]) -> Iterator[Sample]:
    for series in body.get("data", {}).get("result", ()):
        labels = dict(series.get("metric", {}))
        value = series.get("value", (0, "nan"))[1]
        try:
            number = float(value)
        except (TypeError, ValueError):
            continue
        if number == number:  # not NaN
            yield Sample(name=labels.pop("__name__", ""), labels=labels, value=number)
