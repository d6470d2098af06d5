"""How likely a drafted token is right, learnt from those that turned out right or wrong.

For each kind of evidence the share of right ones is kept over all sequences, and for each sequence
how its drafts did against that. Both forget: counts fade with every draft that is checked. Only
tokens up to the first wrong one count, because the ones behind it were never put to the test; so a
chance is the chance given that all tokens before were right. Plain numbers, no tokens.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from headrace.speculate.draft import first_chances

FADE = 0.995  # of a kind's counts, with each token of that kind
FIRST_COUNT = 8.0  # so many tokens is the first guess worth
OWN_FADE = 0.9  # of a sequence's counts, with each checked token
OWN_COUNT = 2.0  # so many expected right tokens are all sequences' figures worth, against its own
UNUSED = 0.002  # of the way back to the first guess, with each step in which a kind was not used
MOST = 0.995  # nothing is certain


class KindChances:
    """Over all sequences."""

    def __init__(self) -> None:
        self._firsts = firsts = first_chances()
        self._tried = [FIRST_COUNT] * len(firsts)
        self._right = [FIRST_COUNT * chance for chance in firsts]

    def learn(self, kind: int, is_right: bool) -> None:
        self._tried[kind] = self._tried[kind] * FADE + 1
        self._right[kind] = self._right[kind] * FADE + is_right

    def drift(self, kinds: Iterable[int]) -> None:
        """Nothing was drafted with these kinds of evidence: forget a little of what is known, so
        that it is tried again some day."""
        for kind in kinds:
            self._tried[kind] += UNUSED * (FIRST_COUNT - self._tried[kind])
            first = FIRST_COUNT * self._firsts[kind]
            self._right[kind] += UNUSED * (first - self._right[kind])

    def chance(self, kind: int) -> float:
        return min(MOST, self._right[kind] / self._tried[kind])


class OwnChances:
    """Of one sequence: how much more or less often its drafts are right than all sequences'."""

    __slots__ = ("_expected", "_right")

    def __init__(self) -> None:
        self._expected = self._right = 0.0

    def learn(self, expected: float, is_right: bool) -> None:
        """A drafted token was checked that was right with the chance `expected`."""
        self._expected = self._expected * OWN_FADE + expected
        self._right = self._right * OWN_FADE + is_right

    @property
    def factor(self) -> float:
        return (self._right + OWN_COUNT) / (self._expected + OWN_COUNT)


def gains(kinds: Sequence[int], all_: KindChances, own: OwnChances, least: float) -> list[float]:
    """For each token of a draft the chance that it and all before it are right: what one more row
    is expected to give. Ends where that falls below `least`."""
    factor = own.factor
    together = 1.0
    found: list[float] = []
    for kind in kinds:
        together *= min(MOST, all_.chance(kind) * factor)
        if together < least:
            break
        found.append(together)
    return found
