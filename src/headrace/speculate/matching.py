"""Drafts from text that was seen before: what followed the same tokens earlier may do so again.

`draft_last` takes the last earlier place (prompt lookup). `draft_agreed` looks at several, in the
sequence's own text and in other texts, keeps those with the longest match, and lets them vote on
each token; a token's kind says how long the match is and how they agree, and from that the caller
decides how many tokens are worth trying. Pure functions of texts; nothing is learnt here.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import islice

from headrace.speculate.draft import ALL, FEW, HALF, MATCH_STARTS, ONE, Draft, match_kind
from headrace.speculate.indexed_text import BREAK, IndexedText, matching_tokens

LONGEST_MATCH = MATCH_STARTS[-1]
LOOKED_AT = 8  # earlier places in each text, the latest ones

Place = tuple[list[int], int]  # a list of tokens, and where in it the draft begins


def draft_last(own: IndexedText, most: int) -> Draft:
    """What followed the last earlier place with the longest match, among the latest few."""
    found = _longest(own, (own,))
    if not found[1]:
        return Draft()
    matching, places = found
    return _copied(own.tokens, *places[0], matching, most)


def draft_agreed(own: IndexedText, others: Sequence[IndexedText], most: int) -> Draft:
    """What most of the places with the longest match agree on, token by token."""
    matching, places = _longest(own, (own, *others))
    if not places:
        return Draft()
    if len(places) == 1:
        return _copied(own.tokens, *places[0], matching, most)
    return _voted(own.tokens, places, matching, most)


def _longest(own: IndexedText, texts: Sequence[IndexedText]) -> tuple[int, list[Place]]:
    """The places with the longest match, and its length. Matches of about the same length count as
    equally long: a token more or less is no better evidence."""
    tokens = own.tokens
    end = len(tokens)
    if end < 2:
        return 0, []
    first, second = tokens[-2], tokens[-1]
    best, kind = 0, -1
    places: list[Place] = []
    for text in texts:
        theirs = text.tokens
        for place in islice(text.after(first, second), LOOKED_AT):
            matching = matching_tokens(tokens, end, theirs, place, LONGEST_MATCH)
            this = match_kind(matching, ONE)
            if this > kind:
                best, kind, places = matching, this, [(theirs, place)]
            elif this == kind:
                best = max(best, matching)
                places.append((theirs, place))
    return best, places


def _copied(own: list[int], theirs: list[int], place: int, matching: int, most: int) -> Draft:
    """The tokens from one place on. A text that repeats itself goes on repeating: where its end is
    reached, the draft continues with its own beginning."""
    tokens = theirs[place : place + most]
    if theirs is own:
        period = len(own) - place
        while len(tokens) < most:
            tokens.append(tokens[len(tokens) - period])
    elif BREAK in tokens:
        del tokens[tokens.index(BREAK) :]
    return Draft(tokens, [match_kind(matching + at, ONE) for at in range(len(tokens))])


def _voted(own: list[int], places: list[Place], matching: int, most: int) -> Draft:
    draft = Draft()
    while len(draft) < most and places:
        votes: dict[int, int] = {}
        nexts = [_token_at(own, theirs, place, draft.tokens) for theirs, place in places]
        for token in nexts:
            if token != BREAK:
                votes[token] = votes.get(token, 0) + 1
        if not votes:
            break
        chosen = max(votes, key=votes.__getitem__)  # of equals the first, which is the latest
        kind = _agreement(votes[chosen], len(places))
        draft.kinds.append(match_kind(matching + len(draft), kind))
        draft.tokens.append(chosen)
        places = [
            (theirs, place + 1)
            for (theirs, place), token in zip(places, nexts, strict=True)
            if token == chosen
        ]
    return draft


def _token_at(own: list[int], theirs: list[int], place: int, drafted: list[int]) -> int:
    if place < len(theirs):
        return theirs[place]
    return drafted[place - len(theirs)] if theirs is own else BREAK


def _agreement(votes: int, of: int) -> int:
    if of == 1:
        return ONE
    if votes == of:
        return ALL
    return HALF if 2 * votes >= of else FEW
