"""Which replica: keys stay where they are, nobody gets too much, and equals are equal."""

from __future__ import annotations

from collections import Counter
from itertools import islice

import pytest
from hypothesis import given
from hypothesis import strategies as st

from headrace.policies.routing import (
    Familiar,
    Ring,
    Routing,
    Wanted,
    bounded,
    key_of,
    least_pending,
    route,
)

KEYS = [key_of("prompt", number) for number in range(4000)]
pendings = st.lists(st.integers(0, 10_000), min_size=1, max_size=12)


def owner(ring: Ring, key: int) -> int:
    return next(ring.after(key))


def test_a_key_is_the_same_in_every_process() -> None:
    assert key_of("a", 1) == 13924241962069754241
    assert key_of("a", "b") != key_of("ab")


def test_every_replica_follows_every_key_once() -> None:
    ring = Ring((4, 7, 9))
    for key in KEYS[:50]:
        assert sorted(ring.after(key)) == [4, 7, 9]


def test_a_replica_that_comes_or_goes_moves_only_its_own_keys() -> None:
    three, four = Ring((0, 1, 2)), Ring((0, 1, 2, 3))
    moved = [key for key in KEYS if owner(three, key) != owner(four, key)]
    assert {owner(four, key) for key in moved} == {3}
    assert len(moved) / len(KEYS) == pytest.approx(1 / 4, abs=0.08)


def test_shares_of_the_ring_are_about_even() -> None:
    ring = Ring(range(8))
    counts = Counter(owner(ring, key) for key in KEYS[:1000])
    assert set(counts) == set(range(8))
    assert max(counts.values()) < 1.6 * 1000 / 8


@given(pending=pendings, key=st.integers(0, 2**64 - 1), tokens=st.integers(1, 5000))
def test_nobody_gets_more_than_the_bound(pending: list[int], key: int, tokens: int) -> None:
    ring = Ring(range(len(pending)), places=8)
    chosen = bounded(ring, key, tokens, pending, 1.25)
    most = 1.25 * (sum(pending) + tokens) / len(pending) + 1
    fits = [
        replica
        for replica in ring.after(key)
        if pending[replica] + tokens <= most - 1 or not pending[replica]
    ]
    if fits:
        assert pending[chosen] + tokens <= most or not pending[chosen]
        # The first after the key that has room: a key does not wander further than it must.
        before = list(islice(ring.after(key), list(ring.after(key)).index(chosen)))
        assert not set(before) & set(fits)
    else:
        assert pending[chosen] == min(pending)


@given(pending=pendings, tie=st.floats(0, 1, exclude_max=True))
def test_the_least_pending_has_the_least(pending: list[int], tie: float) -> None:
    assert pending[least_pending(range(len(pending)), pending, tie)] == min(pending)


def test_ties_are_shared_out() -> None:
    chosen = [least_pending((0, 1, 2), [5, 9, 5], at / 100) for at in range(100)]
    assert Counter(chosen) == {0: 50, 2: 50}


def test_each_routing_goes_by_its_own() -> None:
    ring, pending = Ring((0, 1, 2)), [300, 300, 200]
    wanted = Wanted(tokens=10, prefix=KEYS[0], session=KEYS[1])

    def to(routing: Routing, wanted: Wanted = wanted, turn: int = 0, tie: float = 0.5) -> int:
        return route(routing, wanted, ring=ring, pending=pending, turn=turn, tie=tie)

    assert [to(Routing.ROUND_ROBIN, turn=turn) for turn in range(4)] == [0, 1, 2, 0]
    assert [to(Routing.RANDOM, tie=tie) for tie in (0.0, 0.4, 0.99)] == [0, 1, 2]
    assert to(Routing.LEAST_PENDING) == 2
    assert to(Routing.PREFIX) == owner(ring, KEYS[0])
    assert to(Routing.SESSION) == owner(ring, KEYS[1])
    # Nothing to go by: whoever has least.
    assert to(Routing.PREFIX, Wanted(tokens=10)) == to(Routing.SESSION, Wanted(tokens=10)) == 2


def test_a_prefix_is_familiar_from_its_second_time_on() -> None:
    familiar = Familiar(most=2)
    assert [familiar.known(key) for key in (1, 2, 1, 3, 2, 1)] == [None, None, 1, None, None, None]
