"""Drawing against transformers' filters, exact fractions and torch's log_softmax."""

from __future__ import annotations

import math
from fractions import Fraction

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray
from transformers import MinPLogitsWarper, TopKLogitsWarper, TopPLogitsWarper

from headrace.backends.reference.sampling import draw, log_probability
from headrace.core.errors import HeadraceError
from headrace.core.step import Draw

Row = NDArray[np.float32]


def row(size: int = 50, seed: int = 0) -> Row:
    return np.random.default_rng(seed).normal(0, 2, size).astype(np.float32)


def reachable(logits: Row, how: Draw, steps: int = 4000) -> set[int]:
    """The tokens that some uniform number leads to."""
    grid = np.arange(steps) / steps
    return {
        draw(
            logits,
            Draw(
                temperature=how.temperature, top_p=how.top_p, top_k=how.top_k, min_p=how.min_p,
                uniform=float(u),
            ),
        )[0]
        for u in grid
    }  # fmt: skip


def test_greedy_is_the_first_of_the_largest() -> None:
    logits = np.array([0, 3, 1, 3], np.float32)
    how = Draw(temperature=0, top_k=1, top_p=0.1, min_p=1, uniform=0.99)
    token, logprob = draw(logits, how)
    assert token == 1
    assert logprob == pytest.approx(torch.tensor(logits).log_softmax(0)[1].item())


@pytest.mark.parametrize(
    ("how", "warper"),
    [
        (Draw(temperature=1, top_k=7), TopKLogitsWarper(7)),
        (Draw(temperature=1, top_p=0.8), TopPLogitsWarper(0.8)),
        (Draw(temperature=1, min_p=0.1), MinPLogitsWarper(0.1)),
    ],
)
def test_filters_keep_what_transformers_keeps(how: Draw, warper: object) -> None:
    for seed in range(3):
        logits = row(seed=seed) * np.float32(0.5)
        assert callable(warper)
        kept: torch.Tensor = warper(torch.zeros(1, 1).long(), torch.tensor(logits)[None])[0]
        wanted = set(torch.nonzero(torch.isfinite(kept)).flatten().tolist())
        assert reachable(logits, how) == wanted


def test_frequencies_are_the_tempered_probabilities() -> None:
    logits = row(8)
    steps = 20_000
    counts = np.zeros(8)
    for u in range(steps):
        counts[draw(logits, Draw(temperature=0.7, uniform=u / steps))[0]] += 1
    wanted = torch.softmax(torch.tensor(logits).double() / 0.7, 0).numpy()
    np.testing.assert_allclose(counts / steps, wanted, atol=1.5 / steps)


def test_ties_are_in_order_of_id() -> None:
    logits = np.zeros(10, np.float32)
    assert reachable(logits, Draw(temperature=1, top_k=3)) == {0, 1, 2}
    assert reachable(logits, Draw(temperature=1, top_p=0.3)) == {0, 1, 2}
    tokens = [draw(logits, Draw(temperature=1, uniform=u / 10))[0] for u in range(10)]
    assert tokens == list(range(10))


@pytest.mark.parametrize("temperature", [1e-300, 5e-324])
def test_a_tiny_temperature_is_greedy(temperature: float) -> None:
    logits = row()
    found, _ = draw(logits, Draw(temperature=temperature, uniform=0.999))
    assert found == int(logits.argmax())


@given(
    logits=st.lists(st.integers(-6, 6), min_size=1, max_size=12),
    top_k=st.integers(0, 13),
    top_p=st.integers(1, 20),
    min_p=st.integers(0, 20),
    uniform=st.integers(0, 999),
)
@settings(max_examples=300, deadline=None)
def test_filters_together_by_exact_fractions(
    logits: list[int], top_k: int, top_p: int, min_p: int, uniform: int
) -> None:
    """Logits k * ln 2 have weights 2**k, so that every probability is an exact fraction."""
    scaled = np.array(logits, np.float64) * math.log(2)
    # Thresholds off the fractions' own grid, so that rounding can't decide.
    odd = Fraction(1, 1_000_003)
    p, m, u = Fraction(top_p, 20) - odd, Fraction(min_p, 20) - odd, Fraction(uniform, 1000) + odd
    order = sorted(range(len(logits)), key=lambda i: (-logits[i], i))
    order = order[:top_k] if top_k else order
    weight = {i: Fraction(2) ** logits[i] for i in order}
    order = [i for i in order if weight[i] >= m * weight[order[0]]]
    total = sum(weight[i] for i in order)
    kept: list[int] = []
    while sum(weight[i] for i in kept) < p * total:
        kept.append(order[len(kept)])
    total, running = sum(weight[i] for i in kept), Fraction(0)
    for wanted in kept:
        running += weight[wanted]
        if running > u * total:
            break
    how = Draw(
        temperature=1, top_k=top_k, top_p=float(p), min_p=max(0.0, float(m)), uniform=float(u)
    )
    assert draw(scaled, how)[0] == wanted


def test_log_probability_is_torchs() -> None:
    logits = row(1000) * 10
    wanted = torch.tensor(logits).double().log_softmax(0)
    for token in (0, 17, 999):
        assert log_probability(logits, token) == pytest.approx(wanted[token].item(), rel=1e-12)
    token, logprob = draw(logits, Draw(temperature=0.3, top_k=5, uniform=0.5))
    assert logprob == pytest.approx(wanted[token].item(), rel=1e-12)


@pytest.mark.parametrize("bad", [math.nan, math.inf])
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_logits_that_are_no_numbers_are_an_error(bad: float, temperature: float) -> None:
    logits = row()
    logits[3] = bad
    with pytest.raises(HeadraceError, match=r"largest logit is (nan|inf)"):
        draw(logits, Draw(temperature=temperature))
