"""The engine's loop: schedule, execute, commit.

If the runner can take a plan while it computes another, the next plan is made and submitted before
the result of the last one is read. An error of the runner ends the requests of that step and no
others. If the runner can't be used afterwards, the error is kept in `lost`, and the owner of the
process has to end it. Knows no text and no arrays.
"""

from __future__ import annotations

import heapq
import logging
from collections import deque
from collections.abc import Mapping, Sequence

from headrace.core.block_store import BlockStore
from headrace.core.clock import Clock, WallClock
from headrace.core.config import SchedulerConfig
from headrace.core.constraint import Constraint
from headrace.core.errors import DeviceLostError, HeadraceError
from headrace.core.request import FinishReason, GenerateRequest, SampledToken, Started
from headrace.core.speculation import Speculator
from headrace.core.step import Contents, MovesBlocks, Runner, StepPlan
from headrace.engine.adoption import adopt, read
from headrace.engine.blocks import BlockPool
from headrace.engine.scheduler import Scheduler
from headrace.engine.stats import EngineStats

log = logging.getLogger(__name__)

IDLE_S = 0.02  # the longest wait for grammars or loads: the caller has other work to do


class Engine:
    def __init__(
        self,
        runner: Runner,
        eos_ids: frozenset[int],
        config: SchedulerConfig | None = None,
        clock: Clock | None = None,
        speculator: Speculator | None = None,
        store: BlockStore | None = None,
    ) -> None:
        self._runner = runner
        self._clock = clock or WallClock()
        config = config or SchedulerConfig()
        self.scheduler = Scheduler(runner.limits, eos_ids, config, self._clock, speculator)
        self._check_always = config.debug_invariants
        self._in_flight: deque[StepPlan] = deque()
        self.lost: DeviceLostError | None = None  # why the runner can't be used any more
        self._deadlines: list[tuple[float, str]] = []  # a heap; ended requests are skipped
        if store is not None and self.moves is not None:
            self.scheduler.attach(store, self.moves, self.adopt)

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
        """Queue a request, or refuse it now. A request with a grammar comes with its compiled,
        freshly started constraint, which the engine owns from here on, even if it refuses."""
        try:
            self.scheduler.add(request, constraint)
        except BaseException:
            if constraint is not None:
                constraint.close()
            raise
        if request.timeout_s is not None:
            deadline = self._clock.now_s() + request.timeout_s
            heapq.heappush(self._deadlines, (deadline, request.request_id))

    def cancel(self, request_id: str) -> None:
        """End a request in any state. Frees its blocks at once, and returns no event for it."""
        self.scheduler.end(request_id, FinishReason.ABORT)

    def stop(self, request_id: str, index: int) -> None:
        """End one continuation of a request, because its text contains a stop string."""
        self.scheduler.end_one(request_id, index, FinishReason.STOP)

    def step(self) -> list[SampledToken]:
        """One iteration of the loop; returns the tokens that became known in it."""
        tokens = self._expire()
        fetching = self.scheduler.fetching
        if fetching:
            fetching.settle(0.0)
        if self.scheduler.is_undecided:
            tokens += self.scheduler.settle(0.0)
        began_s = self._clock.now_s()
        plan = self.scheduler.schedule()
        self.stats.schedule_s += self._clock.now_s() - began_s
        if plan is not None:
            tokens += self._submit(plan)
        full = len(self._in_flight) >= self._runner.limits.steps_in_flight
        if self._in_flight and (plan is None or full):
            tokens += self._collect()
        elif plan is None and self.scheduler.is_undecided:  # there is nothing else to do
            tokens += self.scheduler.settle(IDLE_S, for_all=True)
        elif plan is None and fetching:
            fetching.settle(IDLE_S)
        if self._check_always:
            self.scheduler.check_integrity()
        return tokens

    # -- blocks from and for elsewhere ---------------------------------------------------------

    @property
    def moves(self) -> MovesBlocks | None:
        """The runner, if its blocks can be taken out and put back, and prefixes are cached."""
        if not self.scheduler.config.prefix_cache or not isinstance(self._runner, MovesBlocks):
            return None
        return self._runner

    def adopt(self, keys: Sequence[bytes], contents: Mapping[bytes, Contents]) -> int:
        """Cache blocks that were computed elsewhere, for a text with these keys (`block_keys`).
        Returns how many of its first blocks are cached now. Between steps."""
        if self.moves is None:
            return 0
        return adopt(self.blocks, self.moves, keys, contents, self._in_flight)

    def read_cached(self, keys: Sequence[bytes]) -> list[tuple[bytes, memoryview]]:
        """Copies of a text's first blocks, as far as they are cached. Between steps."""
        return [] if self.moves is None else read(self.blocks, self.moves, keys)

    def take_started(self) -> list[Started]:
        """Requests that started since the last call (at most the last few thousand). A request is
        in it no later than the step that returns its first token."""
        started = list(self.scheduler.started)
        self.scheduler.started.clear()
        return started

    @property
    def progress(self) -> int:
        """A counter that grows while a step computes, and while its results are committed. Any
        thread may read it."""
        return self._runner.progress + self.scheduler.progress

    def check_integrity(self) -> None:
        self.scheduler.check_integrity()

    def idle_check(self) -> None:
        """An idle engine must hold no blocks. Cheap enough for every time it becomes idle;
        `check_integrity` looks at every block."""
        if not self.has_work and self.blocks.used_blocks:
            raise HeadraceError(
                f"The engine is idle with {self.blocks.used_blocks} of "
                f"{self.blocks.total_blocks} blocks in use; expected none.",
                "This is a mistake in Headrace: please report it, and restart the engine.",
            )

    def _submit(self, plan: StepPlan) -> list[SampledToken]:
        try:
            self._runner.submit(plan)
        except Exception as error:
            # Earlier plans are not affected, and must be committed before this one fails.
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
        began_s = self._clock.now_s()
        tokens = self.scheduler.commit(plan, result)
        if self.scheduler.fetching is not None:
            self.scheduler.fetching.keep_new()
        self.stats.commit_s += self._clock.now_s() - began_s
        return tokens

    def _fail(self, error: Exception) -> list[SampledToken]:
        log.exception("a step failed; its requests end, others continue")
        if isinstance(error, DeviceLostError):
            self.lost = error
        # Of an unexpected error users see only the type: its text is about internals.
        what = str(error) if isinstance(error, HeadraceError) else type(error).__name__
        return self.scheduler.fail(f"the step could not be computed: {what}")

    def _expire(self) -> list[SampledToken]:
        """End requests whose time has passed."""
        tokens: list[SampledToken] = []
        now_s = self._clock.now_s() if self._deadlines else 0.0
        while self._deadlines and self._deadlines[0][0] <= now_s:
            _, request_id = heapq.heappop(self._deadlines)
            tokens += self.scheduler.end(request_id, FinishReason.TIMEOUT)
        return tokens
