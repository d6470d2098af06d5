"""Prefixes by hash: a full block's key covers its tokens, all before them, and the salt.

The hash is cryptographic: nobody can make a prompt that finds another prompt's blocks. Counts what
was found and why the rest was not: by what was asked under the same salt alone, so that nobody can
read out of the counts what others have sent. Knows tokens and the pool's index; not who asks.
"""

from __future__ import annotations

import hashlib
from array import array
from dataclasses import dataclass, field
from enum import StrEnum

from headrace.engine.blocks import BlockPool
from headrace.engine.sequence import Sequence


class Miss(StrEnum):
    """Why the first block that was not found was not."""

    TOO_SHORT = "too_short"  # what is left does not fill a block
    NEVER_SEEN = "never_seen"  # under this salt: whether another has it is nobody's business
    EVICTED = "evicted"


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


class PrefixCache:
    def __init__(self, pool: BlockPool) -> None:
        self._pool = pool
        self.stats = PrefixStats()

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

    def count(self, token_ids: list[int], keys: list[bytes], hits: int) -> None:
        """Book a new request's look-up: `hits` blocks were found."""
        size = self._pool.block_tokens
        self.stats.queries_tokens += len(token_ids)
        self.stats.hits_tokens += hits * size
        if hits >= (len(token_ids) - 1) // size:
            reason = Miss.TOO_SHORT
        elif self._pool.was_evicted(keys[hits]):
            reason = Miss.EVICTED
        else:
            reason = Miss.NEVER_SEEN
        self.stats.misses[reason] += 1

    def publish_full(self, sequence: Sequence) -> None:
        """Make a sequence's newly filled blocks findable."""
        size = self._pool.block_tokens
        full = min(sequence.computed_tokens, len(sequence.token_ids)) // size
        if full <= sequence.published_blocks:
            return
        salt = sequence.request.cache_salt
        _extend_keys(sequence.keys, salt, sequence.token_ids, full, size)
        for at in range(sequence.published_blocks, full):
            self._pool.publish(sequence.blocks[at], sequence.keys[at])
        sequence.published_blocks = full


def _extend_keys(
    keys: list[bytes], salt: str, token_ids: list[int], full_blocks: int, size: int
) -> None:
    parent = keys[-1] if keys else root_key(salt)
    for at in range(len(keys), full_blocks):
        parent = chain_key(parent, token_ids[at * size : (at + 1) * size])
        keys.append(parent)
