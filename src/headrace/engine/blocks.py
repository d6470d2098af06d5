"""The pool of KV blocks: which are free, used or cached.

    free      its content is not needed
    used      held by one or more sequences (references > 0)
    cached    held by no sequence, but findable by hash: the prefix cache, evicted LRU

Numbers only: a runner has the memory of a block, and prefix.py knows what a hash stands for.
"""

from __future__ import annotations

from collections import Counter, OrderedDict
from collections.abc import Container, Iterable


class BlockPool:
    """Of evicted blocks it keeps `remembered_evictions` hashes for each block of the pool, to
    report why a prefix missed."""

    def __init__(self, total_blocks: int, block_tokens: int, remembered_evictions: int = 4) -> None:
        self.total_blocks = total_blocks
        self._most_evicted = remembered_evictions * total_blocks
        self.block_tokens = block_tokens
        self._free = list(range(total_blocks - 1, -1, -1))
        self._references = [0] * total_blocks
        self._cached: OrderedDict[int, None] = OrderedDict()  # oldest first
        self._hash_of: list[bytes | None] = [None] * total_blocks
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
        """Blocks that can be taken: free ones, and cached ones, which are then evicted."""
        return len(self._free) + len(self._cached)

    def blocks_for(self, tokens: int) -> int:
        return -(-tokens // self.block_tokens)

    def take(self) -> int:
        """A block with one holder. Evicts the least recently used cached block if none is free."""
        if self._free:
            block = self._free.pop()
        else:
            block, _ = self._cached.popitem(last=False)
            self._forget(block)
        self._references[block] = 1
        return block

    def take_outside(self, busy: Container[int]) -> int | None:
        """As `take`, but none of the busy blocks; None if there is no other."""
        for at in range(len(self._free) - 1, -1, -1):
            if self._free[at] not in busy:
                block = self._free.pop(at)
                break
        else:
            oldest = next((block for block in self._cached if block not in busy), None)
            if oldest is None:
                return None
            block = oldest
            del self._cached[block]
            self._forget(block)
        self._references[block] = 1
        return block

    def share(self, block: int) -> None:
        """Add a holder to a block that is used or cached."""
        if self._references[block] == 0:
            del self._cached[block]
        self._references[block] += 1

    def is_cached(self, block: int) -> bool:
        return self._references[block] == 0

    def is_shared(self, block: int) -> bool:
        return self._references[block] > 1

    def is_writable(self, block: int) -> bool:
        """Whether its holder may write to it: there is no other, and it can't be found by hash."""
        return self._references[block] == 1 and self._hash_of[block] is None

    def give_back(self, blocks: Iterable[int]) -> None:
        """Release blocks, given in a sequence's order. Its last blocks are evicted first."""
        for block in reversed(list(blocks)):
            self._references[block] -= 1
            if self._references[block] == 0:
                if self._hash_of[block] is not None:
                    self._cached[block] = None
                else:
                    self._free.append(block)

    def publish(self, block: int, key: bytes) -> bool:
        """Make a full block findable by hash. Does nothing if another block has that content."""
        if key in self._block_of or self._hash_of[block] is not None:
            return False
        self._block_of[key] = block
        self._hash_of[block] = key
        self._evicted.pop(key, None)
        return True

    def find(self, key: bytes) -> int | None:
        return self._block_of.get(key)

    def was_evicted(self, key: bytes) -> bool:
        return key in self._evicted

    def _forget(self, block: int) -> None:
        key, self._hash_of[block] = self._hash_of[block], None
        assert key is not None
        del self._block_of[key]
        if self._most_evicted:
            self._evicted[key] = None
            while len(self._evicted) > self._most_evicted:
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
        assert not twice, f"blocks are in two states at once: {twice}"
        assert len(free) + len(cached) + len(held) == self.total_blocks, "blocks are lost"
        hashes = {block: key for block, key in enumerate(self._hash_of) if key is not None}
        assert cached <= set(hashes), "a cached block can't be found"
        assert not free & set(hashes), "a free block can be found"
        assert {b: k for k, b in self._block_of.items()} == hashes, "the index disagrees"
