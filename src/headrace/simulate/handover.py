"""Keys and values that go from an engine that computed a prompt to one that continues it.

The way takes bytes / link, and one sequence goes after the other. What arrives is put into the
decoding engine's prefix cache, full blocks only: it computes the rest of the last block again,
which is less than a block. Knows times and blocks; who sends to whom, others decide.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from headrace.core.request import GenerateRequest
from headrace.engine.loop import Engine


@dataclass(frozen=True, slots=True, kw_only=True)
class Handover:
    """The way between two pools."""

    kv_bytes: Callable[[int], float]  # of so many tokens of one sequence
    link_bytes_s: float  # one direction
    latency_s: float = 0.0

    def seconds(self, tokens: int) -> float:
        return self.latency_s + self.kv_bytes(tokens) / self.link_bytes_s


class Link:
    """One sender's way out: a sequence waits until the one before it is through."""

    def __init__(self, way: Handover) -> None:
        self._way = way
        self._free_s = float("-inf")

    def send(self, tokens: int, at_s: float) -> float:
        """When it has arrived."""
        self._free_s = max(self._free_s, at_s) + self._way.seconds(tokens)
        return self._free_s


class Room:
    """What an engine could start now, besides what it runs."""

    def __init__(self, engine: Engine) -> None:
        stats, limits = engine.stats, engine.scheduler.limits
        self._pool = engine.blocks
        self._is_empty = not engine.has_work
        slots = min(limits.max_sequences, limits.max_batch_tokens)
        # A sequence that the engine has not started is one too many already.
        self._slots = 0 if stats.waiting_sequences else slots - stats.running_sequences
        kept = self._pool.total_blocks * engine.scheduler.config.watermark
        self._blocks = self._pool.available_blocks - kept

    def take(self, request: GenerateRequest) -> bool:
        """Whether there is room for it, and then for so much less. An empty engine takes anything:
        it says by itself what can never run."""
        self._slots -= 1
        self._blocks -= self._pool.blocks_for(len(request.prompt_token_ids)) + 1
        fits = self._slots >= 0 and self._blocks >= 0
        is_first, self._is_empty = self._is_empty, False
        return fits or is_first


def receive(engine: Engine, request: GenerateRequest) -> None:
    """Put a prompt's full blocks where the engine will find them, as far as there is room."""
    pool, keys = engine.blocks, list[bytes]()
    prefix = engine.scheduler.prefix
    token_ids = request.prompt_token_ids
    held = prefix.match(token_ids, keys, request.cache_salt)
    for block in held:
        pool.share(block)  # not to be evicted for those that follow
    for key in keys[len(held) : (len(token_ids) - 1) // pool.block_tokens]:
        if not pool.available_blocks:
            break
        block = pool.take()
        pool.publish(block, key)
        held.append(block)
    pool.give_back(held)
