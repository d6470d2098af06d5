"""When steps begin and end on a virtual clock: one device that computes one step at a time, and a
host that prepares each step and takes its result.

With one step in flight host and device take turns; with two the host prepares a step while the
device computes the one before it, and only the longer of the two counts. That follows from the
order of the engine's calls: nothing here knows how many are in flight. Time is what the costs say;
how long it takes to work them out does not matter.
"""

from __future__ import annotations

from collections import deque

from headrace.core.clock import VirtualClock
from headrace.core.step import StepPlan
from headrace.simulate.cost import Cost


class Timeline:
    """`host` is the host's time before a step can begin (scheduling, preparing its inputs);
    `result` its time after the step, before its tokens are known."""

    def __init__(
        self,
        clock: VirtualClock,
        cost: Cost,
        *,
        host: Cost | None = None,
        result: Cost | None = None,
    ) -> None:
        self._clock = clock
        self._cost = cost
        self._host = host
        self._result = result
        # Of steps that were begun and not ended: when they were handed to the device, their time
        # there, and the host's time for the result.
        self._steps: deque[tuple[float, float, float]] = deque()
        self._free_s = clock.now_s()  # when the device has done what was ended so far

    def begin(self, plan: StepPlan) -> None:
        """Hand a step to the device."""
        if self._host is not None:
            self._clock.advance(self._host(plan))
        after_s = 0.0 if self._result is None else self._result(plan)
        self._steps.append((self._clock.now_s(), self._cost(plan), after_s))

    def end(self) -> float:
        """Wait until the oldest step is done, and take its result. Returns the device's time."""
        handed_s, compute_s, after_s = self._steps.popleft()
        self._free_s = max(self._free_s, handed_s) + compute_s
        wait_s = self._free_s - self._clock.now_s()
        self._clock.advance((wait_s if wait_s > 0 else 0.0) + after_s)
        return compute_s
