"""Accepted tokens by the formula: the corrected figures of the seeds, and drawing at random."""

from __future__ import annotations

import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from headrace.core.errors import ConfigError
from headrace.search.speculation import Speculation, accepted_tokens


def test_the_corrected_figures() -> None:
    # SEEDS-ERRATA: five draft tokens, 75-85% accepted -> 3.29-4.15 tokens, 2.2-2.8 times.
    assert round(accepted_tokens(5, 0.75), 2) == 3.29
    assert round(accepted_tokens(5, 0.85), 2) == 4.15
    low = Speculation(draft_tokens=5, acceptance=0.75).gain(1.0, 1.0)
    high = Speculation(draft_tokens=5, acceptance=0.85).gain(1.0, 1.0)
    assert (round(low, 1), round(high, 1)) == (2.2, 2.8)


def test_against_drawing() -> None:
    random_ = random.Random(1)
    total, steps = 0, 40_000
    for _ in range(steps):
        total += 1
        for _ in range(5):
            if random_.random() >= 0.8:
                break
            total += 1
    assert accepted_tokens(5, 0.8) == pytest.approx(total / steps, rel=0.01)


@given(k=st.integers(0, 20), a=st.floats(0, 1))
def test_between_one_and_all(k: int, a: float) -> None:
    assert 1 <= accepted_tokens(k, a) <= k + 1


def test_a_full_batch_loses() -> None:
    # Verifying six tokens a sequence takes six times as long where the step is bound by FLOPs.
    assert Speculation().gain(1.0, 6.0) < 1


@pytest.mark.parametrize(("k", "a"), [(-1, 0.5), (5, 1.5), (5, -0.1)])
def test_bad_input(k: int, a: float) -> None:
    with pytest.raises(ConfigError):
        accepted_tokens(k, a)
