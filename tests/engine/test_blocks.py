"""The pool against a plain model of itself, under random use."""

from __future__ import annotations

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from headrace.engine.blocks import BlockPool

TOTAL = 7


class PoolMachine(RuleBasedStateMachine):
    """Tables that take, share, publish and give back; the model knows what each block holds."""

    def __init__(self) -> None:
        super().__init__()
        self.pool = BlockPool(TOTAL, 16)
        self.tables: list[list[int]] = []
        self.content: dict[bytes, int] = {}  # published, and not known to be overwritten
        self.next_key = 0

    @precondition(lambda self: self.pool.available_blocks > 0)
    @rule(extend=st.booleans(), data=st.data())
    def take(self, extend: bool, data: st.DataObject) -> None:
        block = self.pool.take()
        assert all(block not in table for table in self.tables)
        # Whoever takes a block overwrites it: it must not be findable any more.
        assert all(self.pool.find(key) != block for key in self.content)
        self.content = {k: b for k, b in self.content.items() if b != block}
        if extend and self.tables:
            data.draw(st.sampled_from(self.tables)).append(block)
        else:
            self.tables.append([block])

    @precondition(lambda self: any(self.tables))
    @rule(data=st.data())
    def publish(self, data: st.DataObject) -> None:
        table = data.draw(st.sampled_from([t for t in self.tables if t]))
        block = data.draw(st.sampled_from(table))
        key = self.next_key.to_bytes(4, "little")
        self.next_key += 1
        known = block in self.content.values()
        self.pool.publish(block, key)
        if not known:
            self.content[key] = block
        assert not self.pool.is_writable(block)

    @precondition(lambda self: self.content)
    @rule(data=st.data())
    def share(self, data: st.DataObject) -> None:
        key = data.draw(st.sampled_from(sorted(self.content)))
        block = self.pool.find(key)
        assert block == self.content[key]
        self.pool.share(block)
        self.tables.append([block])

    @precondition(lambda self: self.tables)
    @rule(data=st.data())
    def give_back(self, data: st.DataObject) -> None:
        table = self.tables.pop(data.draw(st.integers(0, len(self.tables) - 1)))
        self.pool.give_back(table)

    @invariant()
    def sound(self) -> None:
        self.pool.check_integrity(self.tables)
        held = {block for table in self.tables for block in table}
        assert self.pool.used_blocks == len(held)
        assert self.pool.available_blocks == TOTAL - len(held)


TestPool = PoolMachine.TestCase
TestPool.settings = settings(max_examples=60, stateful_step_count=40, deadline=None)


def test_the_least_recently_used_goes_first_and_tails_before_heads() -> None:
    pool = BlockPool(4, 16)
    old, new = [pool.take(), pool.take()], [pool.take(), pool.take()]
    for number, block in enumerate((*old, *new)):
        pool.publish(block, bytes([number]))
    pool.give_back(old)
    pool.give_back(new)
    kept = pool.find(b"\x00")
    assert kept is not None
    pool.share(kept)  # used again: no longer the oldest
    pool.give_back([kept])
    order = [pool.take() for _ in range(4)]
    assert order == [old[1], new[1], new[0], old[0]]
    assert pool.was_evicted(b"\x00")
    assert pool.find(b"\x00") is None


@pytest.mark.parametrize(
    "damage",
    [
        lambda pool: pool._free.append(pool._free[0]),
        lambda pool: pool._free.pop(),
        lambda pool: pool._references.__setitem__(0, 2),
        lambda pool: pool._cached.__setitem__(pool._free[-1], None),
    ],
)
def test_check_integrity_notices_damage(damage: object) -> None:
    pool = BlockPool(4, 16)
    table = [pool.take()]
    pool.check_integrity([table])
    damage(pool)  # type: ignore[operator]
    with pytest.raises(AssertionError):
        pool.check_integrity([table])


def test_check_integrity_notices_tables_that_disagree() -> None:
    pool = BlockPool(4, 16)
    a, b = pool.take(), pool.take()
    for tables in ([[a]], [[a, b], [b]], [[a, b, b]], [[a, b], [3]]):
        with pytest.raises(AssertionError):
            pool.check_integrity(tables)
    pool.check_integrity([[a, b]])
