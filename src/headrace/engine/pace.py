"""Which sequences decode in a step: all that run, unless one tenant's many slow down another's few.

A tenant that is alone gets a token per sequence in the time of a step of its own sequences. When
tenants share the machine, that time may grow by the factor (sum of all weights / its own weight),
and no more. As long as a step with all sequences stays within that limit for every tenant, all
are in it, because part of a step's cost does not depend on the number of sequences. Otherwise the
sequences of the larger tenants take turns. The cost of steps is learnt from past steps. Knows
sequences and times; plans nothing and moves no sequence.
"""

from __future__ import annotations

import math
from collections import Counter, defaultdict
from collections.abc import Collection, Mapping

from headrace.engine.sequence import Sequence
from headrace.engine.turns import Turns

SOON_STEPS = 2  # in which a tenant may have been passed over, and still counts as about to decode


class StepLine:
    """The time of a decode-only step as a linear function of the number of sequences, fitted by
    least squares with exponentially fading weights."""

    FADE = 0.97
    GUESSED_SEQUENCES = 8.0  # assumed fixed cost, while steps of only one size were seen

    def __init__(self) -> None:
        self._count = self._n = self._nn = self._t = self._nt = 0.0

    def learn(self, compute_s: float, decoding: int) -> None:
        fade = self.FADE
        self._count = self._count * fade + 1
        self._n = self._n * fade + decoding
        self._nn = self._nn * fade + decoding * decoding
        self._t = self._t * fade + compute_s
        self._nt = self._nt * fade + decoding * compute_s

    def fixed_share(self) -> float:
        """The fixed cost of a step, as the number of sequences that cost as much."""
        if not self._count:
            return self.GUESSED_SEQUENCES
        n, t = self._n / self._count, self._t / self._count
        spread = self._nn / self._count - n * n
        if spread < (0.1 * n) ** 2:
            return self.GUESSED_SEQUENCES
        slope = (self._nt / self._count - n * t) / spread
        if slope <= 0 or slope * n >= t:  # one of the two costs is zero, or noise
            return 0.0 if slope > 0 else math.inf
        return (t - slope * n) / slope


class Pace:
    def __init__(self, turns: Turns) -> None:
        self._turns = turns
        self._line = StepLine()
        self._next: defaultdict[str, int] = defaultdict(int)  # whose turn it is within a tenant

    def learn(self, compute_s: float, decoding: int, prompt_tokens: int) -> None:
        if decoding and not prompt_tokens:
            self._line.learn(compute_s, decoding)

    def choose(self, running: Collection[Sequence]) -> list[Sequence]:
        """The sequences that may be in the next step, in the given order."""
        if not self._turns.is_shared:
            return list(running)
        decoding: defaultdict[str, list[Sequence]] = defaultdict(list)
        for sequence in running:
            if sequence.scheduled_tokens >= sequence.prompt_tokens:
                decoding[sequence.request.tenant].append(sequence)
        counts = {tenant: len(some) for tenant, some in decoding.items()}
        counts |= dict.fromkeys(self._about_to(counts), 1)
        allowed = share_out(
            counts,
            {tenant: self._turns.of(tenant).weight for tenant in counts},
            self._line.fixed_share(),
        )
        resting: set[int] = set()
        for tenant, most in allowed.items():
            some = decoding.get(tenant, [])
            if most < len(some):
                first = self._next[tenant] % len(some)
                self._next[tenant] = first + most
                resting.update(
                    some[(first + most + at) % len(some)].sequence_id
                    for at in range(len(some) - most)
                )
        if not resting:
            return list(running)
        return [sequence for sequence in running if sequence.sequence_id not in resting]

    def room_for_guesses(self, decoding: Counter[str]) -> dict[str, int] | None:
        """How many guesses of each tenant may join a step with so many decoding sequences of each;
        None for any number. They may not slow down others more than sequences may."""
        if not self._turns.is_shared or len(decoding) < 2:
            return None
        weights = {tenant: self._turns.of(tenant).weight for tenant in decoding}
        fixed = self._line.fixed_share()
        if fixed == math.inf:
            return None
        spare = max(0.0, _most_rows(decoding, weights, fixed) - decoding.total())
        whole = sum(weights.values())
        return {tenant: int(spare * weight / whole) for tenant, weight in weights.items()}

    def _about_to(self, counts: Mapping[str, int]) -> list[str]:
        """Tenants that do not decode yet but soon will: their first token should not wait longer
        than the following ones. Without those that wait for other tenants' turns, or for a slot."""
        least = min((self._turns.of(tenant).had for tenant in counts), default=0.0)
        return [
            turn.tenant
            for turn in self._turns.active
            if turn.tenant not in counts
            and (turn.running or (turn.passed_over <= SOON_STEPS and turn.had <= least))
        ]


def share_out(
    counts: Mapping[str, int], weights: Mapping[str, int], fixed: float
) -> dict[str, int]:
    """How many of each tenant's sequences may be in a step. `fixed` is the fixed cost of a step, as
    a number of sequences."""
    left_weight = sum(weights.values())
    # Where sequences cost nothing beside the fixed part, nobody slows down anybody.
    if len(counts) < 2 or fixed == math.inf:
        return dict(counts)
    most = _most_rows(counts, weights, fixed)
    if sum(counts.values()) <= most:
        return dict(counts)
    allowed: dict[str, int] = {}
    for tenant in sorted(counts, key=lambda each: counts[each] / weights[each]):
        # What smaller tenants leave unused goes to larger ones.
        share = int(most * weights[tenant] / left_weight + 1e-9)
        allowed[tenant] = min(counts[tenant], max(1, share))
        most -= allowed[tenant]
        left_weight -= weights[tenant]
    return allowed


def _most_rows(counts: Mapping[str, int], weights: Mapping[str, int], fixed: float) -> float:
    """The size of a step, in rows, that slows down no tenant more than sharing allows."""
    whole = sum(weights.values())
    return min((fixed + n) * whole / weights[tenant] for tenant, n in counts.items()) - fixed
