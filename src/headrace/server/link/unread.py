"""Tokens that the engine has given and nobody has taken: what clients that read slowly cost.

A stream whose client does not read is not asked for its tokens, and the engine goes on. Where all
that waits is more than a bound, the stream that has most of it is to be ended. Counts; knows
nothing of streams and tokens.
"""

from __future__ import annotations

from collections.abc import Hashable

MOST = 1 << 20  # tokens and alternatives, of about 100 bytes each


class Unread:
    def __init__(self, most: int = MOST) -> None:
        self.most = most
        self.total = 0
        self._of: dict[Hashable, int] = {}

    def add(self, owner: Hashable, entries: int) -> Hashable | None:
        """Who is to be ended, if it is too much."""
        self._of[owner] = self._of.get(owner, 0) + entries
        self.total += entries
        if self.total <= self.most:
            return None
        return max(self._of, key=self._of.__getitem__)

    def taken(self, owner: Hashable) -> None:
        """All that it had."""
        self.total -= self._of.pop(owner, 0)
