"""What the server's numbers were over the last day, in memory, for its page.

A sample at the engine's beat, once a second; three rings keep them: 5 minutes in seconds, an hour
in steps of 10 s, a day in minutes. Counters become rates, histograms become percentiles of what was
added in between, levels become means. A gap means that there was no engine. Bounded: the rings have
a fixed size, whatever happens. Knows counts and times; no text, no key's name.
"""

from __future__ import annotations

import math
from array import array
from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from headrace.core.histogram import TIME_BOUNDS_S, TIME_PARTS, divided, quantile
from headrace.server.observe.device import DeviceWatch
from headrace.server.observe.metrics import STEP_PARTS, Metrics
from headrace.server.observe.objective import USE_BOUNDS, Objective

NOTHING = math.nan  # no value; JSON has null for it

# name -> (seconds between samples, samples)
WINDOWS = {"5m": (1.0, 300), "1h": (10.0, 360), "24h": (60.0, 1440)}
HEADROOM_MINUTES = 60
EARLY_S = 0.3  # beats come every half second, not to the millisecond

LEVELS = (
    *("running", "waiting", "waiting_prompt_tokens", "running_sequences", "waiting_sequences"),
    *("kv_free_blocks", "kv_used_blocks", "kv_cached_blocks", "connections", "saturation"),
    *("engine_resident_bytes", "gpu_busy", "gpu_used_bytes"),
)
MISS_REASONS = ("never_seen", "evicted", "too_short")
# Per second, of counters.
RATES = (
    *("generated_tokens", "computed_prompt_tokens", "cached_prompt_tokens", "finished", "refused"),
    *("failed", "preemptions", "preempted_tokens", "steps", "step_tokens"),
    *("draft_tokens", "accepted_tokens", "drafting"),  # the last in seconds, within step_schedule
    *("prefix_queried_tokens", "prefix_hit_tokens"),
    *(f"prefix_miss_{reason}" for reason in MISS_REASONS),
    *(f"step_{part}" for part in STEP_PARTS),  # seconds per second: its share of the time
    *("within_slo", "missed_slo", "model_flops", "model_bytes"),
)
SHARES = (0.5, 0.95, 0.99)
TIMES = ("ttft", "tpot", "itl", "queue", "e2e")
PERCENTILES = tuple(f"{name}_p{share * 100:g}" for name in TIMES for share in SHARES)
COLUMNS = ("at_s", "period_s", *LEVELS, *RATES, *PERCENTILES)
_EDGES_S = divided(TIME_BOUNDS_S, TIME_PARTS)
_PLACES = {name: place for place, name in enumerate(COLUMNS)}


@dataclass(frozen=True, slots=True)
class _Totals:
    """All counters at one moment."""

    at_s: float
    counters: tuple[float, ...]  # in the order of RATES
    times: tuple[list[float], ...]  # counts between edges, in the order of TIMES


class _Ring:
    """Samples at one distance, the oldest dropped."""

    def __init__(self, period_s: float, size: int, before: _Totals) -> None:
        self.period_s = period_s
        self.rows: deque[array[float]] = deque(maxlen=size)
        self.before = before
        self._sums = [0.0] * len(LEVELS)
        self._counts = [0] * len(LEVELS)

    def offer(self, totals: _Totals, levels: Sequence[float], wall_s: float) -> None:
        for place, value in enumerate(levels):
            if not math.isnan(value):
                self._sums[place] += value
                self._counts[place] += 1
        before = self.before
        elapsed_s = totals.at_s - before.at_s
        if elapsed_s < self.period_s - EARLY_S:
            return
        self.before = totals
        means = [s / n if n else NOTHING for s, n in zip(self._sums, self._counts, strict=True)]
        self._sums, self._counts = [0.0] * len(LEVELS), [0] * len(LEVELS)
        row = [*means, *_rates(before, totals, elapsed_s), *_percentiles(before, totals)]
        short = (float(f"{value:.6g}") for value in row)  # what a chart shows; less to send
        self.rows.append(array("d", [round(wall_s, 3), round(elapsed_s, 3), *short]))


class History:
    def __init__(
        self,
        metrics: Metrics,
        objective: Objective | None = None,
        began_s: float = 0.0,
        device: DeviceWatch | None = None,
    ) -> None:
        self._metrics = metrics
        self._device = device
        self._work_done = (0.0, 0.0)  # FLOPs and bytes of all steps so far
        self._kv_bytes = 0.0  # read by all steps so far
        self._steps = 0.0
        self._objective = objective
        before = self._totals(began_s)  # what comes before the first beat counts too
        self._rings = {name: _Ring(*shape, before) for name, shape in WINDOWS.items()}
        self._last_s = began_s
        self._uses: deque[tuple[float, list[float]]] = deque(maxlen=HEADROOM_MINUTES)
        if objective is not None:
            self._uses.append((began_s, objective.use.counts))

    def sample(self, now_s: float, wall_s: float) -> None:
        """Called at every beat of the engine; `now_s` never goes back, `wall_s` is the date."""
        if now_s - self._last_s < 1.0 - EARLY_S:
            return
        self._last_s = now_s
        if self._objective is not None and now_s - self._uses[-1][0] >= 60.0 - EARLY_S:
            self._uses.append((now_s, self._objective.use.counts))
        totals, levels = self._totals(now_s), self._levels()
        for ring in self._rings.values():
            ring.offer(totals, levels, wall_s)

    def columns(self, window: str, since_s: float = 0.0) -> dict[str, list[float]]:
        """The samples after `since_s`, oldest first."""
        rows = [row for row in self._rings[window].rows if row[0] > since_s]
        return {name: [row[place] for row in rows] for name, place in _PLACES.items()}

    def totals(self) -> dict[str, float]:
        """Counts since the server started, for the page's table."""
        m = self._metrics
        return {
            "generated_tokens": m.generation_tokens,
            "prompt_tokens": m.prompt_tokens,
            "cached_prompt_tokens": m.cached_prompt_tokens,
            "finished": m.finished.total(),
            "failed": m.finished["error"] + m.finished["timeout"],
            "refused": m.refused.total(),
            "preemptions": m.engine.total("preemptions"),
            "engine_restarts": m.engine_restarts,
        }

    @property
    def engine_is_up(self) -> bool:
        return self._metrics.engine_is_up

    def added(self, name: str, seconds: float) -> float:
        """How much a counter of RATES grew in about the last so many seconds (at most an hour)."""
        return sum(
            row[_PLACES[name]] * row[_PLACES["period_s"]] for row in self._recent_rows(seconds)
        )

    def load(self) -> dict[str, float | None]:
        """How full the engine is now, for those who share requests out; None: no engine."""
        now, saturation = self._metrics.snapshot, self.saturation
        facts = self._metrics.engine_facts
        return {
            "running": None if now is None else now.running_sequences,
            "waiting": None if now is None else now.waiting_sequences,
            "waiting_tokens": None if now is None else now.waiting_tokens,
            "free_blocks": None if now is None else now.free_blocks + now.cached_blocks,
            "cache_tokens": None if facts is None else facts.total_blocks * facts.block_tokens,
            "saturation": None if math.isnan(saturation) else saturation,
        }

    @property
    def saturation(self) -> float:
        """0 to 1: how much of the places or of the KV blocks is in use, whichever is more; 1 while
        sequences wait. Not a number while there is no engine."""
        facts, now = self._metrics.engine_facts, self._metrics.snapshot
        if facts is None or now is None:
            return NOTHING
        if now.waiting_sequences:
            return 1.0
        places = now.running_sequences / max(facts.max_sequences, 1)
        return min(1.0, max(places, now.used_blocks / max(facts.total_blocks, 1)))

    @property
    def pending_prefill_s(self) -> float:
        """How long the prompt tokens that wait will take, at the rate of the last minutes' steps
        that computed some. Not a number where none did."""
        now = self._metrics.snapshot
        if now is None:
            return NOTHING
        if not now.waiting_tokens:
            return 0.0
        tokens = busy_s = 0.0
        for row in self._recent_rows(300.0):
            if row[_PLACES["computed_prompt_tokens"]] > 0:
                period_s = row[_PLACES["period_s"]]
                tokens += row[_PLACES["computed_prompt_tokens"]] * period_s
                busy_s += sum(row[_PLACES[f"step_{part}"]] for part in STEP_PARTS) * period_s
        return now.waiting_tokens * busy_s / tokens if tokens else NOTHING

    def burn_rate(self, seconds: float) -> float:
        """How fast the error budget is spent: 1 spends exactly what the objective allows. Not a
        number without requests, or where the objective allows no miss at all."""
        if self._objective is None or self._objective.slo.share >= 1:
            return NOTHING
        missed = self.added("missed_slo", seconds)
        whole = missed + self.added("within_slo", seconds)
        return missed / whole / (1 - self._objective.slo.share) if whole else NOTHING

    @property
    def headroom(self) -> float:
        """1 - (the worst time as a part of its objective, at the objective's share of the last
        hour's answered requests): 0 is at the edge, below 0 is missed."""
        if self._objective is None:
            return NOTHING
        before, after = self._uses[0][1], self._objective.use.counts
        added = [last - first for first, last in zip(before, after, strict=True)]
        found = quantile(USE_BOUNDS, added, self._objective.slo.share)
        return NOTHING if found is None else 1 - found

    def _recent_rows(self, seconds: float) -> Iterator[array[float]]:
        ring = self._rings["5m" if seconds <= 300 else "1h"]
        if ring.rows:
            oldest_s = ring.rows[-1][0] - seconds
            yield from (row for row in ring.rows if row[0] > oldest_s)

    def _totals(self, now_s: float) -> _Totals:
        m, objective = self._metrics, self._objective
        total = m.engine.total
        counters = (
            *(m.generation_tokens, total("computed_prompt_tokens"), m.cached_prompt_tokens),
            *(sum(m.finished.values()), sum(m.refused.values())),
            m.finished["error"] + m.finished["timeout"],
            *(total("preemptions"), total("preempted_tokens"), total("steps")),
            total("step_tokens_sum"),
            *(total("draft_tokens"), total("accepted_tokens"), total("drafting_s")),
            *(total("prefix_queries_tokens"), total("prefix_hits_tokens")),
            *(total(f"misses {reason}") for reason in MISS_REASONS),
            *(total(f"step_s {part}") for part in STEP_PARTS),
            NOTHING if objective is None else objective.within,
            NOTHING if objective is None else objective.missed.total(),
            *self._worked(),
        )
        times = (m.ttft, m.tpot, m.token_gap, m.queue, m.e2e)
        return _Totals(now_s, counters, tuple(each.part_counts for each in times))

    def _worked(self) -> tuple[float, float]:
        """FLOPs of all tokens so far, and bytes read: the weights once a step, and once a step the
        KV blocks that were in use when this was called. As last known while there is no engine:
        nothing is computed then, and what comes first after it counts."""
        facts, now, total = self._metrics.engine_facts, self._metrics.snapshot, self._metrics.engine
        if facts is None:
            return self._work_done
        tokens = total.total("computed_prompt_tokens") + total.total("generated_tokens")
        steps, work = total.total("steps"), facts.work
        used = 0 if now is None else now.used_blocks
        self._kv_bytes += (steps - self._steps) * used * work.get("block_bytes", 0.0)
        self._steps = steps
        read = steps * work.get("step_bytes", NOTHING) + self._kv_bytes
        self._work_done = tokens * work.get("token_flops", NOTHING), read
        return self._work_done

    def rate(self, name: str, seconds: float) -> float:
        """A counter's mean rate over about the last so many seconds; not a number without any."""
        rows = list(self._recent_rows(seconds))
        whole_s = sum(row[_PLACES["period_s"]] for row in rows)
        return self.added(name, seconds) / whole_s if whole_s else NOTHING

    def _gpu_levels(self) -> tuple[float, float]:
        gpus = () if self._device is None else self._device.gpus
        busy = [gpu.busy_share for gpu in gpus if gpu.busy_share is not None]
        used = [gpu.used_bytes for gpu in gpus if gpu.used_bytes is not None]
        return (
            sum(busy) / len(busy) if busy else NOTHING,
            float(sum(used)) if used else NOTHING,
        )

    def _levels(self) -> tuple[float, ...]:
        m, now = self._metrics, self._metrics.snapshot
        if now is None:
            return (m.running_requests, m.waiting_requests, *[NOTHING] * (len(LEVELS) - 2))
        return (
            *(m.running_requests, m.waiting_requests, now.waiting_tokens),
            *(now.running_sequences, now.waiting_sequences),
            *(now.free_blocks, now.used_blocks, now.cached_blocks),
            *(m.edge.open_connections(), self.saturation, now.resident_bytes),
            *self._gpu_levels(),
        )


def _rates(before: _Totals, after: _Totals, elapsed_s: float) -> Iterator[float]:
    for first, last in zip(before.counters, after.counters, strict=True):
        yield (
            NOTHING if math.isnan(first) or math.isnan(last) else max(0.0, last - first) / elapsed_s
        )


def _percentiles(before: _Totals, after: _Totals) -> Iterator[float]:
    for first, last in zip(before.times, after.times, strict=True):
        added = [b - a for a, b in zip(first, last, strict=True)]
        for share in SHARES:
            found = quantile(_EDGES_S, added, share)
            yield NOTHING if found is None else found
