"""A replica in a few moments for each request, for fleets of a thousand and more.

Steps that compute prompts are simulated one by one; a stretch of steps that only decode is one
moment, because all its steps take about the same time: it ends with the next sequence that ends, or
at the next step after an arrival. The prefix cache holds named segments in the order of their last
use (policies/prefixes.py); it does not know blocks in use by others, preemption or host time. The
whole engine (replica.py) is the truth: benchmarks/planning/scale.py shows the difference between
both on fleets that both can run.
"""

from __future__ import annotations

import heapq
import math
from collections import deque
from dataclasses import dataclass

from headrace.engine.policy import StepTimes
from headrace.engine.scheduler import FIRST_PROMPT_SHARE
from headrace.policies.prefixes import Caches, Prefixes
from headrace.policies.routing import Counted, key_of
from headrace.workload.ask import Ask


@dataclass(frozen=True, slots=True, kw_only=True)
class Machine:
    """A step takes base_s, token_s for each token computed and context_s for each attended to."""

    base_s: float
    token_s: float
    context_s: float = 0.0
    max_batch_tokens: int = 2048
    max_sequences: int = 64
    kv_tokens: int = 65536
    block_tokens: int = 16
    max_step_growth: float = 24.0  # see engine/policy.py


@dataclass(slots=True, kw_only=True, eq=False)
class Job:
    """A request on its replica."""

    ask: Ask
    arrival_s: float
    counted: Counted  # by the router
    replica: int = 0
    segments: Prefixes = ()
    computed: int = 0  # tokens of the prompt, cached ones included
    cached: int = 0
    first_s: float = math.inf
    end_s: float = math.inf


class Segments:
    """The named beginnings of prompts, in whole blocks; each computed once."""

    def __init__(self, block_tokens: int) -> None:
        self._block = block_tokens
        self._known: dict[tuple[tuple[str, int], ...], Prefixes] = {}

    def of(self, ask: Ask) -> Prefixes:
        found = self._known.get(ask.shared)
        if found is None:
            chain, length, parts = 0, 0, []
            for name, tokens in ask.shared:
                chain, length = key_of(chain, name, tokens), length + tokens
                parts.append((chain, length // self._block * self._block))
            found = self._known[ask.shared] = tuple(parts)
        return found


class CoarseReplica:
    def __init__(self, machine: Machine, number: int, caches: Caches) -> None:
        self._machine, self._number, self._caches = machine, number, caches
        first_tokens = max(1, machine.max_batch_tokens // FIRST_PROMPT_SHARE)
        self._times = StepTimes(machine.max_step_growth, first_tokens)
        self._waiting: deque[Job] = deque()
        self._prompts: deque[Job] = deque()  # have a place, and are not computed yet
        self._running: list[tuple[int, int, Job]] = []  # a heap: (last step, order, job)
        self._steps = 0
        self._order = 0
        self._context = 0  # tokens that the running sequences attend to
        self._held = 0  # tokens of those that have a place, answers included, shared ones once
        self._users: dict[int, int] = {}  # of each segment, that have a place
        self._begin_s = self._step_s = 0.0  # of the stretch that is being computed
        self._count = 0  # its steps; 0: idle
        self._drawn: list[Job] = []  # whose prompts this step ends
        self.busy_s = 0.0

    @property
    def next_s(self) -> float:
        return self._begin_s + self._count * self._step_s if self._count else math.inf

    def offer(self, job: Job, now_s: float) -> None:
        self._waiting.append(job)
        if not self._count:
            self._begin(now_s)
        elif self._count > 1 and self._has_place(self._waiting[0]):
            # It joins at the end of the step that is being computed.
            done = max(1, math.ceil((now_s - self._begin_s) / self._step_s))
            self._count = min(self._count, done)

    def wake(self) -> tuple[list[Job], list[Job]]:
        """The stretch ends. Returns those that have their first token now, and those that ended."""
        now_s = self.next_s
        self.busy_s += self._count * self._step_s
        self._steps += self._count
        self._context += self._count * len(self._running)
        ended = []
        while self._running and self._running[0][0] <= self._steps:
            ended.append(heapq.heappop(self._running)[2])
            self._context -= ended[-1].ask.total_tokens - 1
        begun = self._drawn
        for job in begun:
            job.first_s = now_s
            ask = job.ask
            self._caches.sent(self._number, job.segments, ask.total_tokens)
            if ask.output_tokens < 2:
                ended.append(job)
                continue
            last = self._steps + ask.output_tokens - 1
            heapq.heappush(self._running, (last, self._order, job))
            self._order += 1
            self._context += ask.prompt_tokens
        for job in ended:
            job.end_s = now_s
            self._leave(job)
        self._begin(now_s)
        return begun, ended

    def _has_place(self, job: Job) -> bool:
        machine = self._machine
        places = len(self._running) + len(self._prompts)
        room = self._held + self._own_tokens(job) <= machine.kv_tokens
        return places < machine.max_sequences and (room or not places)

    def _own_tokens(self, job: Job) -> int:
        """That it would take of the pool: segments that others use are there already."""
        own, before = job.ask.total_tokens, 0
        for key, length in job.segments:
            if key in self._users:
                own -= length - before
            before = length
        return own

    def _enter(self, job: Job) -> None:
        self._held += self._own_tokens(job)
        for key, _ in job.segments:
            self._users[key] = self._users.get(key, 0) + 1

    def _leave(self, job: Job) -> None:
        for key, _ in job.segments:
            self._users[key] -= 1
            if not self._users[key]:
                del self._users[key]
        self._held -= self._own_tokens(job)

    def _begin(self, now_s: float) -> None:
        machine = self._machine
        while self._waiting and self._has_place(self._waiting[0]):
            job = self._waiting.popleft()
            held = self._caches.held_tokens(self._number, job.segments)
            job.cached = job.computed = min(held, job.ask.prompt_tokens - 1)
            self._enter(job)
            self._prompts.append(job)
        tokens = len(self._running)
        prompt_tokens, context = self._take_prompts(machine.max_batch_tokens - tokens)
        tokens, context = tokens + prompt_tokens, context + self._context
        self._begin_s = now_s
        if prompt_tokens or self._prompts:
            self._count = 1
        elif self._running:
            self._count = self._running[0][0] - self._steps
            context += self._count * tokens // 2  # what it is half-way
        else:
            self._count = 0
            return
        self._step_s = (
            machine.base_s + machine.token_s * tokens + machine.context_s * (context + tokens)
        )
        self._times.learn(self._step_s, len(self._running), prompt_tokens)

    def _take_prompts(self, budget: int) -> tuple[int, int]:
        """Tokens of prompts in the next step, as many as the engine would take, and those that they
        attend to."""
        self._drawn = []
        if self._running and self._prompts:
            budget = self._times.prompt_tokens(budget, len(self._running), len(self._prompts))
        tokens = context = 0
        while self._prompts and tokens < budget:
            job = self._prompts[0]
            took = min(budget - tokens, job.ask.prompt_tokens - job.computed)
            context += job.computed
            tokens += took
            job.computed += took
            if job.computed < job.ask.prompt_tokens:
                break
            self._drawn.append(self._prompts.popleft())
        return tokens, context
