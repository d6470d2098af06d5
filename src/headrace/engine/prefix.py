"""Prefixes by hash: a full block's key covers its tokens, all before them, and the salt.

The hash is cryptographic: nobody can make a prompt that finds another prompt's blocks. Counts what
was found and why the rest was not. Knows tokens and the pool's index; not who asks.
"""

from __future__ import annotations

import hashlib
from array import array
from collections import OrderedDict
from dataclasses import dataclass, field
from enum import StrEnum

from headrace.engine.blocks import BlockPool
from headrace.engine.sequence import Sequence

UNSALTED_REMEMBERED = 4  # times the pool


class Miss(StrEnum):
    """Why the first block that was not found was not."""

    TOO_SHORT = "too_short"  # what is left does not fill a block
    NEVER_SEEN = "never_seen"
    EVICTED = "evicted"
    SALT = "salt"  # seen, under another salt


@dataclass(slots=True)
class PrefixStats:
    """In tokens of new requests; recomputation after preemption is not counted."""

    queries_tokens: int = 0
    hits_tokens: int = 0
    misses: dict[str, int] = field(default_factory=lambda: dict.fromkeys(map(str, Miss), 0))


def root_key(salt: str) -> bytes:
    return hashlib.blake2b(salt.encode(), digest_size=32, person=b"headrace-prefix").digest()


def chain_key(parent: bytes, token_ids: list[int]) -> bytes:
    return hashlib.blake2b(parent + array("q", token_ids).tobytes(), digest_size=32).digest()


_UNSALTED = root_key("")


class PrefixCache:
    def __init__(self, pool: BlockPool) -> None:
        self._pool = pool
        self.stats = PrefixStats()
        # Keys as they would be without salt, of what was published with one or without.
        self._unsalted: OrderedDict[bytes, None] = OrderedDict()

    def match(self, token_ids: list[int], keys: list[bytes], salt: str) -> list[int]:
        """The blocks that hold a beginning of the tokens; not yet held. Extends `keys` by the keys
        of all full blocks. The last token is never matched: its logits are wanted."""
        size = self._pool.block_tokens
        _extend_keys(keys, salt, token_ids, len(token_ids) // size, size)
        found: list[int] = []
        for key in keys[: (len(token_ids) - 1) // size]:
            block = self._pool.find(key)
            if block is None:
                break
            found.append(block)
        return found

    def count(self, token_ids: list[int], keys: list[bytes], hits: int, salt: str) -> None:
        """Book a new request's look-up: `hits` blocks were found."""
        size = self._pool.block_tokens
        self.stats.queries_tokens += len(token_ids)
        self.stats.hits_tokens += hits * size
        if hits >= (len(token_ids) - 1) // size:
            reason = Miss.TOO_SHORT
        elif self._pool.was_evicted(keys[hits]):
            reason = Miss.EVICTED
        elif self._plain_key(token_ids, keys, hits, salt) in self._unsalted:
            reason = Miss.SALT
        else:
            reason = Miss.NEVER_SEEN
        self.stats.misses[reason] += 1

    def publish(self, block: int, key: bytes, plain_key: bytes) -> None:
        self._pool.publish(block, key)
        self._unsalted[plain_key] = None
        self._unsalted.move_to_end(plain_key)
        while len(self._unsalted) > UNSALTED_REMEMBERED * self._pool.total_blocks:
            self._unsalted.popitem(last=False)

    def publish_full(self, sequence: Sequence) -> None:
        """Make a sequence's newly filled blocks findable."""
        size = self._pool.block_tokens
        full = min(sequence.computed_tokens, len(sequence.token_ids)) // size
        if full <= sequence.published_blocks:
            return
        salt = sequence.request.cache_salt
        _extend_keys(sequence.keys, salt, sequence.token_ids, full, size)
        plain = sequence.keys
        if salt:
            _extend_keys(sequence.plain_keys, "", sequence.token_ids, full, size)
            plain = sequence.plain_keys
        for at in range(sequence.published_blocks, full):
            self.publish(sequence.blocks[at], sequence.keys[at], plain[at])
        sequence.published_blocks = full

    def _plain_key(self, token_ids: list[int], keys: list[bytes], hits: int, salt: str) -> bytes:
        """The key of block `hits` had there been no salt."""
        if not salt:
            return keys[hits]
        size = self._pool.block_tokens
        parent = _UNSALTED
        for at in range(0, (hits + 1) * size, size):
            parent = chain_key(parent, token_ids[at : at + size])
        return parent


def _extend_keys(
    keys: list[bytes], salt: str, token_ids: list[int], full_blocks: int, size: int
) -> None:
    parent = keys[-1] if keys else root_key(salt)
    for at in range(len(keys), full_blocks):
        parent = chain_key(parent, token_ids[at * size : (at + 1) * size])
        keys.append(parent)
