"""The store beside an engine: blocks come back after a restart, and a bad disk costs only time."""

from __future__ import annotations

import errno
import logging
import os
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from headrace.prefix_disk import store as store_module
from headrace.prefix_disk.block_file import read_block
from headrace.prefix_disk.shelf import Shelf
from headrace.prefix_disk.store import DiskStore

IDENTITY = b"i" * 32
SIZE = 1000
KEYS = [bytes([at]) * 32 for at in range(40)]
LONG_S = 30.0  # no test waits so long, unless it fails

Make = Callable[..., DiskStore]


def content_of(key: bytes) -> bytes:
    return key[:1] * SIZE


@pytest.fixture
def make(tmp_path: Path) -> Iterator[Make]:
    made = []

    def start(blocks: int = 100) -> DiskStore:
        shelf = Shelf(str(tmp_path), blocks * 4096, IDENTITY, SIZE)
        made.append(DiskStore(shelf, IDENTITY, SIZE))
        return made[-1]

    yield start
    for each in made:
        each.close()


def fill(store: DiskStore, keys: list[bytes] = KEYS) -> None:
    for key in keys:
        assert store.wants(key)
        store.keep(key, content_of(key))


def files(folder: Path) -> list[Path]:
    return sorted(folder.rglob("*.kv"))


def test_what_was_kept_is_there_after_a_restart(make: Make) -> None:
    store = make()
    fill(store)
    store.close()
    assert store.stats.written_blocks == len(KEYS)
    again = make()
    assert all(map(again.has, KEYS))
    assert not again.has(b"?" * 32)
    assert not again.wants(KEYS[0])
    load = again.load(KEYS)
    assert load.wait(LONG_S)
    assert {key: bytes(each) for key, each in load.contents.items()} == {
        key: content_of(key) for key in KEYS
    }
    assert (again.stats.loaded_blocks, again.stats.loaded_bytes) == (len(KEYS), len(KEYS) * SIZE)
    assert again.stats.stored_bytes == len(KEYS) * 4096


def test_a_load_ends_at_a_damaged_file_which_goes(make: Make, tmp_path: Path) -> None:
    store = make()
    fill(store)
    store.close()
    again = make()
    path = again._shelf.path_of(again._shelf.place_of(KEYS[20])[0])
    with open(path, "r+b") as file:
        file.seek(500)
        file.write(b"?")
    gone = again._shelf.path_of(again._shelf.place_of(KEYS[35])[0])
    os.unlink(gone)
    load = again.load(KEYS)
    assert load.wait(LONG_S)
    assert list(load.contents) == KEYS[:20]
    assert again.stats.errors == {"read": 0, "write": 0, "corrupt": 1}
    again.close()  # what it had to do is done
    assert not os.path.exists(path)
    third = make()
    assert not third.has(KEYS[20])
    load = third.load(KEYS[21:])
    assert load.wait(LONG_S)
    assert list(load.contents) == KEYS[21:35]  # up to the one that is gone
    assert third.stats.errors["corrupt"] == 0


def test_a_full_queue_drops_and_counts(make: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(store_module, "QUEUE_BYTES", 3 * SIZE)
    store, go_on, plain = make(), threading.Event(), Shelf.write

    def slow(*arguments: Any) -> int:
        go_on.wait(LONG_S)
        return plain(*arguments)

    monkeypatch.setattr(Shelf, "write", slow)
    kept = 0
    for key in KEYS[:10]:
        if store.wants(key):
            store.keep(key, content_of(key))
            kept += 1
    assert kept == 3
    assert store.stats.dropped_blocks == 7
    assert not store.wants(KEYS[0])  # queued: not dropped
    assert store.stats.dropped_blocks == 7
    go_on.set()
    store.close()
    assert store.stats.written_blocks == 3


def test_a_full_disk_is_said_once_and_costs_nothing_else(
    make: Make, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def fail(*_: object) -> int:
        raise OSError(errno.ENOSPC, "No space left on device")

    store = make()
    monkeypatch.setattr(Shelf, "write", fail)
    with caplog.at_level(logging.WARNING):
        store.keep(KEYS[0], content_of(KEYS[0]))
        store.keep(KEYS[1], content_of(KEYS[1]))
        store.close()
    assert store.stats.errors["write"] >= 1
    assert store.stats.dropped_blocks == 2
    assert len(caplog.records) == 1
    assert "is full" in caplog.text
    assert not store.wants(KEYS[2])  # it is left alone for a while


def test_a_late_load_is_given_up_and_others_are_not_tried(
    make: Make, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    store = make()
    fill(store, KEYS[:4])
    store.close()
    again = make()
    go_on = threading.Event()
    plain = read_block

    def slow(*arguments: object) -> memoryview:
        found = plain(*arguments)  # type: ignore[arg-type]
        go_on.wait(LONG_S)
        return found

    monkeypatch.setattr(store_module, "read_block", slow)
    load = again.load(KEYS[:4])
    while load.began_s is None:
        load.wait(0.01)
    monkeypatch.setattr(store_module, "SLOW_S", 0.0)
    with caplog.at_level(logging.WARNING):
        load.give_up(is_late=True)
    contents = load.contents
    assert not again.has(KEYS[0])
    assert "took too long" in caplog.text
    go_on.set()
    assert load.ended.wait(LONG_S)
    assert load.contents is contents
    assert contents == {}


def test_two_stores_on_one_folder(make: Make) -> None:
    one, two = make(blocks=20), make(blocks=20)
    fill(one, KEYS[:20])
    fill(two, KEYS[10:30])
    one.close()
    two.close()
    third = make(blocks=20)
    there = [key for key in KEYS if third.has(key)]
    assert there
    assert third.stats.stored_bytes <= 20 * 4096
    load = third.load(there)
    assert load.wait(LONG_S)
    assert {k: bytes(c) for k, c in load.contents.items()} == {k: content_of(k) for k in there}


def test_where_many_blocks_would_be_is_not_remembered_for_ever(
    make: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An engine that serves an hour of new prompts grew by 30 MB."""
    monkeypatch.setattr(store_module, "MOST_PLACES", 10)
    store = make()
    fill(store)
    for number in range(1000):
        assert not store.has(number.to_bytes(32, "big"))
        assert len(store._places) <= 10
    store.close()
    assert all(map(store.has, KEYS))
