"""Plans in flight: submitted in order, computed in order, collected in order.

Every runner keeps its steps here, each with its own type of step. Checks plans, limits how many are
in flight, and finds the row of the previous step that a row with PREVIOUS continues. Does not know
when or where a step is computed.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Sequence
from typing import Generic, NamedTuple, TypeVar

from headrace.backends.shared.plan_check import check_plan, mistaken
from headrace.core.errors import HeadraceError
from headrace.core.step import PREVIOUS, RowResult, RunnerLimits, StepPlan, StepResult

Step = TypeVar("Step")

CONTINUES_FAILED = "the previous step, which this one continues, failed"


class Continued(NamedTuple):
    """The rows that continue from a token drawn by the previous step, in columns."""

    rows: list[int]
    places: list[int]  # index of their token among the plan's tokens
    before: list[int]  # their rows in the previous step


NOBODY = Continued([], [], [])


class Flight(Generic[Step]):
    def __init__(self, limits: RunnerLimits, vocab_size: int) -> None:
        self._limits = limits
        self._vocab_size = vocab_size
        self._steps: deque[Step] = deque()
        self._last = StepPlan()  # submitted
        self._is_closed = False

    def __len__(self) -> int:
        return len(self._steps)

    def __iter__(self) -> Iterator[Step]:
        """Oldest first. Other threads may iterate while no step is added."""
        return iter(list(self._steps))

    def check(self, plan: StepPlan) -> Continued:
        """Refuse a plan that can't be submitted now. Returns the rows that continue from the
        previous step."""
        if self._is_closed:
            raise HeadraceError(
                "The runner is closed; expected an open one.", "Create a new runner."
            )
        if len(self._steps) >= self._limits.steps_in_flight:
            raise HeadraceError(
                f"A plan was submitted with {len(self._steps)} in flight; expected fewer than "
                f"{self._limits.steps_in_flight}.",
                "Collect one first.",
            )
        if check_plan(plan, self._limits, self._vocab_size):
            return self._continued(plan)
        return NOBODY

    def add(self, plan: StepPlan, step: Step) -> None:
        """Add a step whose plan was checked."""
        self._steps.append(step)
        self._last = plan

    @property
    def oldest(self) -> Step:
        if not self._steps:
            raise HeadraceError(
                "collect() was called with no plan submitted; expected a submit() before it.",
                "Submit a plan first.",
            )
        return self._steps[0]

    def take(self) -> Step:
        """Remove and return the oldest step."""
        oldest = self.oldest
        self._steps.popleft()
        return oldest

    def close(self) -> None:
        """Refuse new plans from now on, and drop steps that were not collected."""
        self._is_closed = True
        self._steps.clear()

    def _continued(self, plan: StepPlan) -> Continued:
        ids = plan.sequence_ids
        places = [at for at, token in enumerate(plan.token_ids) if token == PREVIOUS]
        rows = places
        if len(plan.token_ids) > len(plan):
            owner = [row for row, count in enumerate(plan.counts) for _ in range(count)]
            rows = [owner[at] for at in places]
            for row in rows:
                if plan.counts[row] > 1:
                    raise mistaken(
                        f"PREVIOUS among {plan.counts[row]} tokens of sequence {ids[row]}",
                        "PREVIOUS as a row's only token",
                    )
        if self._limits.steps_in_flight == 1:
            raise mistaken(
                f"PREVIOUS for sequence {ids[rows[0]]}",
                "token ids, as only one step may be in flight",
            )
        last = self._last
        everybody = rows is places and len(rows) == len(ids) and ids == last.sequence_ids
        if everybody and None not in last.draws and not last.drafts:  # as in most steps
            return Continued(rows, places, rows)
        drawing = {
            who: row
            for row, (who, draw) in enumerate(zip(last.sequence_ids, last.draws, strict=True))
            if draw is not None and row not in last.drafts  # which of its draws counts is not known
        }
        try:
            return Continued(rows, places, [drawing[ids[row]] for row in rows])
        except KeyError as error:
            raise mistaken(
                f"PREVIOUS for sequence {error.args[0]}",
                "a token id, as the previous step drew none for it",
            ) from None


def failed_rows(continued: Continued, before: StepResult | None) -> list[int]:
    """The rows that continue from a token that was not drawn. `before` is the result of the
    previous step, or None if all of that step failed."""
    if before is None:
        return continued.rows
    rows = zip(continued.rows, continued.before, strict=True)
    return [row for row, source in rows if not before.tokens[source]]


def tokens_before(continued: Continued, before: StepResult | None) -> list[tuple[int, int]]:
    """(index among the plan's tokens, token) of rows that continue from the previous step. Token 0
    stands in for one that failed to be drawn: no other sequence can see its blocks."""
    return [
        (at, 0 if before is None or not before.tokens[source] else before.tokens[source][-1])
        for at, source in zip(continued.places, continued.before, strict=True)
    ]


def fail_rows(result: StepResult, rows: Sequence[int]) -> None:
    """Mark rows that continued from a failed draw as failed, whatever was computed for them."""
    for row in rows:
        result.tokens[row], result.logprobs[row] = [], []
        result.extras[row] = RowResult(error=CONTINUES_FAILED)
