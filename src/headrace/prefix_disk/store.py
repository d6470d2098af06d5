"""The prefix cache on disk as the engine sees it (core/block_store.py): two threads beside it.

One writes, deletes and notes uses, the other only reads. The engine never waits for either: blocks
to be written are queued up to QUEUE_BYTES and dropped beyond, and what is there is known from
memory. A disk that fails or is slow is left alone for a while. Knows the folder; no engine.
"""

from __future__ import annotations

import contextlib
import logging
import os
import queue
import threading
import time
from collections import deque
from collections.abc import Generator, Sequence

from headrace.core.block_store import StoreStats
from headrace.core.disk import is_full
from headrace.core.step import Contents
from headrace.prefix_disk.block_file import BadFileError, open_block, read_block
from headrace.prefix_disk.shelf import Shelf

log = logging.getLogger(__name__)

QUEUE_BYTES = 64 << 20  # of blocks to be written, in memory
MOST_USES = 65536  # to be noted
MOST_PLACES = 4096  # that are remembered: 430 bytes each, and 7 us to find again
AHEAD = 16  # files that the system is asked to read before their turn
LOOK_S = 30.0  # how often other processes' files are looked for
FIRST_LOOK_S = 2.0  # the longest that a start waits for what is there to be known
SLOW_S = 1.0  # so long no load takes on a disk that is worth it
REST_S = 30.0  # without loads after a late one, without writes after one that failed
CLOSE_S = 3.0  # to write what is queued at the end


class DiskLoad:
    """Implements `core.block_store.Load`."""

    def __init__(self, keys: Sequence[bytes], store: DiskStore) -> None:
        self.keys = keys
        self.contents: dict[bytes, Contents] = {}
        self.is_given_up = False
        self.ended = threading.Event()
        self.began_s: float | None = None  # None: others are before it
        self._store = store

    def wait(self, timeout_s: float) -> bool:
        return self.ended.wait(timeout_s) if timeout_s > 0 else self.ended.is_set()

    def give_up(self, *, is_late: bool) -> None:
        self.is_given_up = True
        self.contents = dict(self.contents)  # nothing is added to this one
        if is_late and self.began_s is not None and not self.ended.is_set():
            self._store.note_late(time.monotonic() - self.began_s)


class DiskStore:
    """Implements `core.block_store.BlockStore`."""

    def __init__(self, shelf: Shelf, identity: bytes, block_bytes: int) -> None:
        self.stats = StoreStats()
        self._shelf = shelf
        self._identity = identity
        self._block_bytes = block_bytes
        self._lock = threading.Lock()
        self._places: dict[bytes, tuple[str, bytes]] = {}  # of recent keys
        self._queued: dict[bytes, Contents] = {}  # to be written, oldest first
        self._uses: deque[bytes] = deque(maxlen=MOST_USES)
        self._bad: deque[bytes] = deque(maxlen=MOST_USES)
        self._wake = threading.Event()
        self._is_closing = False
        self._closed = threading.Event()
        self._no_loads_before_s = self._no_writes_before_s = 0.0
        self._warned: set[str] = set()
        self._looked = threading.Event()
        self._loads: queue.SimpleQueue[DiskLoad | None] = queue.SimpleQueue()
        self._writer = threading.Thread(target=self._write_all, name="headrace-disk-w", daemon=True)
        self._reader = threading.Thread(target=self._read_all, name="headrace-disk-r", daemon=True)
        self._writer.start()
        self._reader.start()
        if not self._looked.wait(FIRST_LOOK_S):
            log.warning("the prefix cache in %s is still being listed", shelf.folder)

    # -- for the engine's thread ---------------------------------------------------------------

    def has(self, key: bytes) -> bool:
        return self._shelf.has(self._place(key)[0]) and time.monotonic() >= self._no_loads_before_s

    def wants(self, key: bytes) -> bool:
        if key in self._queued or self._shelf.has(self._place(key)[0]):
            return False
        is_full = (len(self._queued) + 1) * self._block_bytes > QUEUE_BYTES
        if is_full or self._is_closing or time.monotonic() < self._no_writes_before_s:
            self.stats.dropped_blocks += 1
            return False
        return True

    def keep(self, key: bytes, content: Contents) -> None:
        with self._lock:
            self._queued[key] = content
        self._wake.set()

    def use(self, keys: Sequence[bytes]) -> None:
        self._uses.extend(keys)
        self._wake.set()

    def load(self, keys: Sequence[bytes]) -> DiskLoad:
        load = DiskLoad(list(keys), self)
        self._loads.put(load)
        return load

    def note_late(self, taken_s: float) -> None:
        """A load took too long: if not because others were before it, the disk is left alone for a
        while, and prefixes are computed."""
        if taken_s >= SLOW_S:
            self._no_loads_before_s = time.monotonic() + REST_S
            self._warn("late", "a prefix took too long to load from %s and is computed", None)

    def close(self) -> None:
        self._is_closing = True
        self._wake.set()
        self._loads.put(None)
        self._closed.wait(CLOSE_S)

    def _place(self, key: bytes) -> tuple[str, bytes]:
        found = self._places.get(key)
        if found is None:
            if len(self._places) >= MOST_PLACES:
                self._places.clear()
            found = self._places[key] = self._shelf.place_of(key)
        return found

    # -- the writing thread --------------------------------------------------------------------

    def _write_all(self) -> None:
        look_s = 0.0
        while True:
            if time.monotonic() >= look_s:
                self._look()
                look_s = time.monotonic() + LOOK_S
            for key in _drain(self._uses):
                self._shelf.use(self._place(key)[0])
            for key in _drain(self._bad):
                self._shelf.delete(self._place(key)[0])
                self._count()
            key, content = self._next()
            if content is not None:
                self._write(key, content)
            elif self._is_closing:
                break
            else:
                self._wake.wait(max(0.0, look_s - time.monotonic()))
                self._wake.clear()
        self._closed.set()

    def _count(self) -> None:
        self.stats.stored_bytes = self._shelf.total_bytes
        self.stats.evicted_blocks = self._shelf.evicted

    def _look(self) -> None:
        try:
            self._shelf.look()
            self._shelf.make_room()
            self._shelf.sweep()
        except OSError as error:
            self._fail("read", error)
        self._count()
        self._looked.set()

    def _next(self) -> tuple[bytes, Contents | None]:
        with self._lock:
            return next(iter(self._queued.items()), (b"", None))

    def _write(self, key: bytes, content: Contents) -> None:
        place, name = self._place(key)
        try:
            if time.monotonic() < self._no_writes_before_s:
                self.stats.dropped_blocks += 1
            else:
                self.stats.written_bytes += self._shelf.write(place, name, content)
                self.stats.written_blocks += 1
        except OSError as error:
            self.stats.dropped_blocks += 1
            self._no_writes_before_s = time.monotonic() + REST_S
            self._fail("full" if is_full(error) else "write", error)
        finally:
            self._count()
            with self._lock:
                del self._queued[key]

    # -- the reading thread --------------------------------------------------------------------

    def _read_all(self) -> None:
        while (load := self._loads.get()) is not None:
            try:
                self._read(load)
            except Exception as error:  # what was read so far counts
                self._fail("read", error)
            load.ended.set()
            del load

    def _read(self, load: DiskLoad) -> None:
        if load.is_given_up:
            return
        load.began_s = time.monotonic()
        contents = load.contents
        files = self._open(load.keys)
        with contextlib.closing(files):
            for key, descriptor in files:
                if load.is_given_up:
                    return
                try:
                    name = self._place(key)[1]
                    found = read_block(descriptor, self._identity, name, self._block_bytes)
                except BadFileError as error:
                    self._forget(key)
                    self.stats.errors["corrupt"] += 1
                    self._warn("corrupt", "a file in %s is ignored and deleted: %s", error)
                    return
                contents[key] = found
                self.stats.loaded_blocks += 1
                self.stats.loaded_bytes += len(found)

    def _open(self, keys: Sequence[bytes]) -> Generator[tuple[bytes, int], None, None]:
        """Descriptors of the keys' files, up to the first that is not there; some are opened before
        their turn."""
        ahead: deque[tuple[bytes, int]] = deque()
        left = iter(keys)
        try:
            while True:
                while len(ahead) < AHEAD and (key := next(left, None)) is not None:
                    try:
                        ahead.append((key, open_block(self._shelf.path_of(self._place(key)[0]))))
                    except FileNotFoundError:  # another process has evicted it
                        self._forget(key)
                        left = iter(())
                if not ahead:
                    return
                yield ahead[0]
                os.close(ahead.popleft()[1])
        finally:
            for _, descriptor in ahead:
                os.close(descriptor)

    def _forget(self, key: bytes) -> None:
        self._bad.append(key)
        self._wake.set()

    def _fail(self, kind: str, error: Exception) -> None:
        self.stats.errors["write" if kind == "full" else kind] += 1
        what = {
            "read": "the prefix cache in %s can't be read, and prefixes are computed: %s",
            "write": "the prefix cache in %s can't be written to, and blocks are dropped: %s",
            "full": "the disk of the prefix cache in %s is full, and blocks are dropped: %s",
        }
        self._warn(kind, what[kind], error)

    def _warn(self, kind: str, what: str, error: Exception | None) -> None:
        """Once for each kind of failure; the metrics count all of them."""
        if kind not in self._warned:
            self._warned.add(kind)
            log.warning(what, self._shelf.folder, *(() if error is None else (error,)))


def _drain(waiting: deque[bytes]) -> list[bytes]:
    found = []
    with contextlib.suppress(IndexError):
        while True:
            found.append(waiting.popleft())
    return found
