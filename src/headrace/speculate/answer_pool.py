"""Past answers, kept apart by key, as texts to find matches in.

A key is a request's cache salt, as in the prefix cache: how fast an answer comes may tell what is
in the pool, so nothing is shared between keys. Memory is bounded for each key and for all: a key's
older half is forgotten as a whole when the newer half is full, and the keys that were not used for
longest are forgotten first. Knows no requests and no sequences.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence

from headrace.core.drafter import KEPT_TOKENS
from headrace.speculate.indexed_text import BREAK, IndexedText

KEY_TOKENS = 32_768
ALL_TOKENS = KEPT_TOKENS  # at about 150 bytes each with the index: 40 MB


class _Halves:
    __slots__ = ("newer", "older")

    def __init__(self) -> None:
        self.newer, self.older = IndexedText([]), IndexedText([])

    @property
    def kept_tokens(self) -> int:
        return len(self.newer.tokens) + len(self.older.tokens)


class AnswerPool:
    def __init__(self, key_tokens: int = KEY_TOKENS, all_tokens: int = ALL_TOKENS) -> None:
        self._half_tokens = max(1, key_tokens // 2)
        self._all_tokens = all_tokens
        self._keys: OrderedDict[str, _Halves] = OrderedDict()
        self.kept_tokens = 0  # of all keys

    def __len__(self) -> int:
        """Keys."""
        return len(self._keys)

    def texts(self, key: str) -> tuple[IndexedText, ...]:
        """A key's texts, the newer first; each may grow until the next `add`."""
        halves = self._keys.get(key)
        return () if halves is None else (halves.newer, halves.older)

    def add(self, key: str, answer: Sequence[int]) -> None:
        """Keep an answer; of one that is longer than half of a key's room, its end."""
        answer = answer[-(self._half_tokens - 1) :] if self._half_tokens > 1 else ()
        if len(answer) < 3:  # has no place that follows two tokens
            return
        halves = self._keys.setdefault(key, _Halves())
        self._keys.move_to_end(key)
        before = halves.kept_tokens
        if len(halves.newer.tokens) + len(answer) + 1 > self._half_tokens:
            halves.older, halves.newer = halves.newer, IndexedText([])
        halves.newer.tokens += answer
        halves.newer.tokens.append(BREAK)
        halves.newer.index()
        self.kept_tokens += halves.kept_tokens - before
        while self.kept_tokens > self._all_tokens:
            _, forgotten = self._keys.popitem(last=False)
            self.kept_tokens -= forgotten.kept_tokens
