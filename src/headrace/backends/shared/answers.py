"""A step's results by row of the plan: converts what a sampler returned for the wanted rows.

A wanted row is one whose logits are needed: for each row of the plan, one per target to be scored,
then one for each token to be drawn: one, and one more for each draft. Knows no logits.
"""

from __future__ import annotations

from array import array
from collections.abc import Collection, Sequence

import numpy as np
from numpy.typing import NDArray

from headrace.core.step import FlatBias, RowResult, StepPlan, StepResult, TopLogprobs

NOT_NUMBERS = -1
FAILURES = {  # a sampler returns these in place of a token
    NOT_NUMBERS: "The model's logits are not finite numbers.",
    -2: "No token is left to draw: all allowed tokens are banned or masked; expected one or more.",
    -3: "Bias and penalties moved a logit beyond the range of float32.",
}


def answer_rows(
    plan: StepPlan, tokens: list[int], logprobs: list[float], tops: Sequence[TopLogprobs] = ()
) -> StepResult:
    """The result of a plan, from arrays over its wanted rows. `tops` may be empty if no row asked
    for alternatives."""
    is_plain = not (plan.extras or plan.drafts) and len(tokens) == len(plan)
    if is_plain and min(tokens, default=0) >= 0:
        return StepResult(
            tokens=[[token] for token in tokens], logprobs=[[logprob] for logprob in logprobs]
        )
    result = StepResult(tokens=[[] for _ in plan.counts], logprobs=[[] for _ in plan.counts])
    at = 0
    for row, draw in enumerate(plan.draws):
        asked = plan.extras.get(row)
        first, found = at, RowResult()
        if asked is not None and asked.targets is not None:
            at += len(asked.targets)
            found.target_logprobs = logprobs[first:at]
            if asked.top_logprobs:
                found.target_tops = list(tops[first:at])
        end = at + (draw is not None) + len(plan.drafts.get(row, ()))
        bad = next((token for token in tokens[first:end] if token < 0), 0)
        if not bad:
            drawn = end
        elif row in plan.drafts:  # up to the place that failed
            drawn = tokens.index(bad, first)
        else:
            drawn = at
        result.tokens[row], result.logprobs[row] = tokens[at:drawn], logprobs[at:drawn]
        if asked is not None and asked.top_logprobs:
            found.tops = list(tops[at:drawn])
        if bad:
            found.error, found.is_own_fault = FAILURES[bad], bad != NOT_NUMBERS
        if asked is not None or bad:
            result.extras[row] = found
        at = end
    return result


def flat_ids(ids: Collection[int]) -> NDArray[np.int32]:
    if isinstance(ids, (np.ndarray, array)):  # converts all at once
        return np.asarray(ids, np.int32)
    return np.fromiter(ids, np.int32, len(ids))


def flat_bias(bias: FlatBias) -> tuple[NDArray[np.int32], NDArray[np.float32]]:
    """The ids and values of a bias, as arrays."""
    return np.asarray(bias.flat_ids, np.int32), np.asarray(bias.flat_values, np.float32)
