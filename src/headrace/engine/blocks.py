"""The pool of KV blocks: which are free, which are taken. Numbers only; the memory is elsewhere."""

from __future__ import annotations


class BlockPool:
    def __init__(self, total_blocks: int, block_tokens: int) -> None:
        self.total_blocks = total_blocks
        self.block_tokens = block_tokens
        self._free = list(range(total_blocks - 1, -1, -1))

    @property
    def free_blocks(self) -> int:
        return len(self._free)

    def blocks_for(self, tokens: int) -> int:
        return -(-tokens // self.block_tokens)

    def take(self, count: int) -> list[int]:
        if count > len(self._free):
            raise AssertionError(f"{count} blocks taken with {len(self._free)} free")
        return [self._free.pop() for _ in range(count)]

    def give_back(self, blocks: list[int]) -> None:
        self._free += reversed(blocks)
        blocks.clear()
