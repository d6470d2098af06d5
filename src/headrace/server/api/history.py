"""/history and /diagnosis: what the server's page shows of the past, and what the doctor says.

For operators. Both answer from memory; observe/ fills it.
"""

from __future__ import annotations

import asyncio
import math
import time
from dataclasses import asdict
from typing import Annotated, Literal

import msgspec

from headrace.core.errors import UnavailableError
from headrace.server.api.version import version_facts
from headrace.server.observe.load_metrics import BURN_WINDOWS_S
from headrace.server.request.call import AnyReply, Call, json_reply
from headrace.server.request.query import read_query
from headrace.server.request.service import Service

SCHEMA = "headrace-history/1"


class HistoryQuery(msgspec.Struct):
    window: Literal["5m", "1h", "24h"] = "5m"
    since: Annotated[float, msgspec.Meta(ge=0)] = 0.0  # only samples after this time


async def history(service: Service, call: Call) -> AnyReply:
    """The server's numbers over the last minutes, hour or day."""
    query = read_query(call, HistoryQuery)
    if service.history is None:
        raise UnavailableError("The history is not available yet.", retry_after_s=1.0)
    return json_reply(
        {
            "schema": SCHEMA,
            "window": query.window,
            "now_s": time.time(),
            "model": service.model.name,
            "engine_is_up": service.history.engine_is_up,
            "columns": service.history.columns(query.window, query.since),
            "totals": service.history.totals(),
            "objective": _objective(service),
            "peaks": _peaks(service),
        }
    )


def _objective(service: Service) -> dict[str, object] | None:
    objective, kept = service.objective, service.history
    if objective is None or kept is None:
        return None
    burning = {f"burn_rate_{name}": _known(kept.burn_rate(s)) for name, s in BURN_WINDOWS_S.items()}
    return {
        "text": str(objective.slo),
        "share": objective.slo.share,
        "within": objective.within,
        "missed": dict(objective.missed),
        "headroom": _known(kept.headroom),
        **burning,
    }


def _peaks(service: Service) -> dict[str, object] | None:
    peaks = None if service.device is None else service.device.peaks
    return None if peaks is None else asdict(peaks)


def _known(value: float) -> float | None:
    return None if math.isnan(value) else value


async def diagnosis(service: Service, call: Call) -> AnyReply:
    """What the doctor's rules find in this server's own metrics, without probes."""
    diagnoser = service.diagnoser
    if diagnoser is None:
        raise UnavailableError("Metrics are not available yet.", retry_after_s=1.0)
    async with diagnoser.turn:
        if diagnoser.is_due(time.monotonic()):
            text, version = diagnoser.text(), version_facts(service)
            await asyncio.to_thread(diagnoser.examine, text, lambda: version, service.model.name)
    return json_reply(diagnoser.last)
