"""A step in flight: what its plan asked for, and the pending copies of its results.

A plan's tables and tokens were read when it was submitted; only what is needed to build the result
is kept. Results are copied into pinned host memory, followed by one event. Memory and events are
allocated once and used in turn, because allocating costs more than the copy. Knows no model.
"""

from __future__ import annotations

import time

import torch

from headrace.backends.cuda.draws.sampling import Tops, to_host
from headrace.backends.cuda.draws.wanted import Wanted
from headrace.backends.shared.answers import answer_rows
from headrace.backends.shared.flight import Continued, fail_rows, failed_rows
from headrace.core.step import StepPlan, StepResult, TopLogprobs

_MOMENTS = 3  # of a step: its beginning, its first draw, its end


class Landing:
    """Host memory for one step's results until they are read: tokens and logprobs [2, rows]."""

    def __init__(self, rows: int, device: torch.device) -> None:
        self.is_cuda = device.type == "cuda"
        self.results = torch.zeros((2, rows), dtype=torch.int32, pin_memory=self.is_cuda)
        self._tokens = self.results[0].numpy()
        self._logprobs = self.results[1].view(torch.float32).numpy()
        self.events = [
            torch.cuda.Event(enable_timing=True) for _ in range(_MOMENTS if self.is_cuda else 0)
        ]

    def read(self, count: int) -> tuple[list[int], list[float]]:
        """Tokens and logprobs of the first `count` rows. Only after the copy has finished."""
        return self._tokens[:count].tolist(), self._logprobs[:count].tolist()


class StepInFlight:
    def __init__(self, plan: StepPlan, continued: Continued, landing: Landing) -> None:
        self.plan = plan
        self.continued = continued
        self.wanted = Wanted(plan)
        self._landing = landing
        self._moments: list[torch.cuda.Event | float] = []
        self._tops: list[Tops] = []
        self._pooled: tuple[list[int], torch.Tensor] | None = None
        self._failed: list[int] = []  # rows that continue from a failed draw
        self.is_warm_up = False  # as in StepResult

    def began(self) -> None:
        self._mark()

    def sampling(self) -> None:
        self._mark()

    def ended(self) -> None:
        self._mark()

    def fetch(self, results: torch.Tensor, tops: list[Tops]) -> None:
        """Tokens and logprobs [2, ...] of the wanted rows, and alternatives."""
        # Copies all rows: copying a part would need another launch that packs it first.
        self._landing.results.copy_(results, non_blocking=True)
        self._tops = tops

    def take_pooled(self, rows: list[int], sums: torch.Tensor) -> None:
        """Sums [n, hidden] of these rows."""
        self._pooled = rows, to_host(sums)

    @property
    def is_done(self) -> bool:
        last = self._moments[-1]
        return bool(last.query()) if isinstance(last, torch.cuda.Event) else True

    def wait(self) -> None:
        last = self._moments[-1]
        if isinstance(last, torch.cuda.Event):
            last.synchronize()

    def inherit_failures(self, before: StepResult) -> None:
        """Marks the rows of sequences whose draw failed in the previous step."""
        if before.extras:  # errors are in extras
            self._failed = failed_rows(self.continued, before)

    def result(self) -> StepResult:
        """Only after `wait`."""
        began, *_, ended = self._moments
        sampling = self._moments[1] if len(self._moments) > 2 else ended
        found = self._landing.read(len(self.wanted.rows))
        result = answer_rows(self.plan, *found, self._top_lists())
        if self._pooled is not None:
            for row, sums in zip(self._pooled[0], self._pooled[1].tolist(), strict=True):
                result.extras[row].pooled = sums
        fail_rows(result, self._failed)
        result.compute_s, result.sample_s = _seconds(began, ended), _seconds(sampling, ended)
        result.is_warm_up = self.is_warm_up
        return result

    def _top_lists(self) -> list[TopLogprobs]:
        """The alternatives of each wanted row; empty if no row asked for any."""
        if not self.wanted.most_tops:
            return []
        tops: list[TopLogprobs] = [[] for _ in self.wanted.rows]
        for some in self._tops:
            for number, pairs in some.lists(self.wanted.tops):
                tops[number] = pairs
        return tops

    def _mark(self) -> None:
        if not self._landing.is_cuda:
            self._moments.append(time.perf_counter())
            return
        event = self._landing.events[len(self._moments)]
        event.record()
        self._moments.append(event)


def _seconds(first: torch.cuda.Event | float, last: torch.cuda.Event | float) -> float:
    if isinstance(first, torch.cuda.Event) and isinstance(last, torch.cuda.Event):
        return float(first.elapsed_time(last)) / 1000
    assert isinstance(first, float)
    assert isinstance(last, float)
    return last - first
