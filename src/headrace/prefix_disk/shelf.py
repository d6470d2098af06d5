"""The folder of block files: which are there, how much they take, and which goes first.

    DIR/headrace-prefix/            0700, the user's own
        new/                        files being written; a finished one is moved into its place
        IDENTITY/ab/cdef....kv      one block, in the folder of its model and layout

Files of all identities count towards the limit, and the least recently used one goes first,
whichever model it is of: a use is the file's time of modification, so that it survives a restart
and other processes see it. Several processes may share the folder: a file appears whole, by a
rename, or not at all; one that another process has deleted was never there. Blocking calls, made
by one thread (store.py); only `has` is for others.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import stat
import time
from collections import OrderedDict
from collections.abc import Iterator
from pathlib import Path

from headrace.core.disk import disk_full, is_full
from headrace.core.errors import ConfigError
from headrace.core.step import Contents
from headrace.prefix_disk.block_file import HEADER_BYTES, write_block

FOLDER = "headrace-prefix"
_NEW = "new"
_SUFFIX = ".kv"
_DISK_BYTES = 4096  # files take a multiple of this
ABANDONED_S = 3600.0  # so old is no file that somebody still writes
USE_S = 60.0  # a use is noted at most so often


class Shelf:
    def __init__(
        self,
        folder: str,
        most_bytes: int,
        identity: bytes,
        block_bytes: int,
        *,
        param: str = "prefix_disk",
    ) -> None:
        self.folder = folder
        self.most_bytes = most_bytes
        self._identity = identity
        self._size = file_bytes(block_bytes)
        self._root = os.path.join(folder, FOLDER)
        self._own = os.path.join(self._root, identity.hex()[:32])
        self._make(param)
        # Paths below the root, least recently used first -> (bytes, time of use).
        self._files: OrderedDict[str, tuple[int, float]] = OrderedDict()
        self._in_folder: dict[str, set[str]] = {}
        self._folders: dict[str, float] = {}  # when each was last changed, as of the last look
        self.total_bytes = 0
        self._written = 0
        self.evicted = 0

    def _make(self, param: str) -> None:
        try:
            Path(self.folder).mkdir(parents=True, exist_ok=True)
            for folder in (self._root, os.path.join(self._root, _NEW), self._own):
                with contextlib.suppress(FileExistsError):
                    os.mkdir(folder, 0o700)
            found = os.lstat(self._root)
            probe = os.path.join(self._root, _NEW, f"{os.getpid()}.probe")
            os.close(os.open(probe, os.O_WRONLY | os.O_CREAT, 0o600))
            os.unlink(probe)
        except OSError as error:
            if is_full(error):
                raise disk_full(self.folder) from error
            raise ConfigError(
                f"{param}: {self.folder} can't be written to: {error.strerror}.",
                "Choose a folder that this user may write to.",
                param=param,
            ) from error
        is_own = stat.S_ISDIR(found.st_mode) and found.st_uid == os.geteuid()
        if not is_own or stat.S_IMODE(found.st_mode) & 0o077:
            raise ConfigError(
                f"{param}: {self._root} can be reached by other users; expected a folder of this "
                "user's, with mode 700: what is in it is as private as the prompts.",
                "Choose another folder, or correct its owner and mode.",
                param=param,
            )

    def place_of(self, key: bytes) -> tuple[str, bytes]:
        """A block's path below the root, and what its file says it is: a hash of its key, which is
        one of its tokens and salt."""
        name = hashlib.blake2b(key, key=self._identity, digest_size=32)
        digits = name.hexdigest()
        return f"{self._identity.hex()[:32]}/{digits[:2]}/{digits[2:]}{_SUFFIX}", name.digest()

    def path_of(self, place: str) -> str:
        return os.path.join(self._root, place)

    def has(self, place: str) -> bool:
        return place in self._files

    # -- looking -------------------------------------------------------------------------------

    def look(self) -> None:
        """Learn what is there: of folders that have changed since the last look."""
        found: list[tuple[float, str, int]] = []
        seen: set[str] = set()
        for folder in self._block_folders():
            path = self.path_of(folder)
            with contextlib.suppress(OSError):
                changed = os.stat(path).st_mtime
                seen.add(folder)
                # A clock of 10 ms or so: what changed just now may change again unseen.
                if self._folders.get(folder) == changed and changed < time.time() - 2:
                    continue
                present = set()
                for name, size, used in _list(path):
                    place = f"{folder}/{name}"
                    present.add(place)
                    if place not in self._files:
                        found.append((used, place, size))
                for place in self._in_folder.get(folder, set()) - present:
                    self._drop(place)
                self._folders[folder] = changed
        for folder in self._in_folder.keys() - seen:  # deleted as a whole
            for place in list(self._in_folder[folder]):
                self._drop(place)
            self._folders.pop(folder, None)
        for used, place, size in found:
            self._add(place, size, used)
        if found:
            by_use = sorted(self._files.items(), key=lambda item: item[1][1])
            self._files = OrderedDict(by_use)

    def _block_folders(self) -> Iterator[str]:
        """IDENTITY/ab for each identity."""
        for identity in _folders(self._root):
            if identity != _NEW:
                for part in _folders(self.path_of(identity)):
                    yield f"{identity}/{part}"

    def sweep(self) -> None:
        """Delete what processes that died while writing have left behind."""
        now = time.time()
        with contextlib.suppress(OSError), os.scandir(os.path.join(self._root, _NEW)) as entries:
            for entry in entries:
                with contextlib.suppress(OSError):
                    if now - entry.stat(follow_symlinks=False).st_mtime > ABANDONED_S:
                        os.unlink(entry.path)

    # -- changing ------------------------------------------------------------------------------

    def write(self, place: str, name: bytes, content: Contents) -> int:
        """Put a block into its place, after making room for it. Returns its bytes."""
        self.make_room(self._size)
        self._written += 1
        new = os.path.join(self._root, _NEW, f"{os.getpid()}-{id(self):x}-{self._written}")
        target = self.path_of(place)
        try:
            try:
                write_block(new, self._identity, name, content)
                os.rename(new, target)
            except FileNotFoundError:  # the first in its folder, or somebody deleted folders
                parents = os.path.dirname(new), self._own, os.path.dirname(target)
                for folder in (self._root, *parents):
                    with contextlib.suppress(FileExistsError):
                        os.mkdir(folder, 0o700)
                if not os.path.exists(new):
                    write_block(new, self._identity, name, content)
                os.rename(new, target)
        except BaseException:
            with contextlib.suppress(OSError):
                os.unlink(new)
            raise
        self._drop(place)
        self._add(place, self._size, time.time())
        return HEADER_BYTES + len(content)

    def make_room(self, wanted_bytes: int = 0) -> None:
        """Delete files until there is room. Of those that other processes have used since, their
        use counts."""
        looked_at: set[str] = set()
        while self._files and self.total_bytes + wanted_bytes > self.most_bytes:
            place, (size, used) = next(iter(self._files.items()))
            path = self.path_of(place)
            with contextlib.suppress(OSError):
                now_used = os.stat(path, follow_symlinks=False).st_mtime
                if now_used > used + 1 and place not in looked_at:
                    looked_at.add(place)
                    self._files[place] = size, now_used
                    self._files.move_to_end(place)
                    continue
            self.delete(place)
            self.evicted += 1

    def delete(self, place: str) -> None:
        with contextlib.suppress(OSError):
            os.unlink(self.path_of(place))
        self._drop(place)

    def use(self, place: str) -> None:
        found = self._files.get(place)
        if found is None:
            return
        now = time.time()
        self._files.move_to_end(place)
        if now - found[1] > USE_S:
            self._files[place] = found[0], now
            try:
                os.utime(self.path_of(place), follow_symlinks=False)
            except FileNotFoundError:
                self._drop(place)
            except OSError:
                pass  # the order after a restart is a little off

    def _add(self, place: str, size: int, used: float) -> None:
        self._files[place] = size, used
        self._in_folder.setdefault(os.path.dirname(place), set()).add(place)
        self.total_bytes += size

    def _drop(self, place: str) -> None:
        found = self._files.pop(place, None)
        if found is not None:
            self._in_folder[os.path.dirname(place)].discard(place)
            self.total_bytes -= found[0]


def file_bytes(block_bytes: int) -> int:
    """What one block takes on disk."""
    return _taken(HEADER_BYTES + block_bytes)


def _taken(size: int) -> int:
    return -(-size // _DISK_BYTES) * _DISK_BYTES


def _folders(path: str) -> list[str]:
    try:
        with os.scandir(path) as entries:
            return [entry.name for entry in entries if entry.is_dir(follow_symlinks=False)]
    except OSError:
        return []


def _list(path: str) -> Iterator[tuple[str, int, float]]:
    """Block files: name, bytes taken, time of use."""
    with os.scandir(path) as entries:
        for entry in entries:
            if entry.name.endswith(_SUFFIX) and entry.is_file(follow_symlinks=False):
                with contextlib.suppress(OSError):
                    found = entry.stat(follow_symlinks=False)
                    yield entry.name, _taken(found.st_size), found.st_mtime
