"""Which replica: keys stay where they are, nobody gets too much, and equals are equal."""

from __future__ import annotations

from collections import Counter
from itertools import islice

import pytest
from hypothesis import given
from hypothesis import strategies as st

from headrace.policies.prefixes import Caches, Prefixes
from headrace.policies.routing import (
    ANSWER,
    CACHED,
    DEPTH,
    MISS,
    Ring,
    Rings,
    Routing,
    Wanted,
    bounded,
    cheapest,
    key_of,
    least_pending,
    route,
)

KEYS = [key_of("prompt", number) for number in range(4000)]
SMALL = Wanted(prompt_tokens=10)
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
    most = max(1.25 * (sum(pending) + tokens) / len(pending), DEPTH * tokens) + 1
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
    prefixes = ((KEYS[0], 64), (KEYS[2], 128))
    wanted = Wanted(prompt_tokens=190, answer_tokens=10, prefixes=prefixes, session=KEYS[1])
    caches = Caches()
    caches.sent(1, prefixes[:1], 100)

    def to(routing: Routing, wanted: Wanted = wanted, turn: int = 0, tie: float = 0.5) -> int:
        return route(routing, wanted, ring=ring, pending=pending, caches=caches, turn=turn, tie=tie)

    assert [to(Routing.ROUND_ROBIN, turn=turn) for turn in range(4)] == [0, 1, 2, 0]
    assert [to(Routing.RANDOM, tie=tie) for tie in (0.0, 0.4, 0.99)] == [0, 1, 2]
    assert to(Routing.LEAST_PENDING) == 2
    assert to(Routing.PREFIX) == 1
    assert to(Routing.SESSION) == owner(ring, KEYS[1])
    # Nothing to go by: whoever has least.
    assert to(Routing.PREFIX, SMALL) == to(Routing.SESSION, SMALL) == 2


def test_what_a_request_counts() -> None:
    """Of its prompt what must be computed, and some of the rest, until the answer begins."""
    wanted = Wanted(prompt_tokens=100, answer_tokens=10)
    assert wanted.tokens == 110
    for held, prompt in ((0, 100), (60, 40 + 60 * CACHED), (100, 100 * CACHED)):
        counted = wanted.counted(held)
        assert counted.tokens == prompt + 10 * ANSWER
        assert counted.begin() == prompt
        assert counted.tokens == 10 * ANSWER
        assert counted.begin() == 0
    assert ANSWER > 1 > CACHED > 0


def test_a_ring_is_made_once_for_a_set_of_replicas_and_not_kept_for_ever() -> None:
    rings = Rings()
    first = rings.of((1, 2))
    assert rings.of((1, 2)) is first
    for number in range(Rings.MOST + 1):
        assert rings.of((number, 1000)).replicas == (number, 1000)
    assert rings.of((1, 2)) is not first


def beginnings(*names: str, tokens: int = 64) -> Prefixes:
    return tuple((key_of(*names[: at + 1]), tokens * (at + 1)) for at in range(len(names)))


def asks(*names: str, tokens: int = 64) -> Wanted:
    """A prompt of such parts, and an answer of 20 tokens."""
    whole = tokens * len(names)
    prefixes = beginnings(*names, tokens=tokens)
    return Wanted(prompt_tokens=whole, answer_tokens=20, prefixes=prefixes)


@given(
    pending=pendings,
    prompts=st.lists(st.lists(st.sampled_from("ab"), min_size=1, max_size=5), max_size=12),
    places=st.lists(st.integers(0, 11), min_size=12, max_size=12),
    prompt=st.lists(st.sampled_from("ab"), min_size=1, max_size=5),
)
def test_nobody_would_be_cheaper(
    pending: list[int], prompts: list[list[str]], places: list[int], prompt: list[str]
) -> None:
    """Against all replicas, one by one: the search looks only at those that may be better."""
    ring, caches = Ring(range(len(pending)), places=4), Caches()
    for parts, place in zip(prompts, places, strict=False):
        wanted = asks(*parts)
        caches.sent(place, wanted.prefixes, wanted.tokens)  # some to replicas that are gone
    wanted = asks(*prompt)
    costs = [
        pending[each] + MISS * (wanted.prompt_tokens - caches.held_tokens(each, wanted.prefixes))
        for each in ring.replicas
    ]
    assert costs[cheapest(wanted, caches, ring, pending, 0.5)] == min(costs)


def simulated(count: int, prompts: list[Wanted], ends_after: int) -> list[int]:
    """Where prompts go, each of which is over when so many others have come."""
    ring, caches, pending = Ring(range(count)), Caches(), [0] * count
    chosen: list[int] = []
    for number, wanted in enumerate(prompts):
        if number >= ends_after:
            pending[chosen[number - ends_after]] -= prompts[number - ends_after].tokens
        replica = cheapest(wanted, caches, ring, pending, 0.0)
        pending[replica] += wanted.tokens
        caches.sent(replica, wanted.prefixes, wanted.tokens)
        chosen.append(replica)
    return chosen


def test_longer_beginnings_stay_together_behind_a_shared_one() -> None:
    prompts = [asks("system", f"document {n % 8}", f"q{n}", tokens=256) for n in range(800)]
    chosen = simulated(4, prompts, ends_after=8)
    homes = [{chosen[n] for n in range(kind + 400, 800, 8)} for kind in range(8)]
    assert len(set.union(*homes)) == 4
    assert all(len(home) == 1 for home in homes)


def test_a_hot_beginning_gets_as_many_replicas_as_it_needs() -> None:
    prompts = [asks("system", f"q{n}", tokens=256) for n in range(400)]
    counts = Counter(simulated(4, prompts, ends_after=32))
    assert set(counts) == {0, 1, 2, 3}
    assert max(counts.values()) < 1.3 * min(counts.values())
    # One at a time stays where it is.
    assert len(set(simulated(4, prompts, ends_after=1))) == 1


def test_prompts_that_share_nothing_go_as_if_there_were_no_caches() -> None:
    prompts = [asks(f"{n}", f"q{n}", tokens=64 + n % 7) for n in range(200)]
    ring, caches, pending = Ring(range(5)), Caches(), [0] * 5
    for wanted in prompts:
        replica = cheapest(wanted, caches, ring, pending, 0.0)
        assert pending[replica] == min(pending)
        pending[replica] += wanted.tokens
        caches.sent(replica, wanted.prefixes, wanted.tokens)


def test_two_routers_that_have_seen_nothing_agree() -> None:
    ring = Ring((3, 5, 8))
    for number in range(50):
        wanted = asks(f"{number}", "more")
        found = {cheapest(wanted, Caches(), ring, {3: 0, 5: 0, 8: 0}, tie) for tie in (0.1, 0.9)}
        assert len(found) == 1
