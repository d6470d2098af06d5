"""Counts computed tokens that slow clients have not read yet.

A stream whose client does not read leaves its tokens waiting while the engine goes on. Where all of
these exceed a bound, the stream with the most is to be ended. Only counts; knows nothing of streams
and tokens.
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
        """The stream to be ended, if the bound is exceeded."""
        self._of[owner] = self._of.get(owner, 0) + entries
        self.total += entries
        if self.total <= self.most:
            return None
        return max(self._of, key=self._of.__getitem__)

    def taken(self, owner: Hashable) -> None:
        """Removes everything that was counted for it."""
        self.total -= self._of.pop(owner, 0)
