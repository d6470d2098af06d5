"""What each replica's prefix cache is believed to hold, from what was sent to it.

A prompt's beginnings are hashed at lengths that grow by a quarter (`next_length`), so that prompts
which part early and prompts which part late are both told apart with a few dozen keys. For each
replica the beginnings are kept in the order of their last use, up to the tokens that its cache has
room for: that is how the caches themselves forget. Beliefs may be wrong (a replica was restarted,
another router sent it something); then a prompt is computed once more, and the belief is right.

Knows hashes and lengths; no text, no network and no clock.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterator, Set

FIRST_TOKENS = 64  # the shortest beginning that is told apart
UNKNOWN_CACHE_TOKENS = 1 << 18  # where a replica does not say how much its cache has room for

Prefixes = tuple[tuple[int, int], ...]  # (key, tokens) of each beginning, the shortest first


def next_length(tokens: int) -> int:
    """The length after this one: from 0 on, all at which beginnings are hashed."""
    return tokens + max(FIRST_TOKENS, tokens // 4)


def lengths(tokens: int) -> Iterator[int]:
    """Those of a prompt."""
    length = next_length(0)
    while length <= tokens:
        yield length
        length = next_length(length)


class Caches:
    def __init__(self, tokens: int = UNKNOWN_CACHE_TOKENS) -> None:
        self._usual = tokens
        self._room: dict[int, int] = {}  # tokens, by replica
        self._held: dict[int, OrderedDict[int, int]] = {}  # key: tokens; the oldest first
        self._sums: dict[int, int] = {}
        self._holders: dict[int, set[int]] = {}  # of a beginning
        self._own = 0  # negative keys: of what no other prompt has

    def __len__(self) -> int:
        """Beginnings that somebody is believed to hold."""
        return len(self._holders)

    def holders(self, key: int) -> Set[int]:
        return self._holders.get(key, _NOBODY)

    def held_tokens(self, replica: int, prefixes: Prefixes) -> int:
        """Of a prompt, that the replica need not compute."""
        held = self._held.get(replica)
        if not held:
            return 0
        return next((tokens for key, tokens in reversed(prefixes) if key in held), 0)

    def used_tokens(self, replica: int) -> int:
        return self._sums.get(replica, 0)

    def sent(self, replica: int, prefixes: Prefixes, tokens: int) -> None:
        """A request of so many tokens in all: from now on its replica has them."""
        held = self._held.get(replica)
        if held is None:
            held = self._held[replica] = OrderedDict()
            self._sums[replica] = 0
        room = self._room.get(replica, self._usual)
        longest = prefixes[-1][1] if prefixes else 0
        if tokens > longest:
            self._own -= 1
            held[self._own] = tokens - longest
            self._sums[replica] += tokens - longest
        # The shortest last: a cache forgets a prompt from its end.
        for at in range(len(prefixes) - 1, -1, -1):
            key, length = prefixes[at]
            if key in held:
                held.move_to_end(key)
                continue
            added = length - (prefixes[at - 1][1] if at else 0)
            held[key] = added
            self._sums[replica] += added
            self._holders.setdefault(key, set()).add(replica)
        while self._sums[replica] > room and held:
            key, freed = held.popitem(last=False)
            self._sums[replica] -= freed
            self._let_go(key, replica)

    def set_room(self, replica: int, tokens: int) -> None:
        """What its cache has room for; it is applied with the next request."""
        self._room[replica] = tokens

    def forget(self, replica: int) -> None:
        """It was restarted, or is gone."""
        for key in self._held.pop(replica, ()):
            self._let_go(key, replica)
        self._sums.pop(replica, None)
        self._room.pop(replica, None)

    def _let_go(self, key: int, replica: int) -> None:
        if key < 0:
            return
        holders = self._holders[key]
        holders.discard(replica)
        if not holders:
            del self._holders[key]


_NOBODY: frozenset[int] = frozenset()
