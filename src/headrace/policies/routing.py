"""Which replica a request goes to: functions of values, for a router and for the simulator.

A router counts the tokens that it has sent to each replica and that are not done (`pending`), at
the moment of sending: a replica's own report would be late by a heartbeat, and a burst would go to
one replica. Randomness comes in as a number, so that the same inputs give the same choice. Knows no
network, no clock and no tokens, only hashes of them.

Consistent hashing with bounded loads (Mirrokni, Thorup, Zadimoghaddam, 2016): a key has a place on
a ring, and goes to the first replica after it that is not too full. A key stays with its replica
while that has room, and when a replica comes or goes, only its own keys move.
"""

from __future__ import annotations

import hashlib
import math
from bisect import bisect_right
from collections import OrderedDict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Protocol

PLACES = 64  # of each replica on the ring: more places, more even shares
BOUND = 1.25  # a replica may have this many times the mean
FAMILIAR_KEYS = 100_000


class Routing(StrEnum):
    ROUND_ROBIN = "round-robin"
    RANDOM = "random"
    LEAST_PENDING = "least-pending"  # the fewest pending tokens; ties at random
    PREFIX = "prefix"  # to where the prompt's beginning is cached, within bounds
    SESSION = "session"  # to where the session was, within bounds


class Pending(Protocol):
    """Pending tokens by replica number: a list or a dict."""

    def __getitem__(self, replica: int, /) -> int: ...


@dataclass(frozen=True, slots=True, kw_only=True)
class Wanted:
    """A request, as far as its way matters."""

    tokens: int  # that it will add to its replica's pending ones
    prefix: int | None = None  # hash of the prompt's first tokens; None: not known to be shared
    session: int | None = None  # hash of the session's name


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


def least_pending(replicas: Sequence[int], pending: Pending, tie: float) -> int:
    """`pending` is by replica number. `tie` in [0, 1) decides between equals."""
    least = min(pending[replica] for replica in replicas)
    equals = [replica for replica in replicas if pending[replica] == least]
    return equals[int(tie * len(equals))]


def bounded(ring: Ring, key: int, tokens: int, pending: Pending, bound: float = BOUND) -> int:
    """The first replica after the key that stays within `bound` times the mean with the request."""
    whole = sum(pending[replica] for replica in ring.replicas) + tokens
    most = math.ceil(bound * whole / len(ring.replicas))
    fallback = -1
    for replica in ring.after(key):
        # One that is idle may always have it: a single long prompt is above any mean.
        if pending[replica] + tokens <= most or not pending[replica]:
            return replica
        if fallback < 0 or pending[replica] < pending[fallback]:
            fallback = replica
    return fallback


def route(
    routing: Routing,
    wanted: Wanted,
    *,
    ring: Ring,
    pending: Pending,
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
    key = None
    if routing is Routing.PREFIX:
        key = wanted.prefix
    elif routing is Routing.SESSION:
        key = wanted.session
    if key is None:
        return least_pending(replicas, pending, tie)
    return bounded(ring, key, wanted.tokens, pending, bound)


class Familiar:
    """Keys that came before, as many as it may remember. A prompt whose beginning is new is cached
    nowhere: it should go to whoever has least to do, and not to a place on the ring."""

    def __init__(self, most: int = FAMILIAR_KEYS) -> None:
        self._most = most
        self._keys: OrderedDict[int, None] = OrderedDict()

    def known(self, key: int) -> int | None:
        """The key if it came before, else None. From now on it did."""
        is_known = key in self._keys
        self._keys[key] = None
        self._keys.move_to_end(key)
        if len(self._keys) > self._most:
            self._keys.popitem(last=False)
        return key if is_known else None
