"""Who decodes in a step: all that run, unless one tenant's many would hold up another's few.

Alone, a tenant would have tokens in the time of a step of its own sequences. Sharing the machine by
weight, that may take so many times as long as the weights of all are to its own, and no longer. As
long as a step of everybody keeps that, everybody is in it: part of what a step costs is the same
for one sequence as for many. Where it does not, those of a larger crowd take turns with each other.
What steps cost is learnt from steps. Knows sequences and times; plans nothing and moves nobody.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Mapping

from headrace.engine.sequence import Sequence
from headrace.engine.turns import Turns

SOON_STEPS = 2  # that a tenant was passed over


class StepLine:
    """The time of a step that only decodes, as a line over how many decode: a fading fit."""

    FADE = 0.97
    GUESSED_SEQUENCES = 8.0  # whose cost the fixed part is, while only one size was seen

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
        """The fixed part, in sequences: how many more would cost as much as it."""
        if not self._count:
            return self.GUESSED_SEQUENCES
        n, t = self._n / self._count, self._t / self._count
        spread = self._nn / self._count - n * n
        if spread < (0.1 * n) ** 2:
            return self.GUESSED_SEQUENCES
        slope = (self._nt / self._count - n * t) / spread
        if slope <= 0 or slope * n >= t:  # more cost nothing, or nothing is fixed, or noise
            return 0.0 if slope > 0 else float("inf")
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
        """Those that may be in the next step, in their order."""
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

    def _about_to(self, counts: Mapping[str, int]) -> list[str]:
        """Tenants that do not decode yet and soon will: a first token is to wait no longer than the
        next one. Not those that have to wait for others' turns, or for a place."""
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
    """How many of each tenant's sequences may be in a step. `fixed` is what a step costs before the
    first, in sequences."""
    left_weight = sum(weights.values())
    if len(counts) < 2:
        return dict(counts)
    most = min((fixed + n) * left_weight / weights[tenant] for tenant, n in counts.items()) - fixed
    if sum(counts.values()) <= most:
        return dict(counts)
    allowed: dict[str, int] = {}
    for tenant in sorted(counts, key=lambda each: counts[each] / weights[each]):
        # What is left over by those who have few is for those who have more.
        share = int(most * weights[tenant] / left_weight + 1e-9)
        allowed[tenant] = min(counts[tenant], max(1, share))
        most -= allowed[tenant]
        left_weight -= weights[tenant]
    return allowed
