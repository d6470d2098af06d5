"""While probes run: how late this process wakes up, and the endpoint's gauges and GPUs.

Two threads that only look. Knows nothing of what is asked.
"""

from __future__ import annotations

import statistics
import threading
import time
from collections.abc import Callable

from headrace.doctor.endpoint import EndpointError
from headrace.doctor.local import gpus_now
from headrace.doctor.observation import GpuNow
from headrace.doctor.scrape import Reading

_TICK_S = 0.005
_SAMPLE_S = 0.2


class Ticker:
    """How late this process runs: a thread that sleeps 5 ms at a time notes the excess."""

    def __init__(self) -> None:
        self._late: list[float] = []
        self.cpu_s = 0.0  # that looking took
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, daemon=True)

    def __enter__(self) -> None:
        self._thread.start()

    def __exit__(self, *exc: object) -> None:
        self._stop.set()
        self._thread.join()

    def _run(self) -> None:
        while not self._stop.is_set():
            start = time.perf_counter()
            time.sleep(_TICK_S)
            self._late.append(max(0.0, time.perf_counter() - start - _TICK_S))
        self.cpu_s = time.thread_time()

    def p99(self) -> float | None:
        late = sorted(self._late)
        return late[int(0.99 * (len(late) - 1))] if late else None

    def mean(self) -> float | None:
        return statistics.fmean(self._late) if self._late else None


class Sampler:
    """Gauges and GPUs while a burst runs."""

    def __init__(self, read: Callable[[], Reading | None], is_local: bool) -> None:
        self._read = read
        self._is_local = is_local
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, daemon=True)
        self.levels: dict[str, list[float]] = {}
        self.gpus: tuple[GpuNow, ...] = ()
        self.cpu_s = 0.0  # that looking took

    def __enter__(self) -> Sampler:
        self._thread.start()
        return self

    def __exit__(self, *exc: object) -> None:
        self._stop.set()
        self._thread.join()

    def _run(self) -> None:
        while not self._stop.wait(_SAMPLE_S):
            try:
                reading = self._read()
            except EndpointError:
                return
            if reading is None:
                return
            for name, value in reading.levels.items():
                self.levels.setdefault(name, []).append(value)
            if self._is_local:
                self.gpus = gpus_now() or self.gpus
            self.cpu_s = time.thread_time()
