"""A plan being written: entries that may still be taken out, and what is left to give away.

Knows sequences and tokens; not blocks, and not who deserves them.
"""

from __future__ import annotations

from headrace.core.step import StepEntry
from headrace.engine.sequence import Sequence


class Draft:
    def __init__(self, budget: int) -> None:
        self.budget = budget
        self.prompt_budget = budget
        self.decode_tokens = 0
        self.entries: dict[int, tuple[Sequence, StepEntry]] = {}
        self.copies: list[tuple[int, int]] = []

    @property
    def room(self) -> int:
        """For prompt tokens."""
        return min(self.budget, self.prompt_budget)

    def add(self, sequence: Sequence, entry: StepEntry) -> None:
        self.entries[sequence.sequence_id] = (sequence, entry)
        self.budget -= len(entry.token_ids)
        self.prompt_budget -= len(entry.token_ids)

    def remove(self, sequence: Sequence) -> None:
        if sequence.sequence_id not in self.entries:
            return
        _, entry = self.entries.pop(sequence.sequence_id)
        self.budget += len(entry.token_ids)
        self.prompt_budget += len(entry.token_ids)
        if entry.draw is not None:
            sequence.draws_in_flight -= 1
