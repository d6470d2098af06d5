"""Ray Serve's autoscaling by policies/scaler.py: seconds of prefill that wait, places in use, and
the objective's headroom, in place of a number of requests. Knows Ray's context; no rules."""

from __future__ import annotations

import time
from typing import Any

from headrace.policies.scaler import ReplicaSeen, Scaler
from headrace.ray_serve.settings import read_settings


class PrefillPolicy:
    """Ray Serve's controller makes one and calls it many times a second."""

    def __init__(self, settings: dict[str, Any]) -> None:
        self._scaler = Scaler(read_settings(settings).rules())

    def __call__(self, context: Any) -> tuple[int, dict[str, Any]]:
        reported = context.aggregated_metrics or {}
        seen = [
            ReplicaSeen(
                **{
                    name: values.get(replica)
                    for name, values in reported.items()
                    if name in ReplicaSeen.__slots__
                }
            )
            for replica in context.running_replicas
        ]
        wanted = self._scaler.decide(
            context.current_time or time.time(),
            seen,
            target=context.target_num_replicas,
            unplaced=int(context.total_queued_requests or 0),
        )
        return wanted, {}
