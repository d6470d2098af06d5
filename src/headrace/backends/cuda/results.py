"""A step on its way: what it asked for, and the copies of its results that the device will make.

A plan's tables and tokens were read when it was submitted; what is kept of it here is what its
results are made of. Everything that comes from the device comes by copies into host memory, behind
one event. Knows no model.
"""

from __future__ import annotations

import time

import torch

from headrace.backends.cuda.sampling import Tops, to_host
from headrace.backends.draws import Wanted, collect_results
from headrace.core.step import (
    PREVIOUS,
    EntryResult,
    StepPlan,
    StepResult,
    TopLogprobs,
)

_CONTINUES_FAILED = "the step before, which this one continues, failed"


class StepInFlight:
    def __init__(self, plan: StepPlan, device: torch.device) -> None:
        self.entries = list(plan.entries)
        self.rows = plan.batch_tokens
        self.wanted = Wanted(self.entries)
        self._continuing = {
            e.sequence_id: n for n, e in enumerate(self.entries) if e.token_ids[0] == PREVIOUS
        }
        self._moments: list[torch.cuda.Event | float] = []
        self._cuda = device.type == "cuda"
        self._results: torch.Tensor | None = None
        self._tops: list[Tops] = []
        self._pooled: tuple[list[int], torch.Tensor] | None = None
        self._failed: list[int] = []  # entries that continue what failed

    def began(self) -> None:
        self._mark()

    def sampling(self) -> None:
        self._mark()

    def ended(self) -> None:
        self._mark()

    def fetch(self, results: torch.Tensor, tops: list[Tops]) -> None:
        """Tokens and logprobs [2, ...] of the wanted rows, and alternatives."""
        self._results = to_host(results[:, : len(self.wanted.rows)])
        self._tops = tops

    def take_pooled(self, numbers: list[int], sums: torch.Tensor) -> None:
        self._pooled = numbers, to_host(sums)

    @property
    def is_done(self) -> bool:
        last = self._moments[-1]
        return bool(last.query()) if isinstance(last, torch.cuda.Event) else True

    def wait(self) -> None:
        last = self._moments[-1]
        if isinstance(last, torch.cuda.Event):
            last.synchronize()

    def inherit_failures(self, before: StepResult) -> None:
        """Sequences that should have drawn a token in the step before, and did not."""
        for result in before.entries:
            if result.error is not None and result.sequence_id in self._continuing:
                self._failed.append(self._continuing[result.sequence_id])

    def result(self) -> StepResult:
        """Only after `wait`."""
        entries = self._entry_results()
        for number in self._failed:
            sequence_id = entries[number].sequence_id
            entries[number] = EntryResult(sequence_id=sequence_id, error=_CONTINUES_FAILED)
        began, *_, ended = self._moments
        sampling = self._moments[1] if len(self._moments) > 2 else ended
        return StepResult(
            entries=entries,
            compute_s=_seconds(began, ended),
            sample_s=_seconds(sampling, ended),
        )

    def _entry_results(self) -> list[EntryResult]:
        if self._results is None:
            return [EntryResult(sequence_id=entry.sequence_id) for entry in self.entries]
        tops: list[TopLogprobs] = []
        if self.wanted.most_tops:
            tops = [[] for _ in self.wanted.rows]
            for some in self._tops:
                for number, pairs in some.lists(self.wanted.tops):
                    tops[number] = pairs
        tokens, logprobs = self._results[0], self._results[1].view(torch.float32)
        entries = collect_results(self.entries, tokens.tolist(), logprobs.tolist(), tops)
        if self._pooled is not None:
            for number, sums in zip(self._pooled[0], self._pooled[1].tolist(), strict=True):
                entries[number].pooled = sums
        return entries

    def _mark(self) -> None:
        if not self._cuda:
            self._moments.append(time.perf_counter())
            return
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        self._moments.append(event)


def _seconds(first: torch.cuda.Event | float, last: torch.cuda.Event | float) -> float:
    if isinstance(first, torch.cuda.Event) and isinstance(last, torch.cuda.Event):
        return float(first.elapsed_time(last)) / 1000
    assert isinstance(first, float)
    assert isinstance(last, float)
    return last - first
