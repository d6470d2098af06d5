"""Whether tokens that a server drew came from the distribution that was asked for.

Expectations are made of the likeliest tokens and their log-probabilities, which a server gives for
the model itself: the steps of backends/reference/sampling.py, over those few. So a setting must
keep no token beyond them, unless its temperature is 1 and all others can be one bin. Values in,
values out: no server, no numpy.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

OTHERS = "(others)"
LEAST_EXPECTED = 5.0  # bins of fewer are counted together: the test is made for no less
_SLACK = 1e-3  # two steps that differ in their last bits may keep one token more or less

Top = Sequence[tuple[str, float]]  # tokens and log-probabilities, likeliest first


def expected_shares(top: Top, how: Mapping[str, Any]) -> dict[str, float]:
    """Each token's probability under a request's fields. `allowed` and `bias` are by token text."""
    temperature = how.get("temperature", 1.0)
    bias: Mapping[str, float] = how.get("bias", {})
    logits = {text: logprob + bias.get(text, 0.0) for text, logprob in top}
    if (allowed := how.get("allowed")) is not None:
        logits = {text: logit for text, logit in logits.items() if text in allowed}
    order = sorted(logits, key=lambda text: -logits[text])
    is_cut = "top_k" in how or allowed is not None
    if top_k := how.get("top_k"):
        order = order[:top_k]
    largest = logits[order[0]]
    weights = {text: math.exp((logits[text] - largest) / temperature) for text in order}
    # What is beyond the list is known as a sum only, and that only at temperature 1.
    beyond = 0.0
    if not is_cut:
        if temperature != 1 or bias:
            raise ValueError(f"{dict(how)} keeps tokens that the list does not have")
        beyond = max(0.0, 1 - sum(math.exp(p) for _, p in top)) / math.exp(largest)
    if min_p := how.get("min_p"):
        weights = {text: w for text, w in weights.items() if w >= min_p}
        beyond = 0.0  # the caller's list reaches further down than min_p
    if (typical_p := how.get("typical_p", 1.0)) < 1:
        weights = _typical(weights, logits, typical_p)
    if (top_p := how.get("top_p", 1.0)) < 1:
        weights, beyond = _nucleus(weights, top_p, beyond), 0.0
    total = sum(weights.values()) + beyond
    shares = {text: w / total for text, w in weights.items()}
    return shares | ({OTHERS: beyond / total} if beyond else {})


def mean_shares(each: Sequence[Mapping[str, float]]) -> dict[str, float]:
    """Of draws whose expectations differ a little, as logits do from one batch to another."""
    total: Counter[str] = Counter()
    for shares in each:
        total.update(shares)
    return {text: value / len(each) for text, value in total.items()}


def _typical(
    weights: Mapping[str, float], logits: Mapping[str, float], share: float
) -> dict[str, float]:
    total = sum(weights.values())
    mean = sum(w * logits[text] for text, w in weights.items()) / total
    order = sorted(weights, key=lambda text: abs(logits[text] - mean))
    kept = _prefix(order, weights, share * total)
    return {text: w for text, w in weights.items() if text in kept}


def _nucleus(weights: Mapping[str, float], share: float, beyond: float) -> dict[str, float]:
    order = sorted(weights, key=lambda text: -weights[text])
    kept = _prefix(order, weights, share * (sum(weights.values()) + beyond))
    return {text: weights[text] for text in order if text in kept}


def _prefix(order: Sequence[str], weights: Mapping[str, float], wanted: float) -> set[str]:
    kept: set[str] = set()
    running = 0.0
    for text in order:
        kept.add(text)
        running += weights[text]
        if running >= wanted:
            return kept
    raise ValueError("the list ends before the kept tokens do")


def surprise(drawn: Counter[str], shares: Mapping[str, float]) -> tuple[float, str]:
    """How likely counts as odd as these are, by a chi-squared test; and the oddest bin, in words.
    `shares` add up to 1."""
    count = drawn.total()
    expected = {text: count * share for text, share in shares.items()}
    large = {text: e for text, e in expected.items() if e >= LEAST_EXPECTED and text != OTHERS}
    bins = {text: (drawn[text], e) for text, e in large.items()}
    rest = count - sum(large.values())
    others = count - sum(drawn[text] for text in large)
    if OTHERS not in shares:
        strange = [text for text in drawn if text not in shares]
        lost = sum(drawn[text] for text in strange)
        if lost > _SLACK * count:
            return (
                0.0,
                f"{lost} of {count} draws are of tokens that must not be kept: {strange[:3]}",
            )
    if rest >= LEAST_EXPECTED:
        bins[OTHERS] = (others, rest)
    if len(bins) < 2:
        return 1.0, "one bin"
    parts = {text: (found - e) ** 2 / e for text, (found, e) in bins.items()}
    oddest = max(parts, key=lambda text: parts[text])
    found, wanted = bins[oddest]
    said = f"{len(bins)} bins, oddest {oddest!r}: {found} drawn, {wanted:.1f} expected"
    return chi_squared_tail(sum(parts.values()), len(bins) - 1), said


def chi_squared_tail(value: float, freedom: int) -> float:
    """The chance of at least `value`, after Wilson and Hilferty: good to a few percent."""
    spread = 2 / (9 * freedom)
    score = ((value / freedom) ** (1 / 3) - (1 - spread)) / math.sqrt(spread)
    return 0.5 * math.erfc(score / math.sqrt(2))
