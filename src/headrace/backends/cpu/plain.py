"""The step that most steps are: one token of each sequence, and after it the likeliest.

It goes to the native program as lists and comes back as lists, in one call. What the general way
(runner.py, draws.py) makes for it, arrays of what is always the same, took Python longer than
anything else in a step of one sequence. Knows neither prompts nor sampling.
"""

from __future__ import annotations

from collections.abc import Collection

from headrace.backends.cpu import _native
from headrace.backends.cpu.flight import DrawnTokens
from headrace.backends.draws import are_plain, collect_results
from headrace.core.step import Drawn, EntryResult, StepEntry, StepPlan


def is_plain(plan: StepPlan) -> bool:
    if plan.copies or not plan.entries:
        return False
    for entry in plan.entries:
        if len(entry.token_ids) != 1 or entry.draw is None or entry.pool:
            return False
    return are_plain(plan.entries)


class PlainStep:
    """A plan that is plain, read; implements `flight.ReadStep`. Computed before another is planned:
    it knows every token."""

    def __init__(self, program: _native.Program, entries: list[StepEntry]) -> None:
        self._program = program
        self._entries = entries
        self._ids = [entry.sequence_id for entry in entries]
        self.sample_s = 0.0

    @property
    def drawing(self) -> Collection[int]:
        return self._ids

    def compute(self, previous: DrawnTokens) -> Drawn | list[EntryResult]:
        entries = self._entries
        tokens, logprobs = self._program.decode(
            [entry.token_ids[0] for entry in entries],
            [entry.start for entry in entries],
            [entry.block_table for entry in entries],
        )
        self.sample_s = self._program.sample_s
        if min(tokens) < 0:  # a failure in the place of a token
            return collect_results(entries, tokens, logprobs, [])
        return Drawn(self._ids, tokens, logprobs)
