"""The prefix cache: a full block's key is a hash of its tokens, all tokens before, and the salt.

The hash is cryptographic: no one can construct a prompt that finds another prompt's blocks. Counts
hits and the reasons for misses. The reasons depend only on requests with the same salt, so that
the counts do not reveal what others have sent. Knows tokens and the pool's index; not who asks.
"""

from __future__ import annotations

import hashlib
from array import array
from dataclasses import dataclass, field
from enum import StrEnum

from headrace.core.request import ONCE
from headrace.engine.blocks import BlockPool
from headrace.engine.sequence import Sequence


class Miss(StrEnum):
    """Why the first missing block was not found."""

    TOO_SHORT = "too_short"  # the remaining tokens do not fill a block
    NEVER_SEEN = "never_seen"  # under this salt; whether another salt has it is not revealed
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


def block_keys(token_ids: list[int], salt: str, block_tokens: int) -> list[bytes]:
    """The keys of all full blocks of a text, from the first on."""
    keys: list[bytes] = []
    _extend_keys(keys, salt, token_ids, len(token_ids) // block_tokens, block_tokens)
    return keys


class PrefixCache:
    def __init__(self, pool: BlockPool) -> None:
        self._pool = pool
        self.stats = PrefixStats()
        # (key, block) of those that became findable, for whoever keeps or sends them; None: nobody.
        self.new: list[tuple[bytes, int]] | None = None

    def match(self, token_ids: list[int], keys: list[bytes], salt: str) -> list[int]:
        """The cached blocks for the longest prefix of the tokens. Does not hold them yet. Extends
        `keys` by the keys of all full blocks. Never matches the last token: its logits are needed.
        """
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
        """Count the look-up of a new request: `hits` blocks were found."""
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
        new = None if salt.startswith(ONCE) else self.new
        for at in range(sequence.published_blocks, full):
            key, block = sequence.keys[at], sequence.blocks[at]
            if self._pool.publish(block, key) and new is not None:
                new.append((key, block))
        sequence.published_blocks = full


def _extend_keys(
    keys: list[bytes], salt: str, token_ids: list[int], full_blocks: int, size: int
) -> None:
    parent = keys[-1] if keys else root_key(salt)
    for at in range(len(keys), full_blocks):
        parent = chain_key(parent, token_ids[at * size : (at + 1) * size])
        keys.append(parent)
