"""A draft: tokens that may come next, and for each of them the kind of evidence for it.

Kinds are small numbers. How often tokens of a kind turn out right is learnt (chances.py), so a
kind's first value is only where learning starts. Knows no text and no sequences.
"""

from __future__ import annotations

from dataclasses import dataclass, field

# How many tokens before a place are the same as before an earlier place: a kind for each range.
MATCH_STARTS = (2, 3, 4, 6, 9, 16, 32)
# How the earlier places agree on the token: a single place, all of several, half or more, fewer.
ONE, ALL, HALF, FEW = range(4)
_AGREEMENTS = 4
# Where learning starts: about the shares of right tokens in greedy answers of the default model to
# the chats and edits of benchmarks/speculation_workloads.py.
_FIRST = {
    ONE: (0.5, 0.5, 0.6, 0.7, 0.85, 0.93, 0.95),
    ALL: (0.75, 0.8, 0.9, 0.93, 0.96, 0.97, 0.98),
    HALF: (0.4, 0.4, 0.4, 0.4, 0.4, 0.4, 0.4),
    FEW: (0.1, 0.1, 0.1, 0.1, 0.1, 0.1, 0.1),
}

MODEL_PLACES = 8  # of a draft model's tokens, each place is a kind; later ones share the last
_MODEL_CHANCE = 0.6
_FORCED_CHANCE = 0.9  # a grammar may force a text that the model writes with other tokens


def match_kind(matching: int, agreement: int) -> int:
    """The kind of a token that followed `matching` (2 or more) tokens in an earlier place."""
    at = len(MATCH_STARTS) - 1
    while matching < MATCH_STARTS[at] and at:
        at -= 1
    return at * _AGREEMENTS + agreement


def model_kind(place: int) -> int:
    """The kind of a draft model's token, by its place in the draft."""
    return len(MATCH_STARTS) * _AGREEMENTS + min(place, MODEL_PLACES - 1)


FORCED = len(MATCH_STARTS) * _AGREEMENTS + MODEL_PLACES  # by a grammar
KINDS = FORCED + 1


def first_chances() -> list[float]:
    """For each kind, the chance that is assumed before anything was seen."""
    matches = [_FIRST[way][at] for at in range(len(MATCH_STARTS)) for way in range(_AGREEMENTS)]
    return [*matches, *[_MODEL_CHANCE] * MODEL_PLACES, _FORCED_CHANCE]


@dataclass(slots=True)
class Draft:
    tokens: list[int] = field(default_factory=list)
    kinds: list[int] = field(default_factory=list)  # one for each token

    def __len__(self) -> int:
        return len(self.tokens)
