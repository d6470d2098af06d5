"""What is counted about requests, answers and the engine behind them.

A watcher: events come in as they happen, a scrape reads the sums (exposition.py names them). The
engine's own counters arrive as snapshots; a restarted engine counts from 0 again, the sums here go
on. Knows no text, no HTTP and no metric names.
"""

from __future__ import annotations

import re
from collections import Counter, defaultdict
from collections.abc import Callable, Mapping
from typing import Protocol

from headrace.core import bounds
from headrace.core.errors import BoundError, HeadraceError, RetryLaterError
from headrace.core.histogram import (
    ANSWER_TOKEN_BOUNDS,
    COUNT_BOUNDS,
    STEP_TOKEN_BOUNDS,
    TIME_BOUNDS_S,
    TIME_PARTS,
    TOKEN_BOUNDS,
    Histogram,
)
from headrace.server.edge.bodies import Bodies
from headrace.server.link import wire
from headrace.server.link.snapshot import EngineSnapshot
from headrace.server.link.supervisor import State
from headrace.server.observe.record import HttpRecord, RequestRecord

FINISH_REASONS = ("stop", "length", "abort", "timeout", "error")
STEP_PARTS = ("schedule", "compute", "sample", "commit", "publish")
# Shown as 0 before the first of them, so that rates are right from the start.
USUAL_REFUSALS = (
    "authentication",
    "bodies_full",
    "client_timeout",
    "bound",
    "context_length",
    "invalid_request",
    "payload_too_large",
    "queue_timeout",
    "too_many_requests",
    "unavailable",
)

_WORD_START = re.compile(r"(?<!^)(?=[A-Z])")


class EngineWatch(Protocol):
    """The engine process's state, as the supervisor has it."""

    @property
    def state(self) -> State: ...
    @property
    def restarts(self) -> int: ...
    @property
    def facts(self) -> wire.Ready | None: ...


class EdgeWatch(Protocol):
    """Counts of connections and bodies, as the service has them."""

    @property
    def dropped(self) -> Mapping[str, int]: ...
    @property
    def open_connections(self) -> Callable[[], int]: ...
    @property
    def bodies(self) -> Bodies: ...


class _NoEdge:
    """For a server without connections."""

    def __init__(self) -> None:
        self.dropped: Mapping[str, int] = {}
        self.open_connections: Callable[[], int] = lambda: 0
        self.bodies = Bodies(0)


class Metrics:
    def __init__(self, engine: EngineWatch, edge: EdgeWatch | None = None) -> None:
        self._engine = engine
        self.edge: EdgeWatch = edge or _NoEdge()
        self._waiting: set[int] = set()  # id() of records, which live until their end
        self._running: set[int] = set()
        self.prompt_tokens = 0
        self.cached_prompt_tokens = 0
        self.generation_tokens = 0
        self.ttft = Histogram(TIME_BOUNDS_S, parts=TIME_PARTS)
        self.tpot = Histogram(TIME_BOUNDS_S, parts=TIME_PARTS)
        self.token_gap = Histogram(TIME_BOUNDS_S, parts=TIME_PARTS)
        self.e2e = Histogram(TIME_BOUNDS_S, parts=TIME_PARTS)
        self.queue = Histogram(TIME_BOUNDS_S, parts=TIME_PARTS)
        self.prefill = Histogram(TIME_BOUNDS_S)
        self.decode = Histogram(TIME_BOUNDS_S)
        self.inference = Histogram(TIME_BOUNDS_S)
        self.request_prompt_tokens = Histogram(TOKEN_BOUNDS)
        self.request_computed_tokens = Histogram(TOKEN_BOUNDS)
        self.request_generation_tokens = Histogram(TOKEN_BOUNDS)
        self.longest_answer_tokens = Histogram(ANSWER_TOKEN_BOUNDS)
        self.params_max_tokens = Histogram(TOKEN_BOUNDS)
        self.params_n = Histogram(COUNT_BOUNDS)
        self.finished: Counter[str] = Counter(dict.fromkeys(FINISH_REASONS, 0))
        self.refused: Counter[str] = Counter(dict.fromkeys(USUAL_REFUSALS, 0))
        self.refused_bounds: Counter[str] = Counter({bound.name: 0 for bound in bounds.ALL})
        self.answered: Counter[tuple[str, int]] = Counter()  # by route and status
        self.engine = EngineTotals()

    # -- now -------------------------------------------------------------------------------------

    @property
    def waiting_requests(self) -> int:
        return len(self._waiting)

    @property
    def running_requests(self) -> int:
        return len(self._running)

    @property
    def engine_is_up(self) -> bool:
        return self._engine.state is State.READY

    @property
    def engine_restarts(self) -> int:
        return self._engine.restarts

    @property
    def engine_facts(self) -> wire.Ready | None:
        return self._engine.facts

    @property
    def snapshot(self) -> EngineSnapshot | None:
        """The latest from the running engine; None: no engine, or no snapshot yet."""
        return self.engine.last if self.engine_is_up else None

    # -- what is told ----------------------------------------------------------------------------

    def on_arrival(self, record: RequestRecord) -> None:
        self._waiting.add(id(record))
        self.params_n.observe(record.n)
        if record.max_tokens is not None:
            self.params_max_tokens.observe(record.max_tokens)

    def on_start(self, record: RequestRecord) -> None:
        if id(record) not in self._waiting:
            return
        self._waiting.remove(id(record))
        self._running.add(id(record))
        self.prompt_tokens += record.prompt_tokens
        self.cached_prompt_tokens += record.cached_tokens
        queued_s = _queued_s(record)
        if queued_s is not None:
            self.queue.observe(queued_s)

    def on_tokens(self, record: RequestRecord, count: int, gap_s: float | None) -> None:
        self.generation_tokens += count
        if gap_s is not None:
            self.token_gap.observe(gap_s)
        elif record.first_token_s is not None:
            self.on_start(record)  # a first token implies it
            self.ttft.observe(record.first_token_s - record.arrived_s)
            if record.started_s is not None:
                self.prefill.observe(max(0.0, record.first_token_s - record.started_s))

    def on_end(self, record: RequestRecord) -> None:
        self._waiting.discard(id(record))
        self._running.discard(id(record))
        reason = record.finish_reason or "error"
        self.finished[reason if reason in FINISH_REASONS else "error"] += 1
        if record.ended_s is not None:
            self.e2e.observe(record.ended_s - record.arrived_s)
        self.request_prompt_tokens.observe(record.prompt_tokens)
        self.request_generation_tokens.observe(record.output_tokens)
        self.longest_answer_tokens.observe(record.longest_tokens)
        if record.started_s is not None:
            self.request_computed_tokens.observe(record.prompt_tokens - record.cached_tokens)
        if record.first_token_s is not None and record.last_token_s is not None:
            self.decode.observe(record.last_token_s - record.first_token_s)
            if record.started_s is not None:
                self.inference.observe(max(0.0, record.last_token_s - record.started_s))
        tpot_s = time_per_output_token_s(record)
        if tpot_s is not None:
            self.tpot.observe(tpot_s)

    def on_http(self, record: HttpRecord) -> None:
        self.answered[record.route, record.status] += 1
        # A stream that failed midway was not refused: its status had been sent before.
        if record.status >= 400 and record.error is not None and is_refusal(record.error):
            self.refused[refusal_reason(record.error)] += 1
            if isinstance(record.error, BoundError):
                self.refused_bounds[record.error.bound] += 1

    def on_snapshot(self, snapshot: EngineSnapshot) -> None:
        self.engine.add(snapshot)


class EngineTotals:
    """The engine's counters, summed over all engine processes so far."""

    def __init__(self) -> None:
        self.last: EngineSnapshot | None = None
        self._before: defaultdict[str, float] = defaultdict(float)  # of earlier engines
        self._now: dict[str, float] = {}

    def add(self, snapshot: EngineSnapshot) -> None:
        if self.last is not None and snapshot.engine_pid != self.last.engine_pid:
            for name, count in self._now.items():
                self._before[name] += count
        self.last = snapshot
        self._now = {
            "steps": snapshot.steps,
            "computed_prompt_tokens": snapshot.computed_prompt_tokens,
            "generated_tokens": snapshot.generated_tokens,
            "preemptions": snapshot.preemptions,
            "preempted_tokens": snapshot.preempted_tokens,
            "cow_copies": snapshot.cow_copies,
            "prefix_queries_tokens": snapshot.prefix_queries_tokens,
            "prefix_hits_tokens": snapshot.prefix_hits_tokens,
            **{f"step_tokens {i}": n for i, n in enumerate(snapshot.step_tokens)},
            "step_tokens_sum": snapshot.step_tokens_sum,
            **{f"misses {reason}": n for reason, n in snapshot.prefix_misses.items()},
            "grammar_s": snapshot.grammar_s,
            **{f"grammars {outcome}": n for outcome, n in snapshot.grammar_outcomes.items()},
            **{f"step_s {part}": seconds for part, seconds in snapshot.step_s.items()},
            "drafts": snapshot.drafts,
            "draft_tokens": snapshot.draft_tokens,
            "accepted_tokens": snapshot.accepted_tokens,
            "drafting_s": snapshot.drafting_s,
            **{f"accepted_at {place}": n for place, n in enumerate(snapshot.accepted_at)},
            **_disk_counts(snapshot),
            **{f"handovers {outcome}": n for outcome, n in snapshot.handovers.items()},
            "handover_bytes": snapshot.handover_bytes,
            "handover_s": snapshot.handover_s,
            "handover_skipped": snapshot.handover_skipped,
            "gave_way": sum(each.gave_way for each in snapshot.tenants.values()),
            **{f"key_tokens {name}": t.computed_tokens for name, t in snapshot.tenants.items()},
            **{f"key_gave_way {name}": t.gave_way for name, t in snapshot.tenants.items()},
        }

    def total(self, name: str) -> float:
        return self._before.get(name, 0) + self._now.get(name, 0)

    def step_tokens(self) -> Histogram:
        counts = [self.total(f"step_tokens {i}") for i in range(len(STEP_TOKEN_BOUNDS) + 1)]
        return Histogram(STEP_TOKEN_BOUNDS, counts, self.total("step_tokens_sum"))

    def by_label(self, name: str) -> dict[str, float]:
        """For counters with several values: reasons of misses, parts of a step."""
        known = [key for key in {**self._before, **self._now} if key.startswith(f"{name} ")]
        return {key.removeprefix(f"{name} "): self.total(key) for key in known}


def _disk_counts(snapshot: EngineSnapshot) -> dict[str, float]:
    disk = snapshot.prefix_disk
    if disk is None:
        return {}
    return {
        "prefix_disk_hits_tokens": disk.hits_tokens,
        "prefix_disk_bytes read": disk.loaded_bytes,
        "prefix_disk_bytes written": disk.written_bytes,
        **{f"prefix_disk_blocks {what}": n for what, n in disk.blocks.items()},
        **{f"prefix_disk_failures {kind}": n for kind, n in disk.failures.items()},
    }


def time_per_output_token_s(record: RequestRecord) -> float | None:
    """(last - first) / (n - 1), of one continuation where they run side by side; None for fewer
    than two tokens."""
    if record.first_token_s is None or record.last_token_s is None:
        return None
    gaps = record.output_tokens / max(record.n, 1) - 1
    return (record.last_token_s - record.first_token_s) / gaps if gaps > 0 else None


def is_refusal(error: HeadraceError) -> bool:
    """Whether the request was refused, rather than failed."""
    return error.status < 500 or isinstance(error, RetryLaterError)


def refusal_reason(error: HeadraceError) -> str:
    """A label for the error's class: too_many_requests, context_length … Bounded by the number of
    classes, whatever clients send."""
    return _WORD_START.sub("_", type(error).__name__.removesuffix("Error")).lower()


def _queued_s(record: RequestRecord) -> float | None:
    """Time in the engine's queue, by the engine's clock where it is known."""
    if record.waited_s is not None or record.started_s is None:
        return record.waited_s
    return max(0.0, record.started_s - record.arrived_s)
