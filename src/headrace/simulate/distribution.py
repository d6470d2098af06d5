"""A made-up next-token distribution: a pure function of the hash of all tokens before it.

The probabilities of the likeliest tokens fall off geometrically, at a rate given by the hash; the
other tokens share the rest evenly. Common draws need no array; all draws follow
`backends/reference/sampling.py`, and the probabilities sum to 1. Knows no blocks and no plans.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np

from headrace.backends.reference.sampling import draw as reference_draw
from headrace.backends.reference.sampling import masked_in
from headrace.core.errors import InvalidRequestError
from headrace.core.step import DrawParams, RowExtra, TopLogprobs

RANKED = 32  # tokens with a probability of their own
_MASK = (1 << 64) - 1
_UNFILTERED = DrawParams(temperature=1.0).filters
_SURE = 1e-6  # with a rate below this the first token is nearly certain

ROOT = 0x243F6A8885A308D3  # the hash of no tokens


def extend(prefix_hash: int, token_id: int) -> int:
    """The hash of a prefix and one more token. One-to-one in each of the two."""
    return (((prefix_hash ^ token_id) * 0x9E3779B97F4A7C15) + 0x7F4A7C15) & _MASK


@dataclass(frozen=True, slots=True)
class Vocabulary:
    size: int
    eos_id: int | None = None  # likely after `eos_rate` of all prefixes, nowhere else
    eos_rate: float = 0.0


class Distribution:
    """Of the token after a prefix. Ranks 0, 1, ... are the likeliest tokens; the others tie."""

    __slots__ = ("_ends", "_first", "_log_fall", "_others", "_ranked", "_stride", "_vocabulary")

    def __init__(self, prefix_hash: int, vocabulary: Vocabulary) -> None:
        x = prefix_hash  # splitmix64's finalizer: every bit of the hash in every bit of x
        x = ((x ^ (x >> 30)) * 0xBF58476D1CE4E5B9) & _MASK
        x = ((x ^ (x >> 27)) * 0x94D049BB133111EB) & _MASK
        x ^= x >> 31
        self._vocabulary = vocabulary
        eos_id = vocabulary.eos_id
        # Tokens but for the end token, renumbered without a gap: first, first + stride, ...
        self._others = vocabulary.size - (eos_id is not None)
        self._ends = False
        if eos_id is not None:
            lottery = ((x * 0x2545F4914F6CDD1D) & _MASK) >> 11
            self._ends = lottery < vocabulary.eos_rate * 2**53
        self._ranked = min(RANKED, self._others)
        self._first = x % self._others
        self._stride = 1 + (x >> 40) % (self._others // self._ranked)
        # Below a half, so that a token without a rank is never likelier than one with.
        self._log_fall = math.log(_SURE if self._ends else 0.2 + 0.25 * ((x >> 11) / 2**53))

    def top(self, count: int) -> TopLogprobs:
        """The likeliest tokens with their logprobs, ties by id; all of them if there are fewer."""
        found = [(token, self._of_rank(rank)) for rank, token in enumerate(self._ranks(count))]
        if len(found) < count and (rest := self._rest()):
            logprob = self.logprob(rest[0])
            found += [(token, logprob) for token in rest[: count - len(found)]]
        return found

    def logprob(self, token_id: int) -> float:
        ends, eos_id = self._ends, self._vocabulary.eos_id
        if token_id == eos_id:
            if ends:
                return self._of_rank(0)
        else:
            number = token_id - (eos_id is not None and token_id > eos_id)
            rank, off = divmod((number - self._first) % self._others, self._stride)
            if not off and rank < self._ranked:
                return self._of_rank(rank + ends)
        return self._of_others()

    def draw(self, params: DrawParams, uniform: float, extra: RowExtra) -> int | None:
        """A token, or None if no token is left to draw."""
        adjusts = params.penalizes or bool(params.bias)
        limits = params.allowed is not None or extra.adjusts
        if not adjusts and params.temperature == 0:
            if limits:
                return self._likeliest(params, extra)
            return self._vocabulary.eos_id if self._ends else self._token(self._first)
        if not adjusts and not limits and params.filters == _UNFILTERED:
            return self._drawn(uniform)
        return self._drawn_by_reference(params, uniform, extra)

    def _token(self, number: int) -> int:
        eos_id = self._vocabulary.eos_id
        return number + (eos_id is not None and number >= eos_id)

    def _ranks(self, count: int) -> list[int]:
        """The first `count` tokens that have a rank."""
        ranks = (
            [self._vocabulary.eos_id] if self._ends and self._vocabulary.eos_id is not None else []
        )
        others = min(count - len(ranks), self._ranked)
        number = self._first
        for _ in range(others):
            ranks.append(self._token(number))
            number = (number + self._stride) % self._others
        return ranks

    def _rest(self) -> list[int]:
        """Tokens without a rank, by id."""
        ranked = set(self._ranks(self._vocabulary.size))
        return [token for token in range(self._vocabulary.size) if token not in ranked]

    def _of_rank(self, rank: int) -> float:
        """log((1 - fall) * fall ** rank), over the sum of all ranks where nothing is without."""
        fall = math.exp(self._log_fall)
        ranks = self._ranked + self._ends
        whole = math.log1p(-(fall**ranks)) if ranks == self._vocabulary.size else 0.0
        return math.log1p(-fall) + rank * self._log_fall - whole

    def _of_others(self) -> float:
        """The logprob of each token without a rank, where there are any."""
        ranks = self._ranked + self._ends
        return ranks * self._log_fall - math.log(self._vocabulary.size - ranks)

    def _likeliest(self, params: DrawParams, extra: RowExtra) -> int | None:
        for token in self._ranks(self._vocabulary.size):
            if _may(token, params, extra):
                return token
        for token in self._candidates(params, extra):
            if _may(token, params, extra):
                return token
        return None

    def _candidates(self, params: DrawParams, extra: RowExtra) -> Iterable[int]:
        """A superset of the tokens that may be drawn, by id."""
        if params.allowed is not None:
            return sorted(params.allowed)
        if extra.mask is not None:  # most masks leave few
            found: list[int] = np.flatnonzero(masked_in(extra.mask, self._vocabulary.size)).tolist()
            return found
        return range(self._vocabulary.size)

    def _drawn(self, uniform: float) -> int:
        """The inverse of the running sum in order of id: few tokens have a probability of their
        own, and between two of these it rises evenly."""
        ranks = self._ranks(self._vocabulary.size)
        without = self._vocabulary.size - len(ranks)
        each = math.exp(len(ranks) * self._log_fall) / without if without else 0.0
        running, next_id, last = 0.0, 0, 0
        for token, rank in sorted((token, rank) for rank, token in enumerate(ranks)):
            between = token - next_id
            if running + between * each > uniform:
                return next_id + min(int((uniform - running) / each), between - 1)
            running += between * each + math.exp(self._of_rank(rank))
            if running > uniform:
                return token
            next_id, last = token + 1, token
        left = self._vocabulary.size - next_id
        if not left:
            return last
        return next_id + min(int((uniform - running) / each), left - 1)

    def _drawn_by_reference(
        self, params: DrawParams, uniform: float, extra: RowExtra
    ) -> int | None:
        ranks = self._ranks(self._vocabulary.size)
        has_others = len(ranks) < self._vocabulary.size
        logits = np.full(self._vocabulary.size, self._of_others() if has_others else -np.inf)
        logits[ranks] = [self._of_rank(rank) for rank in range(len(ranks))]
        try:
            return reference_draw(logits, params, uniform, extra)[0]
        except InvalidRequestError:
            return None


def _may(token: int, params: DrawParams, extra: RowExtra) -> bool:
    if extra.mask is not None:
        at = token >> 3
        if at >= len(extra.mask) or not extra.mask[at] >> (token & 7) & 1:
            return False
    return token not in extra.banned and (params.allowed is None or token in params.allowed)
