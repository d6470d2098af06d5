"""Numbers as people read them, and the load that a rule looks at. Shared by the groups of rules."""

from __future__ import annotations

import statistics
from dataclasses import dataclass, replace

from headrace.doctor.buckets import Buckets
from headrace.doctor.observation import Observation

_FULL = 0.95
_FREE = 0.75


def ms(seconds: float) -> str:
    return f"{seconds:,.2f} s" if seconds >= 1 else f"{seconds * 1e3:,.3g} ms"


def percent(share: float) -> str:
    return f"{share * 100:.3g}%"


def spread(found: Buckets | None, share: float) -> str:
    quantile = found.quantile(share) if found is not None else None
    if quantile is None:
        return "unknown"
    return quantile.shown(1e3, " ms")


@dataclass(frozen=True, slots=True, kw_only=True)
class Load:
    """Gauges while there was something to do. `source` says whose requests that was."""

    running: tuple[float, ...]
    waiting: tuple[float, ...]
    kv: tuple[float, ...]
    source: str
    is_burst: bool = False

    @property
    def most_running(self) -> float:
        return max(self.running, default=0.0)

    @property
    def most_waiting(self) -> float:
        return max(self.waiting, default=0.0)

    @property
    def most_wanted(self) -> float:
        """Those that run and those that wait, at one time."""
        if len(self.running) != len(self.waiting):
            return self.most_running + self.most_waiting
        return max((r + w for r, w in zip(self.running, self.waiting, strict=True)), default=0.0)

    @property
    def mean_waiting(self) -> float:
        return statistics.fmean(self.waiting) if self.waiting else 0.0

    @property
    def is_flat(self) -> bool:
        """The number that run does not move, while others wait. A sample of none is one between
        two steps."""
        some = [level for level in self.running if level >= 1]
        low, high = min(some, default=0.0), self.most_running
        return high - low <= max(1.0, 0.1 * high)

    @property
    def is_lasting(self) -> bool:
        """Somebody waits most of the time, not for the moment until the next step. A burst is over
        too soon to tell."""
        some = sum(1 for level in self.waiting if level >= 1)
        return self.is_burst or 2 * some > len(self.waiting)

    @property
    def kv_high(self) -> float | None:
        return max(self.kv) if self.kv else None

    @property
    def is_full(self) -> bool:
        """No room in the KV pool for one more sequence like those that run."""
        kv, running = self.kv_high, self.most_running
        if kv is None:
            return False
        return kv >= _FULL or (running >= 1 and kv > 0.5 and 1 - kv < kv / running)

    @property
    def is_free(self) -> bool:
        """Room for several more, or not known to be full."""
        return self.kv_high is None or (self.kv_high < _FREE and not self.is_full)

    @property
    def shown(self) -> str:
        kv = "unknown" if self.kv_high is None else percent(self.kv_high)
        return (
            f"running {self.most_running:g}, waiting up to {self.most_waiting:g}, KV in use {kv} "
            f"({self.source})"
        )


def load_of(seen: Observation) -> Load:
    """Users' own traffic if any of it waits, else the probes' bursts."""
    own = _load(seen.levels, "the endpoint's own traffic")
    if own.most_waiting >= 1 or seen.probe is None:
        return own
    burst = replace(_load(seen.probe.burst_levels, "the probes' bursts"), is_burst=True)
    return burst if burst.most_waiting >= 1 else own


def _load(levels: object, source: str) -> Load:
    table: dict[str, tuple[float, ...]] = dict(levels)  # type: ignore[call-overload]
    running, waiting = table.get("running", ()), table.get("waiting", ())
    if len(running) == len(waiting):
        busy = [i for i, (r, w) in enumerate(zip(running, waiting, strict=True)) if r + w > 0]
        kv = table.get("kv_usage", ())
        return Load(
            running=tuple(running[i] for i in busy),
            waiting=tuple(waiting[i] for i in busy),
            kv=tuple(kv[i] for i in busy) if len(kv) == len(running) else kv,
            source=source,
        )
    return Load(running=running, waiting=waiting, kv=table.get("kv_usage", ()), source=source)
