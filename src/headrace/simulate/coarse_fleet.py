"""A fleet of coarse replicas behind a router: what docs/scale.md's figures come from.

The router is the one that serves: policies/routing.py, with pending tokens counted at dispatch and
prompts done with the first token, as for streams. A
report holds numbers, not requests, so that a million of them take tens of megabytes. Sessions are
not simulated here. The same seed gives the same report.
"""

from __future__ import annotations

import heapq
import math
from array import array
from collections.abc import Iterable
from dataclasses import dataclass, field
from random import Random

from headrace.policies.prefixes import Caches
from headrace.policies.routing import BOUND, Ring, Routing, Wanted, route
from headrace.simulate.coarse import CoarseReplica, Job, Machine, Segments
from headrace.simulate.fleet import FIRST_GUESS_TOKENS, SMOOTHING
from headrace.simulate.prefixes import prefixes_of
from headrace.simulate.undisturbed import undisturbed
from headrace.workload.ask import Ask

PREFIX_TOKENS = 1 << 14


@dataclass(slots=True, kw_only=True)
class CoarseReport:
    ttft_s: array[float] = field(default_factory=lambda: array("d"))
    e2e_s: array[float] = field(default_factory=lambda: array("d"))
    prompt_tokens: int = 0
    cached_tokens: int = 0
    output_tokens: int = 0
    end_s: float = 0.0
    busy_s: float = 0.0
    requests_by_replica: list[int] = field(default_factory=list)

    @property
    def cached_share(self) -> float:
        return self.cached_tokens / self.prompt_tokens if self.prompt_tokens else 0.0

    def add(self, job: Job) -> None:
        self.ttft_s.append(job.first_s - job.arrival_s)
        self.e2e_s.append(job.end_s - job.arrival_s)
        self.prompt_tokens += job.ask.prompt_tokens
        self.cached_tokens += job.cached
        self.output_tokens += job.ask.output_tokens
        self.end_s = max(self.end_s, job.end_s)


def serve_coarsely(
    asks: Iterable[Ask], machine: Machine, replicas: int, routing: Routing, seed: int = 0
) -> CoarseReport:
    """`asks` in order of time. Runs until all have ended."""
    with undisturbed():
        return _CoarseFleet(machine, replicas, routing, seed).run(asks)


class _CoarseFleet:
    def __init__(self, machine: Machine, replicas: int, routing: Routing, seed: int) -> None:
        self._routing = routing
        self._chance = Random(f"fleet {seed}")
        held = Caches(machine.kv_tokens)  # what caches hold; the router's belief is its own
        self._replicas = [CoarseReplica(machine, number, held) for number in range(replicas)]
        self._believed = Caches(machine.kv_tokens)
        self._segments = Segments(machine.block_tokens)
        self._ring = Ring(range(replicas))
        self._pending = [0] * replicas
        self._usual_tokens = FIRST_GUESS_TOKENS
        self._moments: list[tuple[float, int]] = []  # (seconds, replica): stale ones are skipped
        self._report = CoarseReport(requests_by_replica=[0] * replicas)

    def run(self, asks: Iterable[Ask]) -> CoarseReport:
        for turn, ask in enumerate(asks):
            self._wake_until(ask.at_s)
            self._arrive(ask, turn)
        self._wake_until(math.inf)
        self._report.busy_s = math.fsum(each.busy_s for each in self._replicas)
        return self._report

    def _wake_until(self, until_s: float) -> None:
        moments, replicas = self._moments, self._replicas
        while moments and moments[0][0] < until_s:
            at_s, number = heapq.heappop(moments)
            replica = replicas[number]
            if replica.next_s != at_s:
                continue
            begun, ended = replica.wake()
            for job in begun:
                self._pending[number] -= job.counted.begin()
            for job in ended:
                self._end(job)
            if replica.next_s < math.inf:
                heapq.heappush(moments, (replica.next_s, number))

    def _arrive(self, ask: Ask, turn: int) -> None:
        is_sighted = self._routing is Routing.PREFIX
        prefixes = prefixes_of(ask, PREFIX_TOKENS) if is_sighted else ()
        wanted = Wanted(
            prompt_tokens=ask.prompt_tokens,
            answer_tokens=int(self._usual_tokens),
            prefixes=prefixes,
        )
        number = route(
            self._routing,
            wanted,
            ring=self._ring,
            pending=self._pending,
            caches=self._believed,
            turn=turn,
            tie=self._chance.random(),
            bound=BOUND,
        )
        counted = wanted.counted(self._believed.held_tokens(number, prefixes))
        if is_sighted:
            self._believed.sent(number, prefixes, wanted.tokens)
        self._pending[number] += counted.tokens
        self._report.requests_by_replica[number] += 1
        job = Job(ask=ask, arrival_s=ask.at_s, counted=counted, replica=number)
        job.segments = self._segments.of(ask)
        replica = self._replicas[number]
        before_s = replica.next_s
        replica.offer(job, ask.at_s)
        if replica.next_s != before_s:
            heapq.heappush(self._moments, (replica.next_s, number))

    def _end(self, job: Job) -> None:
        self._pending[job.replica] -= job.counted.tokens
        self._usual_tokens += SMOOTHING * (job.ask.output_tokens - self._usual_tokens)
        self._report.add(job)
