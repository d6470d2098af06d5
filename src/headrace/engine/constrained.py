"""A request's grammar on its way into the scheduler: checked, started, and once for each sibling.

Whatever a constraint raises becomes an error of its own request. Knows no grammar and no text.
"""

from __future__ import annotations

from headrace.core.constraint import Constraint
from headrace.core.errors import HeadraceError, InvalidRequestError
from headrace.core.request import GenerateRequest
from headrace.engine.sequence import Sequence


def check_constraint(request: GenerateRequest, constraint: Constraint | None) -> None:
    """A grammar that was forgotten on the way must not end in an answer that does not match it."""
    if (request.grammar is None) != (constraint is None):
        brings = "a grammar and no constraint" if constraint is None else "a constraint alone"
        raise HeadraceError(
            f"Request {request.request_id} has {brings}; expected the grammar and what was "
            "compiled of it.",
            "This is a mistake in Headrace: please report it.",
        )


def start_constraint(sequence: Sequence) -> None:
    """The first token's mask, and a copy to fork siblings from. Refuses the request if it fails."""
    if sequence.constraint is None:
        return
    try:
        sequence.mask = sequence.constraint.mask()
        if sequence.siblings:
            sequence.unstarted = sequence.constraint.fork(), sequence.mask
    except Exception as error:
        raise InvalidRequestError(
            f"The grammar can't be started: {reason_of(error)}",
            "Simplify the grammar.",
            param="grammar",
        ) from error


def fork_constraints(parent: Sequence) -> list[tuple[Constraint, bytes] | None]:
    """One for each sibling that is to be forked, before any of its tokens."""
    if parent.unstarted is None:
        return [None] * parent.siblings
    constraint, mask = parent.unstarted
    return [(constraint.fork(), mask) for _ in range(parent.siblings)]


def reason_of(error: Exception) -> str:
    return error.cause if isinstance(error, HeadraceError) else f"{type(error).__name__}: {error}"
