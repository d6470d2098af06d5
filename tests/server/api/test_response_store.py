"""What is kept of answers, and for whom, over a clock of the test's own."""

from __future__ import annotations

import pytest

from headrace.core.errors import ConfigError
from headrace.core.server_config import ServerConfig
from headrace.server.api.responses.store import ENTRY_BYTES, ResponseStore


class Clock:
    def __init__(self) -> None:
        self.now_s = 0.0

    def __call__(self) -> float:
        return self.now_s


def store(
    clock: Clock | None = None, *, most: int = 3, most_bytes: int = 10**6, lifetime_s: float = 60
) -> ResponseStore:
    return ResponseStore(
        max_responses=most, max_bytes=most_bytes, lifetime_s=lifetime_s, clock=clock or Clock()
    )


def put(kept: ResponseStore, name: str, owner: str | None = None, size: int = 2) -> bool:
    return kept.put(name, owner=owner, response=b"{}", input_items=b"x" * (size - 2))


def test_what_is_put_is_got() -> None:
    kept = store()
    assert kept.put("a", owner=None, response=b"1", input_items=b"2")
    found = kept.get("a", None)
    assert found is not None
    assert (found.response, found.input_items) == (b"1", b"2")
    assert kept.get("b", None) is None


def test_a_key_sees_its_own_alone() -> None:
    kept = store()
    put(kept, "a", "one")
    for other in ("two", None, ""):
        assert kept.get("a", other) is None
        assert not kept.delete("a", other)
    assert kept.get("a", "one") is not None


def test_the_oldest_go_when_there_are_too_many() -> None:
    kept = store(most=2)
    for name in "abc":
        put(kept, name)
    assert [kept.get(name, None) is not None for name in "abc"] == [False, True, True]


def test_and_when_they_are_too_large_together() -> None:
    kept = store(most=100, most_bytes=3 * (ENTRY_BYTES + 100))
    for name in "abc":
        assert put(kept, name, size=100)
    assert kept.size_bytes == 3 * (ENTRY_BYTES + 100)
    assert put(kept, "d", size=101)
    assert [kept.get(name, None) is not None for name in "abcd"] == [False, False, True, True]
    assert not put(kept, "e", size=10_000)  # alone too large: others stay
    assert len(kept) == 2
    for name in "cd":
        assert kept.delete(name, None)
    assert (len(kept), kept.size_bytes) == (0, 0)


def test_and_when_their_time_is_over() -> None:
    clock = Clock()
    kept = store(clock, lifetime_s=10)
    put(kept, "a")
    clock.now_s = 6
    put(kept, "b")
    clock.now_s = 10
    assert kept.get("a", None) is None
    assert kept.get("b", None) is not None
    assert len(kept) == 1


def test_none_are_kept_where_none_may_be() -> None:
    kept = store(most=0)
    assert not kept.is_on
    assert not put(kept, "a")
    assert len(kept) == 0


def test_settings() -> None:
    assert not ResponseStore.from_config(ServerConfig(max_stored_responses=0)).is_on
    assert ServerConfig(max_stored="1MiB").max_stored_bytes == 1 << 20
    for wrong in ({"max_stored_responses": -1}, {"max_stored": 0}, {"response_lifetime_s": 0}):
        with pytest.raises(ConfigError):
            ServerConfig(**wrong)  # type: ignore[arg-type]


def test_a_key_that_keeps_much_pushes_out_its_own_alone() -> None:
    kept = store(most=4)
    put(kept, "honest", "one")
    for number in range(20):
        put(kept, f"greedy{number}", "two")
    assert kept.get("honest", "one") is not None
    assert len(kept) == 4
    assert kept.get("greedy19", "two") is not None
    large = store(most=100, most_bytes=4 * (ENTRY_BYTES + 100))
    put(large, "honest", "one", size=100)
    for number in range(20):
        put(large, f"greedy{number}", "two", size=100)
    assert large.get("honest", "one") is not None
    assert large.size_bytes <= 4 * (ENTRY_BYTES + 100)
    # Who has most is counted by what is there, not by what once was.
    for name in ("greedy17", "greedy18", "greedy19"):
        assert large.delete(name, "two")
    for number in range(4):
        put(large, f"later{number}", "one", size=100)
    assert large.get("honest", "one") is None


def test_a_successor_gets_what_was_kept_with_its_age() -> None:
    clock = Clock()
    before = store(clock)
    put(before, "a", "ann")
    clock.now_s = 30.0
    put(before, "b", "ben")
    after = store(clock)
    after.put_back(before.entries())
    assert after.get("a", "ann") is not None
    assert after.get("a", "ben") is None
    assert after.size_bytes == before.size_bytes
    clock.now_s = 61.0
    assert after.get("a", "ann") is None
    assert after.get("b", "ben") is not None


def test_a_successor_with_less_room_keeps_the_newest() -> None:
    before = store(most=3)
    for name in ("a", "b", "c"):
        put(before, name)
    after = store(most=2)
    after.put_back(before.entries())
    assert [after.get(name, None) is not None for name in ("a", "b", "c")] == [False, True, True]
    none = store(most=0)
    none.put_back(before.entries())
    assert len(none) == 0
