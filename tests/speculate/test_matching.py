"""Drafts from text that was seen before, against a search through the whole text."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from headrace.speculate.draft import ALL, FEW, HALF, ONE, match_kind
from headrace.speculate.indexed_text import IndexedText, matching_tokens
from headrace.speculate.matching import LONGEST_MATCH, draft_agreed, draft_last

TOKENS = st.lists(st.integers(0, 3), max_size=40)


def indexed(tokens: list[int]) -> IndexedText:
    text = IndexedText(tokens)
    text.index()
    return text


def matches(tokens: list[int], other: list[int]) -> dict[int, int]:
    """By brute force: each place of `other` that follows two tokens that end `tokens`, and how many
    tokens before it are the same."""
    found = {}
    for place in range(2, len(other)):
        same = 0
        while same < min(place, len(tokens)) and other[place - 1 - same] == tokens[-1 - same]:
            same += 1
        if same >= 2:
            found[place] = min(same, LONGEST_MATCH)
    return found


@given(TOKENS)
def test_every_place_is_found_latest_first(tokens: list[int]) -> None:
    text = indexed(tokens)
    expected = sorted(matches(tokens, tokens), reverse=True) if len(tokens) > 1 else []
    found = list(text.after(tokens[-2], tokens[-1])) if len(tokens) > 1 else []
    assert found == expected


@given(st.lists(TOKENS, max_size=5))
def test_an_index_grows_as_one_made_at_once(parts: list[list[int]]) -> None:
    grown = IndexedText([])
    for part in parts:
        grown.tokens += part
        grown.index()
    at_once = indexed(list(grown.tokens))
    for first in range(4):
        for second in range(4):
            assert list(grown.after(first, second)) == list(at_once.after(first, second))


@given(TOKENS, st.integers(1, 12))
def test_the_last_of_the_longest_matches_is_copied(tokens: list[int], most: int) -> None:
    draft = draft_last(indexed(tokens), most)
    places = matches(tokens, tokens) if len(tokens) > 1 else {}
    near = dict(sorted(places.items(), reverse=True)[:8])
    if not near:
        assert not draft.tokens
        return
    kinds = {place: match_kind(same, ONE) for place, same in near.items()}
    place = max(near, key=lambda at: (kinds[at], at))
    repeated = tokens + draft.tokens
    assert draft.tokens == repeated[place : place + most]  # the text goes on repeating itself
    assert len(draft) == most == len(draft.kinds)


@given(TOKENS, st.lists(TOKENS, max_size=3), st.integers(1, 12))
def test_a_draft_was_seen_after_the_same_tokens(
    tokens: list[int], others: list[list[int]], most: int
) -> None:
    draft = draft_agreed(indexed(tokens), [indexed(other) for other in others], most)
    assert len(draft.tokens) == len(draft.kinds) <= most
    for count in range(1, len(draft) + 1):
        wanted = tokens[-2:] + draft.tokens[:count]
        texts = [tokens + draft.tokens[: count - 1], *others]
        assert any(
            text[at : at + len(wanted)] == wanted
            for text in texts
            for at in range(len(text) - len(wanted) + 1)
        )


@given(TOKENS, st.lists(TOKENS, max_size=3))
def test_a_longer_match_is_never_passed_over(tokens: list[int], others: list[list[int]]) -> None:
    draft = draft_agreed(indexed(tokens), [indexed(other) for other in others], 1)
    if len(tokens) < 2:
        assert not draft.tokens
        return
    best = max(
        (
            same
            for other in [tokens, *others]
            for same in dict(sorted(matches(tokens, other).items(), reverse=True)[:8]).values()
        ),
        default=0,
    )
    assert bool(draft.tokens) == bool(best)
    if best:
        assert draft.kinds[0] // 4 == match_kind(best, ONE) // 4


def test_places_vote_and_the_kind_says_how_they_agree() -> None:
    halves = [indexed([1, 2, at, 0]) for at in (5, 6, 6)]
    most = draft_agreed(indexed([1, 2]), halves, 1)
    assert (most.tokens, most.kinds) == ([6], [match_kind(2, HALF)])
    agreed = draft_agreed(indexed([1, 2]), [indexed([1, 2, 5, 0]), indexed([1, 2, 5, 0])], 1)
    assert agreed.tokens == [5]
    assert agreed.kinds == [match_kind(2, ALL)]
    split = draft_agreed(indexed([1, 2]), [indexed([1, 2, at, 0]) for at in (5, 6, 7)], 1)
    assert split.kinds == [match_kind(2, FEW)]


def test_a_match_is_longer_with_every_token_of_a_draft() -> None:
    tokens = list(range(20, 60))
    draft = draft_last(indexed(tokens + tokens[:2]), 12)
    assert draft.tokens == tokens[2:14]
    assert draft.kinds == [match_kind(2 + at, ONE) for at in range(12)]


def test_matching_tokens_stops_at_either_beginning() -> None:
    assert matching_tokens([1, 2, 3], 3, [9, 1, 2, 3], 4, 99) == 3
    assert matching_tokens([1, 2, 3], 3, [3], 1, 99) == 1
    assert matching_tokens([1, 2, 3], 3, [1, 2, 3], 3, 2) == 2
