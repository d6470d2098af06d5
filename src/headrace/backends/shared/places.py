"""The places at which a row draws: after its last known token, and after each of its drafts.

What a draw depends on besides the logits, for one place at a time. Knows plans; no logits.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import accumulate

from headrace.core.step import NO_EXTRA, DrawParams, RowExtra, StepPlan

NO_PLACES: dict[int, list[RowExtra]] = {}


def place_extras(plan: StepPlan) -> dict[int, list[RowExtra]]:
    """For each row with drafts, an extra for each of its places; the first is the row's own."""
    if not plan.drafts:
        return NO_PLACES
    ends = list(accumulate(plan.counts))
    return {row: _places_of(plan, row, ends[row]) for row in sorted(plan.drafts)}


def _places_of(plan: StepPlan, row: int, end: int) -> list[RowExtra]:
    drafts, own = plan.drafts[row], plan.extras.get(row, NO_EXTRA)
    params = plan.draws[row]
    history = own.history
    found = [own]
    for at in range(len(drafts)):
        if params is not None and params.penalizes:
            history = [
                *own.history,
                *plan.token_ids[end - len(drafts) : end - len(drafts) + at + 1],
            ]
        found.append(
            RowExtra(
                banned=drafts.banned[at] if drafts.banned else (),
                mask=drafts.masks[at] if drafts.masks else None,
                history=history,
                prompt_tokens=own.prompt_tokens,
                top_logprobs=own.top_logprobs,
            )
        )
    return found


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
            yield row, 0, params, plan.extras.get(row, NO_EXTRA)
