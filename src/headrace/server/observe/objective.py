"""Which requests were within the objective that --slo sets, and why the others were not.

A watcher like metrics.py: events come in as they happen. A request that failed, and one that was
refused because the server was full, has missed; one whose client left, or that was wrong in itself,
is not judged. Knows records and an objective; no metric names.
"""

from __future__ import annotations

from collections import Counter

from headrace.core.errors import RetryLaterError
from headrace.core.histogram import Histogram
from headrace.server.observe.metrics import time_per_output_token_s
from headrace.server.observe.record import HttpRecord, RequestRecord
from headrace.workload.slo import Slo

# Of a request that misses several, the first counts.
MISSES = ("refused", "failed", "ttft", "tpot", "e2e")
# A request's worst time as a part of its objective: fine where it matters, around 1.
USE_BOUNDS = (
    *(round(0.05 * step, 2) for step in range(1, 41)),
    *(2.5, 3.0, 4.0, 5.0, 7.0, 10.0, 20.0, 50.0, 100.0),
)
# Where a refusal is a miss: who asks /ready and hears no is not waiting for an answer.
JUDGED = frozenset(
    {
        *("/v1/chat/completions", "/v1/completions", "/v1/responses", "/v1/messages"),
        "/v1/embeddings",
    }
)
_NOT_JUDGED = ("abort",)
_FAILED = ("error", "timeout")


class Objective:
    def __init__(self, slo: Slo) -> None:
        self.slo = slo
        self.within = 0
        self.missed: Counter[str] = Counter(dict.fromkeys(MISSES, 0))
        self.use = Histogram(USE_BOUNDS)  # of answered requests: their worst part of the objective

    def on_arrival(self, record: RequestRecord) -> None:
        pass

    def on_start(self, record: RequestRecord) -> None:
        pass

    def on_tokens(self, record: RequestRecord, count: int, gap_s: float | None) -> None:
        pass

    def on_end(self, record: RequestRecord) -> None:
        if record.finish_reason in _NOT_JUDGED:
            return
        if record.finish_reason is None or record.finish_reason in _FAILED:
            self.missed["failed"] += 1
            return
        uses = self._uses(record)
        self.use.observe(max(uses.values(), default=0.0))
        worst = next((name for name in MISSES if uses.get(name, 0.0) > 1.0), None)
        if worst is None:
            self.within += 1
        else:
            self.missed[worst] += 1

    def on_http(self, record: HttpRecord) -> None:
        # What had a place in the engine was judged at its end.
        is_refused = isinstance(record.error, RetryLaterError) and not record.requests
        if is_refused and record.route in JUDGED:
            self.missed["refused"] += 1

    def _uses(self, record: RequestRecord) -> dict[str, float]:
        """Each of its times as a part of the objective's; what it has no time of is left out."""
        slo, found = self.slo, dict[str, float]()
        if slo.ttft_s is not None and record.first_token_s is not None:
            found["ttft"] = (record.first_token_s - record.arrived_s) / slo.ttft_s
        tpot_s = time_per_output_token_s(record)
        if slo.tpot_s is not None and tpot_s is not None:
            found["tpot"] = tpot_s / slo.tpot_s
        if slo.e2e_s is not None and record.ended_s is not None:
            found["e2e"] = (record.ended_s - record.arrived_s) / slo.e2e_s
        return found
