"""The next plan while it is being written: rows that may still be removed, and the tokens left in
its budget.

Knows sequences and tokens; neither blocks nor how they are shared out.
"""

from __future__ import annotations

from headrace.core.step import StepPlan
from headrace.engine.sequence import Sequence


class NextPlan:
    def __init__(self, budget: int) -> None:
        self.plan = StepPlan()
        self.sequences: dict[int, Sequence] = {}  # by id, in the order of the plan's rows
        self.prompt_budget = budget  # of tokens
        self.has_lost = False  # whether a sequence was preempted while the plan was written
        self._budget = budget

    @property
    def budget(self) -> int:
        return self._budget - self.plan.batch_tokens

    @property
    def room(self) -> int:
        """How many more prompt tokens fit."""
        return min(self.budget, self.prompt_budget)

    def remove(self, sequence: Sequence) -> None:
        """Remove its row, if it has one, because it is preempted."""
        self.has_lost = True
        if self.sequences.pop(sequence.sequence_id, None) is None:
            return
        plan = self.plan
        row = plan.sequence_ids.index(sequence.sequence_id)
        self.prompt_budget += plan.counts[row]
        if plan.draws[row] is not None:
            sequence.draws_in_flight -= 1
        if row in plan.drafts:
            sequence.take_guesses()
        plan.remove(row)
