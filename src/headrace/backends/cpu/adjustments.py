"""Bias, masks, allowed and banned tokens and penalties of a plan's draws, in the form that the
native program takes: flat arrays over the draws that have any. The order of operations is that of
backends/reference/sampling.py. Knows no logits.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence

import numpy as np
from numpy.typing import NDArray

from headrace.backends.cpu import _native
from headrace.backends.shared.answers import flat_bias, flat_ids
from headrace.backends.shared.places import draws_of
from headrace.core.step import DrawParams, RowExtra, StepPlan

Ints = NDArray[np.int32]
Floats = NDArray[np.float32]


def adjustments_of(plan: StepPlan) -> _native.Adjustments | None:
    """None if no draw changes the logits."""
    is_plain = not (plan.extras or plan.drafts)  # as in most steps
    if is_plain and not any(draw is not None and draw.adjusts for draw in plan.draws):
        return None
    rows: list[int] = []
    places: list[int] = []
    params: list[DrawParams] = []
    extras: list[RowExtra] = []
    for row, place, draw, extra in draws_of(plan):
        if draw.adjusts or extra.adjusts:
            rows.append(row)
            places.append(place)
            params.append(draw)
            extras.append(extra)
    if not rows:
        return None
    pairs = list(zip(params, extras, strict=True))
    limited = [(p.allowed is not None) | (e.mask is not None) << 1 for p, e in pairs]
    counts = [_counted_tokens(p, e) for p, e in pairs]
    masks = [extra.mask or b"" for extra in extras]
    return _native.Adjustments(
        np.array(rows, np.int32),
        np.array([draw.penalties for draw in params], np.float32),
        np.array(limited, np.int32),
        (
            *_flat([flat_bias(draw.bias)[0] for draw in params]),
            np.concatenate([flat_bias(draw.bias)[1] for draw in params]),
        ),
        _flat([draw.allowed or () for draw in params]),
        _flat([extra.banned for extra in extras]),
        _flat([e.history if p.repetition_penalty != 1 else () for p, e in pairs]),
        (
            *_flat([ids for ids, _ in counts]),
            np.concatenate([often.astype(np.float32) for _, often in counts]),
        ),
        (_offsets([len(mask) for mask in masks]), np.frombuffer(b"".join(masks), np.uint8)),
        **({"places": np.array(places, np.int32)} if plan.drafts else {}),
    )


def _counted_tokens(draw: DrawParams, extra: RowExtra) -> tuple[Ints, NDArray[np.int64]]:
    """The output tokens that presence and frequency penalties apply to, and their counts."""
    output = extra.history[extra.prompt_tokens :]
    if draw.presence_penalty == 0 and draw.frequency_penalty == 0:
        output = ()
    return np.unique(flat_ids(output), return_counts=True)


def _flat(rows: Sequence[Collection[int]]) -> tuple[Ints, Ints]:
    """All rows' ids in one array: the offset of each row, and the ids."""
    return _offsets([len(row) for row in rows]), np.concatenate([flat_ids(row) for row in rows])


def _offsets(sizes: Sequence[int]) -> Ints:
    """The start of each when they are concatenated, and the end of the last."""
    offsets = np.zeros(len(sizes) + 1, np.int32)
    np.cumsum(sizes, out=offsets[1:])
    return offsets
