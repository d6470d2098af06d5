"""The places at which a row draws: after its last known token, and after each of its drafts.

What a draw depends on besides its parameters and the logits, for one place at a time. Knows plans;
no logits.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import accumulate

from headrace.core.step import NO_EXTRA, Drafts, DrawParams, RowExtra, StepPlan


def place_extras(plan: StepPlan) -> dict[int, list[RowExtra]]:
    """For each row with drafts, an extra for each of its places, of which the first is the row's
    own. Rows without any extra are left out."""
    found: dict[int, list[RowExtra]] = {}
    ends: list[int] = []
    for row, drafts in plan.drafts.items():
        own, params = plan.extras.get(row, NO_EXTRA), plan.draws[row]
        if own is NO_EXTRA and not (drafts.banned or drafts.masks):
            continue
        guesses: list[int] = []
        if params is not None and params.penalizes:
            ends = ends or list(accumulate(plan.counts))
            guesses = plan.token_ids[ends[row] - len(drafts) : ends[row]]
        found[row] = _places_of(own, drafts, guesses)
    return found


def _places_of(own: RowExtra, drafts: Drafts, guesses: list[int]) -> list[RowExtra]:
    """`guesses` are the drafts if penalties apply to them, else none."""
    places = [own]
    for at in range(len(drafts)):
        places.append(
            RowExtra(
                banned=drafts.banned[at] if drafts.banned else (),
                mask=drafts.masks[at] if drafts.masks else None,
                history=[*own.history, *guesses[: at + 1]] if guesses else own.history,
                prompt_tokens=own.prompt_tokens,
                top_logprobs=own.top_logprobs,
            )
        )
    return places


def draws_of(plan: StepPlan) -> Iterator[tuple[int, int, DrawParams, RowExtra]]:
    """(row, place, parameters, extra) of every draw, in order."""
    places = place_extras(plan)
    for row, params in enumerate(plan.draws):
        if params is None:
            continue
        if row in places:
            for place, extra in enumerate(places[row]):
                yield row, place, params, extra
        else:
            extra = plan.extras.get(row, NO_EXTRA)
            for place in range(1 + len(plan.drafts.get(row, ()))):
                yield row, place, params, extra
