"""What caches are believed to hold: what was sent to them last, as much as there is room for."""

from __future__ import annotations

from itertools import pairwise

from hypothesis import given
from hypothesis import strategies as st

from headrace.policies.prefixes import Caches, Prefixes, lengths
from headrace.policies.routing import key_of

ROOM = 600


def beginnings(parts: list[str]) -> Prefixes:
    return tuple((key_of(*parts[: at + 1]), 100 * (at + 1)) for at in range(len(parts)))


def test_lengths_grow_by_a_quarter() -> None:
    found = list(lengths(1_000_000))
    assert found[:6] == [64, 128, 192, 256, 320, 400]
    assert len(found) < 45
    assert all(b - a <= max(64, a / 4) for a, b in pairwise(found))
    assert list(lengths(63)) == []


sends = st.lists(
    st.tuples(
        st.integers(0, 2),
        st.lists(st.sampled_from("abc"), min_size=1, max_size=4),
        st.integers(0, 150),
    ),
    max_size=40,
)


@given(sends)
def test_beliefs_are_an_lru_cache_of_each_replica(sent: list[tuple[int, list[str], int]]) -> None:
    caches = Caches(ROOM)
    for replica, parts, own in sent:
        prefixes = beginnings(parts)
        caches.sent(replica, prefixes, prefixes[-1][1] + own)
        assert caches.used_tokens(replica) <= ROOM
        # What was sent last is there, whatever was sent before.
        assert caches.held_tokens(replica, prefixes) == prefixes[-1][1]
    for replica in range(3):
        for _, parts, _ in sent:
            prefixes = beginnings(parts)
            held = caches.held_tokens(replica, prefixes)
            # Ends are forgotten before beginnings: what is held is held from the first token on.
            for key, tokens in prefixes:
                assert (replica in caches.holders(key)) == (tokens <= held)
    for replica in range(3):
        caches.forget(replica)
    assert not len(caches)


def test_the_least_recently_used_goes_first() -> None:
    caches = Caches(300)
    for name in "abc":
        caches.sent(0, beginnings([name]), 100)
    caches.sent(0, beginnings(["a"]), 100)
    caches.sent(0, beginnings(["d"]), 100)
    assert [bool(caches.holders(beginnings([name])[0][0])) for name in "abcd"] == [1, 0, 1, 1]
    caches.set_room(0, 100)
    caches.sent(0, beginnings(["d"]), 100)
    assert len(caches) == 1
