"""Drawing a token: the exact order of operations that every backend follows.

1. temperature 0: the first index of the largest logit; nothing else applies.
2. Order tokens by (logit descending, id ascending). top_k keeps the first k of them.
3. w = exp((logit - largest) / temperature), in float64: probabilities but for their sum.
4. min_p keeps w >= min_p * largest w, that is w >= min_p.
5. top_p keeps the shortest prefix whose running sum is >= top_p * (sum of what is kept so far);
   a top_p of 1 keeps all.
6. The token is the first whose running sum is > uniform * (sum of what is kept).

Running sums go in that order, one after the other. The log-probability given back is that of the
token among all tokens, at temperature 1. Knows one row of logits; nothing of batches.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from headrace.core.errors import HeadraceError
from headrace.core.step import Draw


def draw(logits: NDArray[np.floating], how: Draw) -> tuple[int, float]:
    """A token and its log-probability, from one row of logits."""
    exact = logits.astype(np.float64)
    token = _greedy(exact) if how.temperature == 0 else _sampled(exact, how)
    return token, log_probability(exact, token)


def log_probability(logits: NDArray[np.floating], token: int) -> float:
    """The token's log-softmax."""
    exact = logits.astype(np.float64)
    largest = _largest(exact)
    return float(exact[token] - largest - np.log(np.sum(np.exp(exact - largest))))


def _greedy(logits: NDArray[np.float64]) -> int:
    _largest(logits)
    return int(np.argmax(logits))


def _sampled(logits: NDArray[np.float64], how: Draw) -> int:
    largest = _largest(logits)
    order = np.argsort(-logits, kind="stable")  # stable: equal logits stay in order of id
    if how.top_k > 0:
        order = order[: how.top_k]
    with np.errstate(over="ignore"):  # a tiny temperature: -infinity, and a weight of 0
        weights = np.exp((logits[order] - largest) / how.temperature)
    weights = weights[weights >= how.min_p]
    sums = np.cumsum(weights)
    if how.top_p < 1:
        kept = int(np.searchsorted(sums, how.top_p * sums[-1], side="left")) + 1
        sums = sums[:kept]
    chosen = int(np.searchsorted(sums, how.uniform * sums[-1], side="right"))
    return int(order[min(chosen, len(sums) - 1)])


def _largest(logits: NDArray[np.float64]) -> float:
    largest = float(np.max(logits))
    if not np.isfinite(largest):  # NaN too
        raise HeadraceError(
            f"The model's largest logit is {largest}; expected a finite number.",
            "The weights are damaged or overflow float32: fetch the model again.",
        )
    return largest
