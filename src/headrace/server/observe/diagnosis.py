"""The doctor's rules over the server's own metrics: what it would say about itself, without probes.

Keeps a few readings of /metrics, at most one in two seconds however often it is asked, and compares
the newest with the oldest of the last half minute. Levels are the history's, second by second: two
readings would miss what came and went between them. Knows the doctor; no HTTP.
"""

from __future__ import annotations

import asyncio
import math
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, replace
from typing import TYPE_CHECKING, Any

from headrace.server.observe.exposition import Exposition
from headrace.server.observe.history import History
from headrace.workload.slo import Slo

if TYPE_CHECKING:  # imported when it is first asked: a server starts faster without
    from headrace.doctor.scrape import Reading

READINGS = 16
LEAST_S = 2.0  # between two readings
LONGEST_S = 30.0  # what the oldest reading may lie back: what was before is another story
SCHEMA = "headrace-diagnosis/1"


class Diagnoser:
    def __init__(self, exposition: Exposition, history: History, slo: Slo | None) -> None:
        self._exposition = exposition
        self._history = history
        self._slo = slo
        self._readings: deque[Reading] = deque(maxlen=READINGS)
        self._last: dict[str, Any] | None = None
        self._at_s = -LEAST_S
        self._lock = threading.Lock()  # of the readings
        self.turn = asyncio.Lock()  # who asks while it is being made waits for that one

    def is_due(self, now_s: float) -> bool:
        return self._last is None or now_s - self._at_s >= LEAST_S

    def text(self) -> str:
        """In the event loop: the counters belong to it."""
        self._at_s = time.monotonic()
        return self._exposition.write("")[0].decode()

    @property
    def last(self) -> dict[str, Any] | None:
        return self._last

    def examine(self, text: str, version: Callable[[], dict[str, object]], model: str) -> None:
        """May run in a thread. `version` gives what /version tells operators."""
        from headrace.doctor.collect import Wanted, passive
        from headrace.doctor.engine_config import Told, from_labels, told_by_headrace
        from headrace.doctor.exposition import read_page
        from headrace.doctor.observation import CHAT, EngineId
        from headrace.doctor.report import examine
        from headrace.doctor.scrape import read

        now_s = time.time()
        reading = read(read_page(text), now_s)
        with self._lock:
            while self._readings and now_s - self._readings[0].at_s > LONGEST_S:
                self._readings.popleft()
            self._readings.append(reading)
            readings = list(self._readings)
        fields, number, _ = told_by_headrace(version())
        told = Told(
            engine=EngineId(name="headrace", label="Headrace", version=number),
            model=model,
            config={
                name: value
                for name, value in {**from_labels("headrace", reading), **fields}.items()
                if value is not None
            },
        )
        wanted = Wanted(probes=False, objective=self._slo or CHAT)
        seen = passive("this server", told, readings, wanted)
        levels = self._history.columns("5m", now_s - max(seen.period_s, LEAST_S))
        found = examine(replace(seen, levels={**seen.levels, **_levels(levels)}))
        self._last = {
            "schema": SCHEMA,
            "period_s": found.seen.period_s,
            "findings": [asdict(each) for each in found.findings],
            "explained": [asdict(each) for each in found.explained],
            "notes": list(found.seen.notes),
        }


def _levels(columns: Mapping[str, Sequence[float]]) -> dict[str, tuple[float, ...]]:
    """In the doctor's words; what has no sample is left to the readings."""
    blocks = zip(
        columns["kv_used_blocks"], columns["kv_cached_blocks"], columns["kv_free_blocks"],
        strict=True,
    )  # fmt: skip
    found = {
        "running": columns["running"],
        "waiting": columns["waiting"],
        "kv_usage": [used / max(used + cached + free, 1.0) for used, cached, free in blocks],
    }
    known = {name: tuple(v for v in values if not math.isnan(v)) for name, values in found.items()}
    return {name: values for name, values in known.items() if values}
