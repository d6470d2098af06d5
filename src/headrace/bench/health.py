"""Whether the client itself was fit to measure: its event loop, its dispatch, its processor time.

A run whose client was late is a measurement of the client. It is marked invalid by these figures
alone, whatever the server's numbers look like. Knows no requests beyond their lateness.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from headrace.bench.interval import quantile

_TICK_S = 0.01
_CPUS = Path("/sys/devices/system/cpu")
# A client that is late by more than this share of what it measures has measured itself.
MOST_SHARE = 0.05
# Below this no lateness matters. Timers of the event loop are a millisecond late by themselves.
ALWAYS_FINE_S = 0.002
MOST_CPU = 0.9


@dataclass(frozen=True, slots=True, kw_only=True)
class Health:
    lag_p50_s: float
    lag_p99_s: float  # of the event loop
    late_p50_s: float
    late_p99_s: float  # of requests: turned to after their scheduled time
    cpu_share: float  # of one core
    wrong: tuple[str, ...]  # why the run is invalid; empty: it is valid

    @property
    def is_valid(self) -> bool:
        return not self.wrong


def judge(
    lags_s: Sequence[float], late_s: Sequence[float], cpu_share: float, ttft_s: float | None
) -> Health:
    """`ttft_s` is the median of the run, against which lateness is held."""
    lags, late = sorted(lags_s) or [0.0], sorted(late_s) or [0.0]
    allowed = max(ALWAYS_FINE_S, MOST_SHARE * (ttft_s or 0.0))
    lag, delay = quantile(lags, 0.99), quantile(late, 0.99)
    wrong = []
    if lag > allowed:
        wrong.append(
            f"its event loop was late by {lag * 1e3:.1f} ms (P99); at most {allowed * 1e3:.1f} ms "
            "is allowed here"
        )
    if delay > allowed:
        wrong.append(
            f"requests were sent {delay * 1e3:.1f} ms late (P99); at most {allowed * 1e3:.1f} ms "
            "is allowed here"
        )
    if cpu_share > MOST_CPU and late_s:
        wrong.append(f"it used {cpu_share:.0%} of a core: it may have been the bottleneck")
    return Health(
        lag_p50_s=quantile(lags, 0.5),
        lag_p99_s=lag,
        late_p50_s=quantile(late, 0.5),
        late_p99_s=delay,
        cpu_share=cpu_share,
        wrong=tuple(wrong),
    )


def slow_clock(cpus: Path = _CPUS) -> str | None:
    """What to know where this machine saves power: a core that sleeps between two tokens wakes up
    slowly, which looks like a slow endpoint."""
    try:
        found = (cpus / "cpu0/cpufreq/scaling_governor").read_text().strip()
    except OSError:
        return None
    if found != "powersave":
        return None
    return "this machine saves power (CPU governor 'powersave'): times may be the client's own"


class Pulse:
    """Wakes up every 10 ms while a run lasts, and keeps how late it was."""

    def __init__(
        self,
        clock: Callable[[], float] = time.perf_counter,
        cpu: Callable[[], float] = time.process_time,
    ) -> None:
        self._clock = clock
        self._cpu = cpu
        self._handle: asyncio.TimerHandle | None = None
        self._due_s = self._began_s = self._began_cpu_s = 0.0
        self.lags_s: list[float] = []
        self.cpu_share = 0.0

    def start(self) -> None:
        self._began_s, self._began_cpu_s = self._clock(), self._cpu()
        self._next()

    def stop(self) -> None:
        if self._handle is not None:
            self._handle.cancel()
        passed_s = self._clock() - self._began_s
        self.cpu_share = (self._cpu() - self._began_cpu_s) / passed_s if passed_s > 0 else 0.0

    def _next(self) -> None:
        self._due_s = self._clock() + _TICK_S
        self._handle = asyncio.get_running_loop().call_later(_TICK_S, self._tick)

    def _tick(self) -> None:
        self.lags_s.append(max(0.0, self._clock() - self._due_s))
        self._next()
