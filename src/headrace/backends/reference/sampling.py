"""Drawing a token: the exact order of operations that every backend follows.

Adjusting the logits, as far as a draw asks for it; in float32, one operation after the other:
 1. logit + bias.
 2. Tokens outside `allowed`, those whose bit in `mask` is not set (or that lie past its end), and
    those in `banned` are dropped: their logit is -infinity.
 3. Tokens in `history`: divided by repetition_penalty if above 0, else multiplied by it.
 4. logit - frequency_penalty * count, then - presence_penalty, for tokens of the output, which
    is `history` past the prompt; count is how often they occur in it. If all tokens are dropped
    now, or a logit is beyond float32's range, the draw fails.
Choosing, in float64:
 5. temperature 0: the argmax, of equals the lowest id; nothing else applies.
 6. Order tokens by (logit descending, id ascending). top_k keeps the first k of them.
 7. w = exp((logit - largest) / temperature): unnormalized probabilities. Keeps those with
    w >= min_p (the largest w is 1), and none below 2**-40: a whole vocabulary of these is drawn
    less than once in a million, so that backends can skip them.
 8. typical_p keeps the shortest prefix, in order of |logit - mean logit under w| (then that of 6.),
    whose running sum is >= typical_p * (sum of what is kept so far); a typical_p of 1 keeps all.
    The distance is |-log p - entropy| times the temperature: locally typical sampling.
 9. top_p keeps the shortest prefix, in order of 6., whose running sum is >= top_p * (sum of what is
    kept so far); a top_p of 1 keeps all.
10. The token is the first, in order of id, whose running sum is > uniform * (sum of what is kept).
    By id, and not by likelihood: if logits differ in their last bits, as they do on a GPU from one
    batch to another, the order of 6. changes, but this one does not.

Running sums are sequential, in the order named. Returned log-probabilities are the model's own:
over all tokens, unadjusted and at temperature 1. Knows one row of logits; nothing of batches.
"""

from __future__ import annotations

from collections import Counter

import numpy as np
from numpy.typing import NDArray

from headrace.core.errors import HeadraceError, InvalidRequestError
from headrace.core.step import NO_EXTRA, DrawParams, RowExtra, TopLogprobs

LEAST_WEIGHT = 2.0**-40


def draw(
    logits: NDArray[np.floating],
    params: DrawParams,
    uniform: float = 0.0,
    extra: RowExtra = NO_EXTRA,
) -> tuple[int, float]:
    """A token and its log-probability, from one row of logits."""
    largest(logits)
    adjusted = adjust(logits, params, extra).astype(np.float64)
    _check_adjusted(adjusted)
    if params.temperature == 0:
        token = int(np.argmax(adjusted))
    else:
        token = _sampled(adjusted, params, uniform)
    return token, log_probability(logits, token)


def log_probability(logits: NDArray[np.floating], token: int) -> float:
    """The token's log-softmax."""
    return float(_log_softmax(logits)[token])


def top_log_probabilities(logits: NDArray[np.floating], count: int) -> TopLogprobs:
    """The likeliest tokens and their log-softmax; of equals the lower id first."""
    scores = _log_softmax(logits)
    order = np.argsort(-logits, kind="stable")[:count]
    return [(int(token), float(scores[token])) for token in order]


def adjust(
    logits: NDArray[np.floating], params: DrawParams, extra: RowExtra = NO_EXTRA
) -> NDArray[np.floating]:
    """Bias, allowed, masked and banned tokens, penalties: 1. to 4. Returns the row itself if there
    is nothing to adjust."""
    if not (params.adjusts or extra.adjusts):
        return logits
    row = logits.astype(np.float32)
    for token, bias in params.bias.items():
        row[token] += np.float32(bias)
    if params.allowed is not None:
        outside = np.ones(len(row), bool)
        outside[list(params.allowed)] = False
        row[outside] = -np.inf
    if extra.mask is not None:
        row[~masked_in(extra.mask, len(row))] = -np.inf
    row[list(extra.banned)] = -np.inf
    with np.errstate(over="ignore"):  # past float32: infinite, which is refused afterwards
        if params.repetition_penalty != 1:
            penalty = np.float32(params.repetition_penalty)
            for token in set(extra.history):
                row[token] = row[token] / penalty if row[token] > 0 else row[token] * penalty
        for token, count in Counter(extra.history[extra.prompt_tokens :]).items():
            row[token] -= np.float32(params.frequency_penalty) * np.float32(count)
            row[token] -= np.float32(params.presence_penalty)
    return row


def masked_in(mask: bytes, size: int) -> NDArray[np.bool_]:
    """Which tokens of a vocabulary of `size` a mask allows."""
    bits = np.unpackbits(np.frombuffer(mask, np.uint8), bitorder="little")[:size]
    allowed = np.zeros(size, bool)
    allowed[: len(bits)] = bits == 1
    return allowed


def _sampled(logits: NDArray[np.float64], params: DrawParams, uniform: float) -> int:
    order = np.argsort(-logits, kind="stable")  # stable: equal logits stay in order of id
    if params.top_k > 0:
        order = order[: params.top_k]
    with np.errstate(over="ignore"):  # a tiny temperature: -infinity, and a weight of 0
        weights = np.exp((logits[order] - logits[order[0]]) / params.temperature)
    kept = weights >= max(params.min_p, LEAST_WEIGHT)
    order, weights = order[kept], weights[kept]
    if params.typical_p < 1:
        kept = _typical(logits[order], weights, params.typical_p)
        order, weights = order[kept], weights[kept]
    if params.top_p < 1:
        sums = np.cumsum(weights)
        end = int(np.searchsorted(sums, params.top_p * sums[-1], side="left")) + 1
        order, weights = order[:end], weights[:end]
    by_id = np.argsort(order)
    sums = np.cumsum(weights[by_id])
    chosen = int(np.searchsorted(sums, uniform * sums[-1], side="right"))
    return int(order[by_id[min(chosen, len(sums) - 1)]])


def _typical(
    logits: NDArray[np.float64], weights: NDArray[np.float64], mass: float
) -> NDArray[np.bool_]:
    """Which of the tokens, given in order, are locally typical."""
    mean = logits[0] + np.sum(weights * (logits - logits[0])) / np.sum(weights)
    by_distance = np.argsort(np.abs(logits - mean), kind="stable")
    sums = np.cumsum(weights[by_distance])
    end = int(np.searchsorted(sums, mass * sums[-1], side="left")) + 1
    kept = np.zeros(len(logits), bool)
    kept[by_distance[:end]] = True
    return kept


def _log_softmax(logits: NDArray[np.floating]) -> NDArray[np.float64]:
    shifted: NDArray[np.float64] = logits.astype(np.float64) - largest(logits)
    scores: NDArray[np.float64] = shifted - np.log(np.sum(np.exp(shifted)))
    return scores


def largest(logits: NDArray[np.floating]) -> float:
    found = float(np.max(logits))
    if not np.isfinite(found):  # NaN too
        raise HeadraceError(
            f"The model's largest logit is {found}; expected a finite number.",
            "The weights are damaged or overflow float32: fetch the model again.",
        )
    return found


def _check_adjusted(logits: NDArray[np.float64]) -> None:
    found = float(np.max(logits))
    if found == -np.inf:
        raise InvalidRequestError(
            "No token is left to draw: all allowed tokens are banned or masked; expected one or "
            "more.",
            "Allow more tokens or ban fewer.",
        )
    if found == np.inf:
        raise InvalidRequestError(
            "Bias and penalties moved a logit beyond the range of float32.",
            "Choose a repetition_penalty closer to 1.",
        )
