"""A request's grammar in the scheduler: checked, started, forked for each sibling, and waited for.

A grammar may need longer for a token than a step takes. Its sequence then pauses, with a drawn
token that is not yet given out, while others continue: see `Undecided`. An exception in a
constraint becomes an error of its own request. Knows no grammar and no text.
"""

from __future__ import annotations

from collections.abc import Iterator

from headrace.core.clock import Clock
from headrace.core.constraint import Allowed, Constraint
from headrace.core.errors import HeadraceError, InvalidRequestError
from headrace.core.request import GenerateRequest, SampledToken
from headrace.engine.sequence import Sequence

# How long a step waits for grammars that are usually fast: most answer in a tenth of this.
PATIENCE_S = 0.004


def check_constraint(request: GenerateRequest, constraint: Constraint | None) -> None:
    """Refuses a grammar without its constraint: the answer would not follow the grammar."""
    if (request.grammar is None) != (constraint is None):
        brings = "a grammar without constraint" if constraint is None else "only a constraint"
        raise HeadraceError(
            f"Request {request.request_id} has {brings}; expected a grammar together with its "
            "compiled constraint.",
            "This is a mistake in Headrace: please report it.",
        )


def start_constraint(sequence: Sequence) -> None:
    """Get the first token's mask, and keep a copy to fork siblings from. Refuses the request if the
    grammar fails."""
    rare = sequence.rare
    if rare is None or rare.constraint is None:
        return
    try:
        allowed = rare.constraint.allowed()
        if allowed is None:
            raise HeadraceError("the grammar was not compiled")
        rare.mask = allowed.mask
        if rare.siblings:
            rare.unstarted = rare.constraint.fork(), allowed.mask
    except Exception as error:
        raise InvalidRequestError(
            f"The grammar can't be started: {reason_of(error)}",
            "Simplify the grammar.",
            param="grammar",
        ) from error


def fork_constraints(parent: Sequence) -> list[tuple[Constraint, bytes] | None]:
    """One constraint, without any tokens, for each sibling that is to be forked."""
    if parent.rare is None or parent.rare.unstarted is None:
        return [None] * parent.siblings
    constraint, mask = parent.rare.unstarted
    forks: list[tuple[Constraint, bytes] | None] = []
    try:
        for _ in range(parent.siblings):
            forks.append((constraint.fork(), mask))  # all are closed if one fails
    except Exception:
        for made in forks:
            if made is not None:
                made[0].close()
        raise
    return forks


def close_constraints(sequence: Sequence) -> None:
    """Close the constraints of a sequence that has ended."""
    rare = sequence.rare
    if rare is not None and rare.constraint is not None:
        rare.constraint.close()
    if rare is not None and rare.unstarted is not None:
        rare.unstarted[0].close()


class Undecided:
    """Sequences whose grammar got the drawn token and has not yet said what may follow.

    Grammars that answered in time before are waited for, together and briefly, so that their
    sequences take part in the next step. One that was late is only polled until it is fast again:
    a slow grammar does not delay others.
    """

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._held: dict[int, tuple[Sequence, SampledToken]] = {}
        self._late: set[int] = set()

    def __len__(self) -> int:
        return len(self._held)

    def __contains__(self, sequence: Sequence) -> bool:
        return sequence.sequence_id in self._held

    def add(self, sequence: Sequence, token: SampledToken) -> None:
        """The constraint has accepted the token, which is not given out yet."""
        self._held[sequence.sequence_id] = sequence, token

    def forget(self, sequence: Sequence) -> None:
        self._held.pop(sequence.sequence_id, None)
        self._late.discard(sequence.sequence_id)

    def settle(
        self, wait_s: float, *, for_all: bool = False
    ) -> Iterator[tuple[Sequence, SampledToken, Allowed | Exception]]:
        """The sequences that are decided now, each with what may follow or with an error."""
        until_s = self._clock.now_s() + wait_s
        for sequence_id, (sequence, token) in list(self._held.items()):
            if sequence_id not in self._held:  # a sibling has just ended the request
                continue
            assert sequence.constraint is not None
            is_late = sequence_id in self._late
            left_s = max(0.0, until_s - self._clock.now_s())
            try:
                decided: Allowed | Exception | None = sequence.constraint.allowed(
                    left_s if for_all or not is_late else 0.0
                )
            except Exception as error:  # any error ends this request only
                decided = error
            if decided is None:
                if wait_s:
                    self._late.add(sequence_id)
                continue
            del self._held[sequence_id]
            if wait_s and not for_all:  # at the end of the step that drew the token
                self._late.discard(sequence_id)
            yield sequence, token, decided


def reason_of(error: Exception) -> str:
    return error.cause if isinstance(error, HeadraceError) else f"{type(error).__name__}: {error}"
