"""Fair sharing between tenants: an account per tenant of the tokens computed for it, by weight.

Virtual time: the tenant that has had the least is next. A tenant that returns after a pause starts
level with the others, so that unused turns do not add up; one that had more than the others waits
until they have caught up, even if it was away in between. Values in, values out: knows no
sequences, blocks or steps.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

KEPT_TENANTS = 4096  # accounts kept of tenants without requests


@dataclass(slots=True, eq=False)
class Turn:
    """One tenant's account."""

    tenant: str
    order: int  # of its first request: decides between equals
    weight: int = 1
    had: float = 0.0  # tokens computed for it / weight, since all tenants were last idle
    live: int = 0  # sequences that have not ended
    running: int = 0
    passed_over: int = 0  # steps in a row in which it was next, but could not start
    period: int = 0  # in which `had` was counted
    # Since the engine started.
    tokens: int = 0  # computed, prompts included; recomputation counts again
    gave_way: int = 0  # how often one of its sequences was preempted for another tenant


class Turns:
    def __init__(self) -> None:
        self._turns: dict[str, Turn] = {}
        self._active: dict[str, Turn] = {}  # with sequences that have not ended
        self._weights = 0  # of these
        self._period = 0  # ends when no tenant has a request
        self._joined = 0

    @property
    def is_shared(self) -> bool:
        """Whether more than one tenant has requests."""
        return len(self._active) > 1

    @property
    def active(self) -> Iterable[Turn]:
        return self._active.values()

    @property
    def known(self) -> list[Turn]:
        """All tenants with an account; a new list, because other threads may read it."""
        return list(self._turns.values())

    def of(self, tenant: str) -> Turn:
        return self._turns[tenant]

    # -- active tenants ------------------------------------------------------------------------

    def join(self, tenant: str, weight: int = 1) -> None:
        """A tenant has one more sequence."""
        turn = self._active.get(tenant)
        if turn is None:
            turn = self._activate(tenant)
        if turn.weight != weight:
            self._weights += weight - turn.weight
            turn.weight = weight
        turn.live += 1

    def leave(self, tenant: str) -> None:
        """One of a tenant's sequences has ended."""
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
        """Charge the only active tenant."""
        for turn in self._active.values():
            turn.tokens += tokens
            turn.had += tokens / turn.weight

    # -- who is next ---------------------------------------------------------------------------

    def next(self, candidates: Iterable[Turn]) -> Turn | None:
        """The tenant that has had the least; of equals, the one with the fewest running."""
        return min(candidates, key=_place, default=None)

    def share(self, turn: Turn, of: int) -> float:
        """The tenant's share of `of` slots or blocks while all active tenants want some."""
        return of * turn.weight / max(1, self._weights)


def _place(turn: Turn) -> tuple[float, float, int]:
    return (turn.had, turn.running / turn.weight, turn.order)
