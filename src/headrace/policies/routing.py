"""Which replica a request goes to: functions of values, for a router and for the simulator.

A router counts the tokens that it has sent to each replica and that are not done (`pending`), at
the moment of sending: a replica's own report would be late by a heartbeat, and a burst would go to
one replica. Of a prompt that is what must be computed, until the answer's first byte. Randomness
comes in as a number, so that the same inputs give the same choice. Knows no network, no clock and
no tokens, only hashes.

Prefixes go by cost (`cheapest`): what is pending at a replica, and what of the prompt it would have
to compute because its cache does not have it. Sessions go by consistent hashing with bounded loads
(Mirrokni, Thorup, Zadimoghaddam, 2016): a key has a place on a ring, and goes to the first replica
after it that is not too full; when a replica comes or goes, only its own keys move.
docs/decisions/0021 says why prefixes do not go by the ring.
"""

from __future__ import annotations

import hashlib
import math
from bisect import bisect_right
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Protocol

from headrace.policies.prefixes import Caches, Prefixes

PLACES = 64  # of each replica on the ring: more places, more even shares
BOUND = 1.25  # a replica may have this many times the mean
DEPTH = 3  # requests of one size that a replica may have, whatever the mean is
# A prompt token that must be computed, in pending tokens. More than 1: it delays everybody who
# comes later, and it takes another prompt's place in the cache. A token of an answer takes a step,
# which it shares with others. Of a prompt that is cached some is counted, or everybody who asks for
# the same would go to one replica. Found with the simulator (docs/decisions/0023).
MISS = 2.0
ANSWER = 2
CACHED = 0.1
HOME = 3  # the length, counted from 0, whose key decides where an unknown beginning goes


class Routing(StrEnum):
    ROUND_ROBIN = "round-robin"
    RANDOM = "random"
    LEAST_PENDING = "least-pending"  # the fewest pending tokens; ties at random
    PREFIX = "prefix"  # to where it costs least, of what is pending and what is not cached
    SESSION = "session"  # to where the session was, within bounds


class Pending(Protocol):
    """Pending tokens by replica number: a list or a dict."""

    def __getitem__(self, replica: int, /) -> int: ...


@dataclass(frozen=True, slots=True, kw_only=True)
class Wanted:
    """A request, as far as its way matters."""

    prompt_tokens: int
    answer_tokens: int = 0  # about
    prefixes: Prefixes = ()  # beginnings of its prompt
    session: int | None = None  # hash of the session's name

    @property
    def tokens(self) -> int:
        """That a cache will hold of it."""
        return self.prompt_tokens + self.answer_tokens

    def counted(self, held_tokens: int = 0) -> Counted:
        """As it is counted at a replica whose cache has so much of its prompt."""
        return Counted(
            prompt=self.prompt_tokens - held_tokens + int(CACHED * held_tokens),
            answer=ANSWER * self.answer_tokens,
        )


@dataclass(slots=True, kw_only=True)
class Counted:
    """What a request that was sent is of its replica's pending tokens."""

    prompt: int
    answer: int

    @property
    def tokens(self) -> int:
        return self.prompt + self.answer

    def begin(self) -> int:
        """With the answer's first byte the prompt is done. Returns what is not pending any more."""
        done, self.prompt = self.prompt, 0
        return done


def key_of(*parts: object) -> int:
    """A hash of 64 bits: the same in every process."""
    text = "\x1f".join(map(str, parts)).encode()
    return int.from_bytes(hashlib.blake2b(text, digest_size=8).digest(), "little")


class Ring:
    """The places of replicas. Unchanging: a fleet that changes makes a new one."""

    def __init__(self, replicas: Sequence[int], places: int = PLACES) -> None:
        points = sorted(
            (key_of("replica", replica, place), replica)
            for replica in replicas
            for place in range(places)
        )
        self.replicas = tuple(replicas)
        self.members = frozenset(replicas)
        self._places = [place for place, _ in points]
        self._owners = [owner for _, owner in points]

    def after(self, key: int) -> Iterator[int]:
        """All replicas, each once, in the order in which they follow a key."""
        first, count = bisect_right(self._places, key), len(self._owners)
        seen: set[int] = set()
        for at in range(count):
            owner = self._owners[(first + at) % count]
            if owner not in seen:
                seen.add(owner)
                yield owner


class Rings:
    """One for each set of replicas that takes requests: making a ring costs more than a choice."""

    MOST = 64  # of those in use

    def __init__(self) -> None:
        self._made: dict[tuple[int, ...], Ring] = {}

    def of(self, replicas: tuple[int, ...]) -> Ring:
        ring = self._made.get(replicas)
        if ring is None:
            if len(self._made) >= self.MOST:
                self._made.clear()
            ring = self._made[replicas] = Ring(replicas)
        return ring


def least_pending(replicas: Sequence[int], pending: Pending, tie: float) -> int:
    """`pending` is by replica number. `tie` in [0, 1) decides between equals."""
    least = min(map(pending.__getitem__, replicas))
    equals = [replica for replica in replicas if pending[replica] == least]
    return equals[int(tie * len(equals))]


def bounded(ring: Ring, key: int, tokens: int, pending: Pending, bound: float = BOUND) -> int:
    """The first replica after the key that stays within `bound` times the mean with the request.

    Where there is about one request for each replica, a bound near 1 would forbid to wait for even
    one other, and nothing would stay where it is: `DEPTH` requests of this size may always be
    there, and one that is idle may have any."""
    whole = sum(pending[replica] for replica in ring.replicas) + tokens
    most = max(math.ceil(bound * whole / len(ring.replicas)), DEPTH * tokens)
    fallback = -1
    for replica in ring.after(key):
        if pending[replica] + tokens <= most or not pending[replica]:
            return replica
        if fallback < 0 or pending[replica] < pending[fallback]:
            fallback = replica
    return fallback


def cheapest(
    wanted: Wanted, caches: Caches, ring: Ring, pending: Pending, tie: float, miss: float = MISS
) -> int:
    """The replica with the least of pending tokens and `miss` times the tokens of the prompt that
    it would have to compute.

    Nobody has a beginning that nobody was sent: then it is whoever has least pending, and so it is
    where all have it, as a system prompt that everybody shares. A replica that has more of a prompt
    than others is preferred until its queue is longer by `miss` times the difference; then another
    one computes it, and has it too."""
    least = _least(wanted, ring, pending, tie)
    idle = pending[least]
    best, best_cost = (
        least,
        idle + miss * (wanted.prompt_tokens - caches.held_tokens(least, wanted.prefixes)),
    )
    seen: set[int] = set()
    for key, tokens in reversed(wanted.prefixes):
        left = miss * (wanted.prompt_tokens - tokens)
        if idle + left >= best_cost:
            break  # whoever has this much, or less: the one with least pending is not dearer
        for replica in caches.holders(key):
            if replica in seen or replica not in ring.members:
                continue
            seen.add(replica)  # longer beginnings came first
            cost = pending[replica] + left
            if cost < best_cost or (cost == best_cost and replica < best):
                best, best_cost = replica, cost
    return best


def _least(wanted: Wanted, ring: Ring, pending: Pending, tie: float) -> int:
    """Between equals the ring decides, so that several routers, and one that was restarted, send an
    unknown beginning to the same replica while nobody has much to do."""
    if not wanted.prefixes:
        return least_pending(ring.replicas, pending, tie)
    least = min(map(pending.__getitem__, ring.replicas))
    in_order = ring.after(home_key(wanted.prefixes))
    return next(replica for replica in in_order if pending[replica] == least)


def home_key(prefixes: Prefixes) -> int:
    """Of a beginning, one at least, that is not so short that everybody has it."""
    return prefixes[min(HOME, len(prefixes) - 1)][0]


def route(
    routing: Routing,
    wanted: Wanted,
    *,
    ring: Ring,
    pending: Pending,
    caches: Caches,
    turn: int,
    tie: float,
    bound: float = BOUND,
) -> int:
    """The replica for a request. `ring` has those that take requests, at least one; `turn` counts
    requests; `tie` is a random number in [0, 1)."""
    replicas = ring.replicas
    if routing is Routing.ROUND_ROBIN:
        return replicas[turn % len(replicas)]
    if routing is Routing.RANDOM:
        return replicas[int(tie * len(replicas))]
    if routing is Routing.PREFIX:
        return cheapest(wanted, caches, ring, pending, tie)
    if routing is Routing.SESSION and wanted.session is not None:
        return bounded(ring, wanted.session, wanted.counted().tokens, pending, bound)
    return least_pending(replicas, pending, tie)
