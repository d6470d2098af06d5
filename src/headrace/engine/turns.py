"""Whose turn it is: each tenant's account of what was computed for it, by its weight.

Virtual time: a tenant that has had least is next. One that comes after a pause begins where the
others are, so that nobody saves turns up; one that was served more than others waits for them, also
if it went away meanwhile. Values in, values out: knows no sequences, blocks or steps.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

KEPT_TENANTS = 4096  # accounts of tenants that have nothing here now


@dataclass(slots=True, eq=False)
class Turn:
    """One tenant's account."""

    tenant: str
    order: int  # of its first request: who goes first where all else is the same
    weight: int = 1
    had: float = 0.0  # tokens computed for it, divided by its weight; since all were idle
    live: int = 0  # sequences that have not ended
    running: int = 0
    passed_over: int = 0  # steps in a row in which it was next, and found no place
    period: int = 0  # in which `had` was counted
    # Since the engine started.
    tokens: int = 0  # computed, those of prompts too; computed again counts again
    gave_way: int = 0  # times that a sequence of its was preempted for another tenant's


class Turns:
    def __init__(self) -> None:
        self._turns: dict[str, Turn] = {}
        self._active: dict[str, Turn] = {}  # with sequences that have not ended
        self._weights = 0  # of these
        self._period = 0  # ends when nobody has anything
        self._joined = 0

    @property
    def is_shared(self) -> bool:
        """Whether there is more than one to choose from."""
        return len(self._active) > 1

    @property
    def active(self) -> Iterable[Turn]:
        return self._active.values()

    @property
    def known(self) -> list[Turn]:
        """All that have an account; a list of its own, as another thread may ask."""
        return list(self._turns.values())

    def of(self, tenant: str) -> Turn:
        return self._turns[tenant]

    # -- who is there --------------------------------------------------------------------------

    def join(self, tenant: str, weight: int = 1) -> None:
        """One more sequence of a tenant's."""
        turn = self._active.get(tenant)
        if turn is None:
            turn = self._activate(tenant)
        if turn.weight != weight:
            self._weights += weight - turn.weight
            turn.weight = weight
        turn.live += 1

    def leave(self, tenant: str) -> None:
        """One of its sequences has ended."""
        turn = self._active[tenant]
        turn.live -= 1
        if turn.live:
            return
        del self._active[tenant]
        self._weights -= turn.weight
        if not self._active:
            self._period += 1

    def _activate(self, tenant: str) -> Turn:
        turn = self._turns.get(tenant)
        if turn is None:
            if len(self._turns) >= len(self._active) + KEPT_TENANTS:
                self._turns = dict(self._active)
            turn = self._turns[tenant] = Turn(tenant, self._joined, period=self._period)
            self._joined += 1
        if turn.period != self._period:
            turn.had, turn.period = 0.0, self._period
        turn.had = max(turn.had, min((each.had for each in self._active.values()), default=0.0))
        turn.passed_over = 0
        self._active[tenant] = turn
        self._weights += turn.weight
        return turn

    # -- what each has had ---------------------------------------------------------------------

    def charge(self, tenant: str, tokens: int) -> None:
        turn = self._turns[tenant]
        turn.tokens += tokens
        turn.had += tokens / turn.weight

    def charge_all(self, tokens: int) -> None:
        """To the only one that is there."""
        for turn in self._active.values():
            turn.tokens += tokens
            turn.had += tokens / turn.weight

    # -- who is next ---------------------------------------------------------------------------

    def next(self, candidates: Iterable[Turn]) -> Turn | None:
        """Who has had least; of several, who has least running."""
        return min(candidates, key=_place, default=None)

    def share(self, turn: Turn, of: int) -> float:
        """What the tenant may have of `of` places or blocks while all that are there want some."""
        return of * turn.weight / max(1, self._weights)


def _place(turn: Turn) -> tuple[float, float, int]:
    return (turn.had, turn.running / turn.weight, turn.order)
