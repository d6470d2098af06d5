"""Blocks that were computed elsewhere: by an engine before a restart, or by another one.

Contents are opaque; a block's key (prefix.py) says which tokens they belong to, and whoever brings
them vouches that the same model computed them. Adopted blocks are cached as if they had been
computed here: nobody is preempted for them, no block in use is touched, and what is refused is
computed. Knows the pool and the runner's blocks; not where contents come from.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence

from headrace.core.step import Contents, MovesBlocks, StepPlan
from headrace.engine.blocks import BlockPool


def adopt(
    pool: BlockPool,
    runner: MovesBlocks,
    keys: Sequence[bytes],
    contents: Mapping[bytes, Contents],
    in_flight: Collection[StepPlan],
) -> int:
    """Put contents into the pool, for a text whose blocks have these keys. Returns how many of its
    first blocks the pool has now, until they are evicted."""
    busy = touched(in_flight)
    size = runner.block_bytes
    held: list[int] = []
    new: list[tuple[int, bytes, Contents]] = []
    for key in keys:
        block = pool.find(key)
        if block is not None:
            pool.share(block)  # or the next one might evict it
        else:
            content = contents.get(key)
            if content is None or len(content) != size:
                break
            block = pool.take_outside(busy)
            if block is None:
                break
            new.append((block, key, content))
        held.append(block)
    try:
        if new:
            runner.write_blocks([block for block, _, _ in new], [each for _, _, each in new])
            for block, key, _ in new:
                pool.publish(block, key)
    finally:
        pool.give_back(held)
    return len(held)


def read(
    pool: BlockPool, runner: MovesBlocks, keys: Sequence[bytes]
) -> list[tuple[bytes, memoryview]]:
    """The contents of the first blocks of a text, as far as the pool has them. Between steps: a
    block that can be found is full, and no plan in flight writes it."""
    found: list[tuple[bytes, int]] = []
    for key in keys:
        block = pool.find(key)
        if block is None:
            break
        found.append((key, block))
    copies = runner.read_blocks([block for _, block in found])
    return [(key, copy) for (key, _), copy in zip(found, copies, strict=True)]


def touched(plans: Collection[StepPlan]) -> set[int]:
    """The blocks that plans read or write, even if their sequences have ended since."""
    blocks: set[int] = set()
    for plan in plans:
        for table in plan.tables:
            blocks.update(table)
        for pair in plan.copies:
            blocks.update(pair)
    return blocks
