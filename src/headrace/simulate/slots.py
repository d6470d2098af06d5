"""The simulated KV memory: each slot of each block holds a hash of all tokens up to it.

Read through a block table as attention would, so that a mistake in a table, a copy, a shared
prefix or a recomputation leads to another hash, or to a slot that was not written. Knows no
sequences, and not what tokens mean.
"""

from __future__ import annotations

import struct

from headrace.backends.shared.plan_check import mistaken
from headrace.simulate.distribution import ROOT, extend

UNWRITTEN = -1
_VALUE_BYTES = 8


class Slots:
    def __init__(self, total_blocks: int, block_tokens: int) -> None:
        self.block_tokens = block_tokens
        # By block * block_tokens + place in the block.
        self._hashes = [UNWRITTEN] * (total_blocks * block_tokens)
        self._parents = [UNWRITTEN] * (total_blocks * block_tokens)  # hashes of the slots before

    def prefix(self, table: list[int], tokens: int) -> int:
        """The hash of a table's first tokens, as its last slot has it."""
        if tokens == 0:
            return ROOT
        block, place = divmod(tokens - 1, self.block_tokens)
        found = self._hashes[table[block] * self.block_tokens + place]
        if found == UNWRITTEN:
            raise mistaken(
                f"position {tokens - 1} read from block {table[block]}, place {place}, which "
                "was not written",
                "positions before `start` to be in the blocks",
            )
        return found

    def write(self, table: list[int], start: int, token_ids: list[int]) -> list[int]:
        """Compute tokens into their slots; the hash after each."""
        hashes, parents, size = self._hashes, self._parents, self.block_tokens
        value = self.prefix(table, start)
        written = []
        for position, token in enumerate(token_ids, start):
            slot = table[position // size] * size + position % size
            parents[slot] = value
            value = extend(value, token)
            hashes[slot] = value
            written.append(value)
        return written

    def spoil(self, table: list[int], start: int, count: int) -> None:
        """Mark the slots of a failed computation as unreadable."""
        for position in range(start, start + count):
            slot = table[position // self.block_tokens] * self.block_tokens
            self._hashes[slot + position % self.block_tokens] = UNWRITTEN

    def copy(self, source: int, target: int) -> None:
        size = self.block_tokens
        for values in (self._hashes, self._parents):
            values[target * size : (target + 1) * size] = values[
                source * size : (source + 1) * size
            ]

    @property
    def block_bytes(self) -> int:
        return 2 * _VALUE_BYTES * self.block_tokens

    def content(self, block: int) -> memoryview:
        """A copy of a block, all of whose slots were written."""
        size = self.block_tokens
        own = slice(block * size, (block + 1) * size)
        values = self._hashes[own] + self._parents[own]
        if UNWRITTEN in values:
            raise mistaken(f"block {block} read, which is not full", "a block that was computed")
        return memoryview(struct.pack(f"<{2 * size}Q", *values))

    def put(self, block: int, content: bytes | bytearray | memoryview) -> None:
        size = self.block_tokens
        values = struct.unpack(f"<{2 * size}Q", content)
        self._hashes[block * size : (block + 1) * size] = values[:size]
        self._parents[block * size : (block + 1) * size] = values[size:]

    def check_chain(self, table: list[int], tokens: int) -> None:
        """Every one of a table's first tokens was computed after the one before it."""
        size = self.block_tokens
        hashes = [ROOT]
        parents: list[int] = []
        for block in table[: -(-tokens // size)]:
            hashes += self._hashes[block * size : (block + 1) * size]
            parents += self._parents[block * size : (block + 1) * size]
        if parents[:tokens] == hashes[:tokens] and UNWRITTEN not in hashes[: tokens + 1]:
            return
        for position in range(tokens):
            if parents[position] != hashes[position] or hashes[position + 1] == UNWRITTEN:
                raise mistaken(
                    f"position {position} in block {table[position // size]}, which does not "
                    f"follow position {position - 1}",
                    "a table whose tokens were computed one after the other",
                )
