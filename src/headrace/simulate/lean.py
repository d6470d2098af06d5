"""A Runner for fleets: it moves a virtual clock by the cost of each step, and draws one token for
everybody. It keeps nothing of sequences or blocks and checks nothing, so it is small and fast.

To the engine it looks as `SimulatedRunner` does (the same times, the same counts of tokens), as
long as nothing depends on which token is drawn: outputs end by max_tokens, without end-of-text
tokens, grammars, beams, logprobs or several continuations of one prompt. Mistakes of an engine are
found by the other one.
"""

from __future__ import annotations

from collections import deque

from headrace.core.clock import VirtualClock
from headrace.core.errors import HeadraceError
from headrace.core.step import RunnerLimits, StepPlan, StepResult
from headrace.simulate.cost import Cost
from headrace.simulate.timeline import Timeline

DRAWN = 0  # what every sequence draws: a draft of other tokens is wrong from its first one on
_TOKENS = [DRAWN]
_LOGPROBS = [0.0]


class LeanRunner:
    """Implements `core.step.Runner`. `host` and `result` are the host's times, see Timeline."""

    def __init__(
        self,
        limits: RunnerLimits,
        *,
        cost: Cost,
        clock: VirtualClock,
        host: Cost | None = None,
        result: Cost | None = None,
    ) -> None:
        self.limits = limits
        self.progress = 0  # steps done
        self._time = Timeline(clock, cost, host=host, result=result)
        self._drawing: deque[list[int] | int] = deque()  # see `_draws_of`

    def submit(self, plan: StepPlan) -> None:
        if plan.extras:
            raise HeadraceError(
                f"A step asks for more than tokens in {len(plan.extras)} of its rows; the lean "
                "runner draws tokens only.",
                "Simulate requests with logprobs, grammars or embeddings with SimulatedRunner.",
            )
        self._drawing.append(_draws_of(plan))
        self._time.begin(plan)

    def collect(self) -> StepResult:
        drawing = self._drawing.popleft()
        compute_s = self._time.end()
        self.progress += 1
        # The engine reads these lists and changes none: all rows may share one.
        if isinstance(drawing, int):
            return StepResult(
                tokens=[_TOKENS] * drawing, logprobs=[_LOGPROBS] * drawing, compute_s=compute_s
            )
        return StepResult(
            tokens=[_TOKENS * drawn for drawn in drawing],
            logprobs=[_LOGPROBS * drawn for drawn in drawing],
            compute_s=compute_s,
        )

    def close(self) -> None:
        """Nothing to release."""


def _draws_of(plan: StepPlan) -> list[int] | int:
    """How many tokens each row draws; as in most steps, the number of rows if each draws one."""
    draws, drafts = plan.draws, plan.drafts
    if None not in draws and not drafts:
        return len(draws)
    counts = [int(draw is not None) for draw in draws]
    for row, drafted in drafts.items():
        counts[row] += len(drafted)
    return counts
