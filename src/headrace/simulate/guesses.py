"""Guesses with a set share of right ones, for engines over the lean runner, which always draws the
same token: so here it is known what is right. Whether and how much is guessed, the engine's own
speculator decides by the simulated times. Knows no sequences.
"""

from __future__ import annotations

from random import Random

from headrace.core.clock import Clock
from headrace.core.drafter import Method
from headrace.core.speculation import Draftable
from headrace.simulate.lean import DRAWN
from headrace.speculate.draft import Draft, model_kind
from headrace.speculate.speculator import TimedSpeculator


class SetShare:
    """A drafter: each token is right with the chance `share`."""

    def __init__(self, share: float, seed: int = 0) -> None:
        self._share = share
        self._random = Random(seed)

    def draft(self, sequence: Draftable, most: int) -> Draft:
        tokens = [DRAWN if self._random.random() < self._share else DRAWN + 1 for _ in range(most)]
        return Draft(tokens, [model_kind(at) for at in range(most)])

    def keep(self, sequence: Draftable) -> None:
        """Nothing: every answer is known."""


def simulated_speculator(share: float, clock: Clock) -> TimedSpeculator:
    return TimedSpeculator(Method.SYNTHETIC, synthetic=SetShare(share), clock=clock)
