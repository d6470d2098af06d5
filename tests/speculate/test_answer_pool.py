"""Past answers: found by their own key alone, within bounds, the oldest forgotten first."""

from __future__ import annotations

from itertools import pairwise

from hypothesis import given
from hypothesis import strategies as st

from headrace.speculate.answer_pool import AnswerPool
from headrace.speculate.indexed_text import BREAK, IndexedText
from headrace.speculate.matching import draft_agreed

ANSWERS = st.lists(
    st.tuples(st.sampled_from("abc"), st.lists(st.integers(0, 9), max_size=30)), max_size=30
)


def drafted(pool: AnswerPool, key: str, tokens: list[int], most: int = 4) -> list[int]:
    own = IndexedText(tokens)
    own.index()
    return draft_agreed(own, pool.texts(key), most).tokens


def test_only_the_same_key_finds_an_answer() -> None:
    pool = AnswerPool()
    pool.add("mine", [5, 6, 7, 8, 9])
    assert drafted(pool, "mine", [5, 6]) == [7, 8, 9]
    assert drafted(pool, "other", [5, 6]) == []
    assert drafted(pool, "", [5, 6]) == []


@given(ANSWERS, st.integers(4, 40), st.integers(4, 80))
def test_memory_is_bounded_for_each_key_and_for_all(
    answers: list[tuple[str, list[int]]], key_tokens: int, all_tokens: int
) -> None:
    pool = AnswerPool(key_tokens, all_tokens)
    for key, answer in answers:
        pool.add(key, answer)
        kept = {each: sum(len(t.tokens) for t in pool.texts(each)) for each in "abc"}
        assert max(kept.values()) <= key_tokens
        assert sum(kept.values()) == pool.kept_tokens <= all_tokens


@given(ANSWERS)
def test_no_draft_goes_from_one_answer_into_the_next(
    answers: list[tuple[str, list[int]]],
) -> None:
    pool = AnswerPool()
    for _, answer in answers:
        pool.add("a", answer)
    for _, answer in answers:
        for first, second in pairwise(answer):
            draft = drafted(pool, "a", [first, second], 30)
            assert BREAK not in draft
            shown = [first, second, *draft]
            assert (
                any(
                    other[at : at + 3] == shown[:3]
                    for _, other in answers
                    for at in range(len(other))
                )
                or not draft
            )


def test_the_newest_answers_stay() -> None:
    pool = AnswerPool(key_tokens=40)
    for first in range(0, 300, 10):
        pool.add("a", list(range(first, first + 8)))
    assert drafted(pool, "a", [290, 291]) == [292, 293, 294, 295]
    assert drafted(pool, "a", [0, 1]) == []


def test_the_key_that_was_not_used_for_longest_is_forgotten() -> None:
    pool = AnswerPool(key_tokens=100, all_tokens=30)
    for key in ("first", "second", "first", "third"):
        pool.add(key, [1, 2, 3, 4, 5, 6, 7])
    assert drafted(pool, "second", [1, 2]) == []
    assert drafted(pool, "first", [1, 2]) != []
    assert len(pool) == 2
