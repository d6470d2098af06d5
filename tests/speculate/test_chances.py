"""What is learnt about guesses: shares of right ones, forgetting, and a sequence's own."""

from __future__ import annotations

from random import Random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from headrace.speculate.chances import MOST, KindChances, OwnChances, gains
from headrace.speculate.draft import (
    FORCED,
    KINDS,
    MATCH_STARTS,
    first_chances,
    match_kind,
    model_kind,
)


def test_every_kind_has_a_first_chance_and_they_are_all_different_numbers() -> None:
    kinds = {match_kind(n, agreement) for n in range(2, 40) for agreement in range(4)}
    kinds |= {model_kind(at) for at in range(20)} | {FORCED}
    assert kinds == set(range(KINDS))
    assert len(first_chances()) == KINDS
    assert [match_kind(n, 0) for n in MATCH_STARTS] == [4 * at for at in range(len(MATCH_STARTS))]


@pytest.mark.parametrize("rate", [0.0, 0.3, 0.9, 1.0])
def test_a_chance_goes_to_the_share_of_right_ones(rate: float) -> None:
    random, chances = Random(1), KindChances()
    for _ in range(2000):
        chances.learn(3, random.random() < rate)
    assert chances.chance(3) == pytest.approx(min(rate, MOST), abs=0.08)
    assert chances.chance(4) == first_chances()[4]


def test_what_changed_is_learnt_again() -> None:
    chances = KindChances()
    for _ in range(1000):
        chances.learn(0, True)
    for _ in range(1000):
        chances.learn(0, False)
    assert chances.chance(0) < 0.05


def test_what_is_not_used_drifts_back_to_the_first_guess() -> None:
    chances = KindChances()
    for _ in range(500):
        chances.learn(0, True)
        chances.learn(1, True)
    for _ in range(5000):
        chances.drift([0])
    assert chances.chance(0) == pytest.approx(first_chances()[0], abs=0.02)
    assert chances.chance(1) > 0.9


def test_a_sequence_whose_guesses_are_wrong_is_trusted_less_than_others() -> None:
    chances, good, bad = KindChances(), OwnChances(), OwnChances()
    for _ in range(20):
        good.learn(0.5, True)
        bad.learn(0.5, False)
    assert bad.factor < 0.5 < 1 < good.factor
    assert gains([8], chances, bad, 0.0)[0] < gains([8], chances, OwnChances(), 0.0)[0]
    assert gains([8], chances, good, 0.0)[0] > gains([8], chances, OwnChances(), 0.0)[0]


@given(st.lists(st.integers(0, KINDS - 1), max_size=30), st.floats(0, 1), st.lists(st.booleans()))
def test_gains_fall_and_are_chances(kinds: list[int], least: float, told: list[bool]) -> None:
    chances, own = KindChances(), OwnChances()
    for at, is_right in enumerate(told):
        chances.learn(at % KINDS, is_right)
        own.learn(chances.chance(at % KINDS), is_right)
    found = gains(kinds, chances, own, least)
    assert all(least <= gain <= 1 for gain in found)
    assert found == sorted(found, reverse=True)
    assert len(found) <= len(kinds)
