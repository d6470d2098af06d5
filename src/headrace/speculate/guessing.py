"""What is guessed for one sequence: its indexed text, the tokens hoped for, how past hopes did.

A hope is a draft from a certain place on. It stays as long as the sequence's tokens agree with it,
whether the engine was told to check them or not: so chances are learnt also while guesses do not
pay, and what is left of a long draft need not be looked up again. Knows no time.
"""

from __future__ import annotations

from collections.abc import Sequence

from headrace.core.speculation import Draftable
from headrace.speculate.chances import KindChances, OwnChances, gains
from headrace.speculate.draft import FORCED, Draft
from headrace.speculate.indexed_text import IndexedText


class Guessing:
    __slots__ = ("_at", "_hope", "_seen", "own", "text")

    def __init__(self, sequence: Draftable) -> None:
        self.text = IndexedText(sequence.token_ids)
        self.own = OwnChances()
        self._hope = Draft()
        self._at = 0  # of the hope, the first token that is not known yet
        self._seen = len(sequence.token_ids)

    @property
    def hoped_tokens(self) -> int:
        """How much of the hope is left."""
        return len(self._hope) - self._at

    def catch_up(self, all_: KindChances) -> None:
        """Compare the hope with the tokens that became known, and learn from it."""
        tokens, seen = self.text.tokens, self._seen
        self._seen = len(tokens)
        hope, at = self._hope, self._at
        while seen < len(tokens) and at < len(hope.tokens):
            kind = hope.kinds[at]
            is_right = hope.tokens[at] == tokens[seen]
            self.own.learn(all_.chance(kind), is_right)
            all_.learn(kind, is_right)
            if not is_right:
                self.hope_for(Draft())
                return
            seen, at = seen + 1, at + 1
        self._at = at

    def hope_for(self, draft: Draft) -> None:
        self._hope, self._at = draft, 0

    def hope_for_forced(self, forced: Sequence[int], most: int) -> None:
        """What a grammar forces is hoped for before anything else."""
        tokens = list(forced[:most])
        self.hope_for(Draft(tokens, [FORCED] * len(tokens)))

    def gains(self, all_: KindChances, most: int, least: float) -> list[float]:
        kinds = self._hope.kinds[self._at : self._at + most]
        return gains(kinds, all_, self.own, least)

    def next_tokens(self, count: int) -> list[int]:
        return self._hope.tokens[self._at : self._at + count]
