"""The pool of KV blocks: which are free, which are held by whom, which wait to be used again.

    free      holds nothing anyone wants
    used      held by one sequence or more (references > 0)
    cached    held by none, but its content is known by hash: the prefix cache, evicted LRU

Numbers only: the memory behind a block is a runner's, and what a hash stands for is prefix.py's.
"""

from __future__ import annotations

from collections import Counter, OrderedDict
from collections.abc import Iterable

EVICTED_REMEMBERED = 4  # times the pool: hashes of evicted blocks, to tell why a prefix missed


class BlockPool:
    def __init__(self, total_blocks: int, block_tokens: int) -> None:
        self.total_blocks = total_blocks
        self.block_tokens = block_tokens
        self._free = list(range(total_blocks - 1, -1, -1))
        self._references = [0] * total_blocks
        self._cached: OrderedDict[int, None] = OrderedDict()  # oldest first
        self._hash_of: dict[int, bytes] = {}
        self._block_of: dict[bytes, int] = {}
        self._evicted: OrderedDict[bytes, None] = OrderedDict()

    @property
    def free_blocks(self) -> int:
        return len(self._free)

    @property
    def cached_blocks(self) -> int:
        return len(self._cached)

    @property
    def used_blocks(self) -> int:
        return self.total_blocks - len(self._free) - len(self._cached)

    @property
    def available_blocks(self) -> int:
        """What can be taken: free ones, and cached ones at the cost of their content."""
        return len(self._free) + len(self._cached)

    def blocks_for(self, tokens: int) -> int:
        return -(-tokens // self.block_tokens)

    def take(self) -> int:
        """A block of one's own; the least recently used content goes if none is free."""
        if self._free:
            block = self._free.pop()
        else:
            block, _ = self._cached.popitem(last=False)
            self._forget(block)
        self._references[block] = 1
        return block

    def share(self, block: int) -> None:
        """Hold a block that is held or cached already."""
        if self._references[block] == 0:
            del self._cached[block]
        self._references[block] += 1

    def is_cached(self, block: int) -> bool:
        return self._references[block] == 0

    def is_writable(self, block: int) -> bool:
        """Whether its only holder may write to it: nobody else sees it, now or by its hash."""
        return self._references[block] == 1 and block not in self._hash_of

    def give_back(self, blocks: Iterable[int]) -> None:
        """In a sequence's order; its last blocks will be evicted before its first ones."""
        for block in reversed(list(blocks)):
            self._references[block] -= 1
            if self._references[block] == 0:
                if block in self._hash_of:
                    self._cached[block] = None
                else:
                    self._free.append(block)

    def publish(self, block: int, key: bytes) -> None:
        """Make a full block findable. Content that is there already stays where it is."""
        if key not in self._block_of and block not in self._hash_of:
            self._block_of[key] = block
            self._hash_of[block] = key
            self._evicted.pop(key, None)

    def find(self, key: bytes) -> int | None:
        return self._block_of.get(key)

    def was_evicted(self, key: bytes) -> bool:
        return key in self._evicted

    def _forget(self, block: int) -> None:
        key = self._hash_of.pop(block)
        del self._block_of[key]
        self._evicted[key] = None
        while len(self._evicted) > EVICTED_REMEMBERED * self.total_blocks:
            self._evicted.popitem(last=False)

    def check_integrity(self, tables: Iterable[list[int]]) -> None:
        """Every block is free, cached or held, and held exactly as often as `tables` hold it."""
        held: Counter[int] = Counter()
        for table in tables:
            assert len(set(table)) == len(table), f"a sequence holds a block twice: {table}"
            held.update(table)
        assert held == Counter(
            {block: count for block, count in enumerate(self._references) if count}
        ), "references and tables disagree"
        free, cached = set(self._free), set(self._cached)
        assert len(free) == len(self._free), "a block is free twice"
        twice = free & cached | free & set(held) | cached & set(held)
        assert not twice, f"blocks are two things at once: {twice}"
        assert len(free) + len(cached) + len(held) == self.total_blocks, "blocks are lost"
        assert cached <= set(self._hash_of), "a cached block can't be found"
        assert not free & set(self._hash_of), "a free block can be found"
        assert {b: k for k, b in self._block_of.items()} == self._hash_of, "the index disagrees"
