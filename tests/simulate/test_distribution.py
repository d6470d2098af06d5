"""The made-up distribution: it is one, and it is drawn from as the reference says."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.plans import Draw, reference_draw

from headrace.simulate.distribution import ROOT, Distribution, Vocabulary, extend

GREEDY = Draw(temperature=0.0)
hashes = st.integers(0, 2**64 - 1)
vocabularies = st.one_of(
    st.builds(Vocabulary, st.integers(1, 80)),
    st.integers(2, 80).flatmap(
        lambda size: st.builds(
            Vocabulary, st.just(size), st.integers(0, size - 1), st.sampled_from([0.0, 0.5, 1.0])
        )
    ),
)


def logits(distribution: Distribution, size: int) -> np.ndarray[tuple[int], np.dtype[np.float64]]:
    return np.array([distribution.logprob(token) for token in range(size)])


@given(hashes, vocabularies)
def test_probabilities_sum_to_one_and_the_top_is_their_order(
    value: int, vocabulary: Vocabulary
) -> None:
    distribution = Distribution(value, vocabulary)
    row = logits(distribution, vocabulary.size)
    assert np.exp(row).sum() == pytest.approx(1)
    top = distribution.top(20)
    assert len(top) == min(20, vocabulary.size)
    assert [logprob for _, logprob in top] == sorted(row, reverse=True)[:20]
    assert all(row[token] == logprob for token, logprob in top)
    assert len({token for token, _ in top}) == len(top)


@given(hashes, vocabularies, st.floats(0, 1, exclude_max=True), st.sampled_from([0.0, 1.0]))
def test_plain_draws_are_the_reference_draws(
    value: int, vocabulary: Vocabulary, uniform: float, temperature: float
) -> None:
    distribution = Distribution(value, vocabulary)
    row = logits(distribution, vocabulary.size)
    how = Draw(temperature=temperature, uniform=uniform)
    token = distribution.draw(how.params, how.uniform, how.extra)
    expected = reference_draw(row, how)[0]
    if token != expected:  # running sums round otherwise: only on the very edge
        sums = np.cumsum(np.exp(row))
        assert token is not None
        low, high = sorted((token, expected))
        # What the reference drops for its small weight is drawn here. Several tokens of next to
        # no weight lie within a rounding of each other.
        assert sums[low:high] == pytest.approx(uniform, abs=1e-10)


@given(hashes, st.data())
def test_allowed_and_banned_are_honoured(value: int, data: st.DataObject) -> None:
    vocabulary = Vocabulary(60, 5, 0.5)
    some = st.sets(st.integers(0, 59))
    allowed = data.draw(st.none() | some)
    banned = data.draw(some)
    masked = data.draw(st.none() | some)
    size_bytes = data.draw(st.sampled_from([5, 8, 9]))
    mask = None
    if masked is not None:
        value_of_mask = sum(1 << token for token in masked if token < 8 * size_bytes)
        mask = value_of_mask.to_bytes(size_bytes, "little")
        masked = {token for token in masked if token < 8 * size_bytes}
    left = (set(range(60)) if allowed is None else allowed) - banned
    left = left if masked is None else left & masked
    distribution = Distribution(value, vocabulary)
    for temperature in (0.0, 0.7, 1.0):
        how = Draw(
            temperature=temperature,
            allowed=allowed,
            banned=banned,
            mask=mask,
            uniform=data.draw(st.floats(0, 1, exclude_max=True)),
        )
        token = distribution.draw(how.params, how.uniform, how.extra)
        assert token in left if left else token is None
        if temperature == 0 and left:
            assert token == max(left, key=lambda t: (distribution.logprob(t), -t))


def test_the_end_token_comes_at_its_rate_and_nowhere_else() -> None:
    value, found = ROOT, 0
    vocabulary = Vocabulary(1000, 7, 0.02)
    for number in range(20_000):
        value = extend(value, number % 50)
        found += Distribution(value, vocabulary).draw(GREEDY.params, 0.0, GREEDY.extra) == 7
    assert 300 < found < 500  # 400 expected, a standard deviation of 20


def test_hashes_tell_every_history_apart() -> None:
    seen = set()
    for first in range(40):
        for second in range(40):
            for third in range(40):
                seen.add(extend(extend(extend(ROOT, first), second), third))
            seen.add(extend(extend(ROOT, first), second))
    assert len(seen) == 40**3 + 40**2
    assert not math.isclose(
        Distribution(extend(ROOT, 1), Vocabulary(100)).top(1)[0][1],
        Distribution(extend(ROOT, 2), Vocabulary(100)).top(1)[0][1],
        rel_tol=1e-9,
    )
