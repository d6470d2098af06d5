"""Steps as the engine makes them, one after the other: how long, and how much of it is the host's.

A runner alone shows what its kernels take; the engine adds scheduling, plans and commits, and
overlaps what it can with the device. Knows engines and runners; no server.
"""

from __future__ import annotations

import time
from collections.abc import Callable

from headrace.calibrate.statistic import median
from headrace.calibrate.step_profile import EngineStep
from headrace.core.request import GenerateRequest, SamplingParams
from headrace.core.step import Runner, RunnerLimits, StepPlan, StepResult
from headrace.engine.loop import Engine

PROMPT_TOKENS, STEPS = 32, 40


def engine_tokens(sequences: int, block_tokens: int) -> int:
    """KV tokens that the steps of so many sequences need."""
    blocks = -(-(PROMPT_TOKENS + STEPS + 1) // block_tokens) + 1
    return sequences * blocks * block_tokens


def engine_step(
    runner: Runner, sequences: int, computed_s: Callable[[], float] | None = None
) -> EngineStep | None:
    """`computed_s`: of the last step; without it, the time in collect(), where the host waits.
    None without sequences, or if they don't all fit."""
    limits = runner.limits
    needed = engine_tokens(sequences, limits.block_tokens) // limits.block_tokens
    longest = PROMPT_TOKENS + STEPS
    if not 0 < sequences <= limits.max_sequences or needed > limits.total_blocks:
        return None
    if longest > limits.context_tokens or sequences > limits.max_batch_tokens:
        return None
    timed = _Timed(runner)
    engine = Engine(timed, frozenset())
    params = SamplingParams(max_tokens=STEPS, temperature=0.0, ignore_eos=True)
    for number in range(sequences):
        prompt = [number % 90 + 1] * PROMPT_TOKENS
        engine.add(GenerateRequest(request_id=str(number), prompt_token_ids=prompt, params=params))
    steps, hosts = [], []
    while engine.has_work:
        timed.waited_s = 0.0
        began_s = time.perf_counter()
        tokens = engine.step()
        took_s = time.perf_counter() - began_s
        if len(tokens) == sequences and all(token.finish_reason is None for token in tokens):
            steps.append(took_s)
            hosts.append(took_s - (timed.waited_s if computed_s is None else computed_s()))
    return EngineStep(step_s=median(steps), host_s=max(0.0, median(hosts))) if steps else None


class _Timed:
    """A runner that says how long the host waited for it."""

    def __init__(self, runner: Runner) -> None:
        self._runner = runner
        self.waited_s = 0.0

    @property
    def limits(self) -> RunnerLimits:
        return self._runner.limits

    @property
    def progress(self) -> int:
        return self._runner.progress

    def submit(self, plan: StepPlan) -> None:
        self._runner.submit(plan)

    def collect(self) -> StepResult:
        began_s = time.perf_counter()
        try:
            return self._runner.collect()
        finally:
            self.waited_s += time.perf_counter() - began_s

    def close(self) -> None:
        """The runner is not this one's to close."""
