"""A step on its way: what it asked for, and the copies of its results that the device will make.

A plan's tables and tokens were read when it was submitted; what is kept of it here is what its
results are made of. Everything that comes from the device comes by copies into host memory, behind
one event. That memory and the events are made once and used in turn: both cost the host more than
the copy does. Knows no model.
"""

from __future__ import annotations

import time

import torch

from headrace.backends.cuda.draws.sampling import Tops, to_host
from headrace.backends.draws import Wanted, collect_results
from headrace.core.step import (
    PREVIOUS,
    Drawn,
    EntryResult,
    StepPlan,
    StepResult,
    TopLogprobs,
)

_MOMENTS = 3  # of a step: its beginning, its first draw, its end
_CONTINUES_FAILED = "the step before, which this one continues, failed"


class Landing:
    """Where one step's results come to, until they were read: tokens and logprobs [2, rows]."""

    def __init__(self, rows: int, device: torch.device) -> None:
        self.is_cuda = device.type == "cuda"
        self.results = torch.zeros((2, rows), dtype=torch.int32, pin_memory=self.is_cuda)
        self._tokens = self.results[0].numpy()
        self._logprobs = self.results[1].view(torch.float32).numpy()
        self.events = [
            torch.cuda.Event(enable_timing=True) for _ in range(_MOMENTS if self.is_cuda else 0)
        ]

    def read(self, count: int) -> tuple[list[int], list[float]]:
        """Tokens and logprobs of the first `count` rows; only once they have come."""
        return self._tokens[:count].tolist(), self._logprobs[:count].tolist()


class StepInFlight:
    def __init__(self, plan: StepPlan, landing: Landing) -> None:
        self.entries = list(plan.entries)
        self.counts = [len(entry.token_ids) for entry in self.entries]
        self.rows = sum(self.counts)
        self.wanted = Wanted(self.entries)
        self._landing = landing
        self._moments: list[torch.cuda.Event | float] = []
        self._has_results = False
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
        # All of it: to cut it would take a launch that packs it first.
        self._landing.results.copy_(results, non_blocking=True)
        self._has_results = True
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
        if before.drawn is not None:
            return
        failed = {r.sequence_id for r in before.entries if r.error is not None}
        if failed:
            self._failed += [
                number
                for number, entry in enumerate(self.entries)
                if entry.sequence_id in failed and entry.token_ids[0] == PREVIOUS
            ]

    def result(self) -> StepResult:
        """Only after `wait`."""
        began, *_, ended = self._moments
        sampling = self._moments[1] if len(self._moments) > 2 else ended
        entries: list[EntryResult] | None = None
        drawn = self._drawn()
        if drawn is None:
            entries = self._entry_results()
            for number in self._failed:
                sequence_id = entries[number].sequence_id
                entries[number] = EntryResult(sequence_id=sequence_id, error=_CONTINUES_FAILED)
        return StepResult(
            entries=entries,
            drawn=drawn,
            compute_s=_seconds(began, ended),
            sample_s=_seconds(sampling, ended),
        )

    def _drawn(self) -> Drawn | None:
        """If there is a token for every entry, and nothing else."""
        sequence_ids = list(self.wanted.drawn)
        if not self.wanted.is_drawn_only or len(sequence_ids) != len(self.entries):
            return None
        tokens, logprobs = self._landing.read(len(self.wanted.rows))
        if self._failed or self._pooled is not None or min(tokens, default=0) < 0:
            return None
        return Drawn(sequence_ids, tokens, logprobs)

    def _entry_results(self) -> list[EntryResult]:
        if not self._has_results:
            return [EntryResult(sequence_id=entry.sequence_id) for entry in self.entries]
        tops: list[TopLogprobs] = []
        if self.wanted.most_tops:
            tops = [[] for _ in self.wanted.rows]
            for some in self._tops:
                for number, pairs in some.lists(self.wanted.tops):
                    tops[number] = pairs
        found = self._landing.read(len(self.wanted.rows))
        entries = collect_results(self.entries, *found, tops)
        if self._pooled is not None:
            for number, sums in zip(self._pooled[0], self._pooled[1].tolist(), strict=True):
                entries[number].pooled = sums
        return entries

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
