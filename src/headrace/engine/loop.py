"""The engine's loop: schedule, execute, commit.

With a runner that takes a plan while another is being computed, the next plan is made and handed
over before the last one's result is looked at. An error of the runner ends the requests of that
step and no others. Knows no text and no arrays.
"""

from __future__ import annotations

import heapq
import logging
from collections import deque

from headrace.core.clock import Clock, WallClock
from headrace.core.config import SchedulerConfig
from headrace.core.constraint import Constraint
from headrace.core.request import FinishReason, GenerateRequest, SampledToken
from headrace.core.step import Runner, StepPlan
from headrace.engine.blocks import BlockPool
from headrace.engine.scheduler import Scheduler
from headrace.engine.stats import EngineStats

log = logging.getLogger(__name__)


class Engine:
    def __init__(
        self,
        runner: Runner,
        eos_ids: frozenset[int],
        config: SchedulerConfig | None = None,
        clock: Clock | None = None,
    ) -> None:
        self._runner = runner
        self._clock = clock or WallClock()
        config = config or SchedulerConfig()
        self.scheduler = Scheduler(runner.limits, eos_ids, config, self._clock)
        self._check_always = config.debug_invariants
        self._in_flight: deque[StepPlan] = deque()
        self._deadlines: list[tuple[float, str]] = []  # a heap; ended requests are skipped

    @property
    def has_work(self) -> bool:
        return self.scheduler.has_work

    @property
    def blocks(self) -> BlockPool:
        return self.scheduler.blocks

    @property
    def stats(self) -> EngineStats:
        return self.scheduler.stats

    def check(self, request: GenerateRequest) -> None:
        self.scheduler.check(request)

    def add(self, request: GenerateRequest, constraint: Constraint | None = None) -> None:
        """Queue a request, or refuse it now. One with a grammar brings the constraint that was
        compiled of it, just started; it is the engine's from here on."""
        self.scheduler.add(request, constraint)
        if request.timeout_s is not None:
            deadline = self._clock.now_s() + request.timeout_s
            heapq.heappush(self._deadlines, (deadline, request.request_id))

    def cancel(self, request_id: str) -> None:
        """End a request wherever it is; its blocks are free at once and nothing more is said."""
        self.scheduler.end(request_id, FinishReason.ABORT)

    def stop(self, request_id: str, index: int) -> None:
        """End one continuation of a request: its text came to a stop string."""
        self.scheduler.end_one(request_id, index, FinishReason.STOP)

    def step(self) -> list[SampledToken]:
        """One turn: what became known in it."""
        tokens = self._expire()
        plan = self.scheduler.schedule()
        if plan is not None:
            tokens += self._submit(plan)
        full = len(self._in_flight) >= self._runner.limits.steps_in_flight
        if self._in_flight and (plan is None or full):
            tokens += self._collect()
        if self._check_always:
            self.scheduler.check_integrity()
        return tokens

    def check_integrity(self) -> None:
        self.scheduler.check_integrity()

    def _submit(self, plan: StepPlan) -> list[SampledToken]:
        try:
            self._runner.submit(plan)
        except Exception as error:
            # Plans that went before are not harmed, and must be committed before this one fails.
            tokens = [token for _ in list(self._in_flight) for token in self._collect()]
            return tokens + self._fail(error)
        self._in_flight.append(plan)
        return []

    def _collect(self) -> list[SampledToken]:
        plan = self._in_flight.popleft()
        try:
            result = self._runner.collect()
        except Exception as error:
            return self._fail(error)
        return self.scheduler.commit(plan, result)

    def _fail(self, error: Exception) -> list[SampledToken]:
        log.exception("a step failed; its requests end, others go on")
        return self.scheduler.fail(f"the step could not be computed: {error}")

    def _expire(self) -> list[SampledToken]:
        """End requests whose time has passed."""
        tokens: list[SampledToken] = []
        now_s = self._clock.now_s() if self._deadlines else 0.0
        while self._deadlines and self._deadlines[0][0] <= now_s:
            _, request_id = heapq.heappop(self._deadlines)
            tokens += self.scheduler.end(request_id, FinishReason.TIMEOUT)
        return tokens
