"""A text of token ids in which the places where two tokens follow each other are found at once.

The list of tokens belongs to somebody else and only grows. Two tokens, not one: a single token is
no evidence. Knows no sequences, and nothing of what comes next.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterator

# Between texts that are kept in one list. No token has this id, so no match goes across it.
BREAK = -1


class IndexedText:
    __slots__ = ("_before", "_indexed", "_last", "tokens")

    def __init__(self, tokens: list[int]) -> None:
        self.tokens = tokens
        self._indexed = 1  # places from 2 up to this one are in the index
        self._last: dict[int, int] = {}  # two tokens as one number -> the last place after them
        # For each place the one before it that follows the same two tokens, or 0.
        self._before = array("i", (0, 0))

    def index(self) -> None:
        """Take in the tokens that were added. The place after all of them is left out: it is where
        one stands, and would always be found."""
        tokens, last, before = self.tokens, self._last, self._before
        for place in range(self._indexed + 1, len(tokens)):
            pair = tokens[place - 2] << 32 | tokens[place - 1]
            before.append(last.get(pair, 0))
            last[pair] = place
        self._indexed = max(self._indexed, len(tokens) - 1)

    def after(self, first: int, second: int) -> Iterator[int]:
        """The indexed places that follow these two tokens, the latest first."""
        place = self._last.get(first << 32 | second, 0)
        while place:
            yield place
            place = self._before[place]


def matching_tokens(a: list[int], a_end: int, b: list[int], b_end: int, most: int) -> int:
    """How many tokens before `a_end` and before `b_end` are the same."""
    limit = min(a_end, b_end, most)
    same = 0
    while same < limit and a[a_end - 1 - same] == b[b_end - 1 - same]:
        same += 1
    return same
