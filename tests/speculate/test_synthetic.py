"""Guesses with a set share of right ones."""

from __future__ import annotations

import pytest
from tests.speculate.texts import text

from headrace.speculate.synthetic import SyntheticDrafter

ANSWER = [token % 50 for token in range(1000)]


@pytest.mark.parametrize("rate", [0.0, 0.5, 0.8, 1.0])
def test_the_share_of_right_tokens_is_the_rate(rate: float) -> None:
    drafter = SyntheticDrafter(rate, seed=3)
    drafter.keep(text(1, [1, 2, 3, *ANSWER], answer=1000))
    again = text(2, [1, 2, 3, ANSWER[0]], answer=1)
    draft = drafter.draft(again, 999)
    right = sum(a == b for a, b in zip(draft.tokens, ANSWER[1:], strict=True))
    assert right / 999 == pytest.approx(rate, abs=0.05)
    assert min(draft.tokens) >= 0


def test_only_the_same_request_is_known() -> None:
    drafter = SyntheticDrafter(1.0)
    drafter.keep(text(1, [1, 2, 3, 4, 5, 6], answer=3, salt="a", seed=1))
    assert drafter.draft(text(2, [1, 2, 3, 4], answer=1, salt="a", seed=1), 9).tokens == [5, 6]
    for other in (
        text(3, [1, 2, 3, 4], answer=1, salt="b", seed=1),
        text(4, [1, 2, 3, 4], answer=1, salt="a", seed=2),
        text(5, [1, 2, 9, 4], answer=1, salt="a", seed=1),
        text(6, [1, 2, 3, 8], answer=1, salt="a", seed=1),  # went another way
        text(7, [1, 2, 3, 4, 5, 6, 6], answer=4, salt="a", seed=1),  # is longer
    ):
        assert drafter.draft(other, 9).tokens == []


def test_memory_is_bounded() -> None:
    drafter = SyntheticDrafter(1.0, kept_tokens=100)
    for first in range(50):
        drafter.keep(text(first, [first, 2, 3, *range(30)], answer=30))
    assert drafter.draft(text(99, [49, 2, 3, 0], answer=1), 3).tokens == [1, 2, 3]
    assert drafter.draft(text(98, [1, 2, 3, 0], answer=1), 3).tokens == []
