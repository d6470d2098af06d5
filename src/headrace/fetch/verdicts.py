"""What was hashed already and has not changed since: so that a model is read whole once, not at
every load.

    state folder/verified/HASH OF PATH.json    a file's state and the hash that was found of it

A verdict holds for as long as the file is the same by device, inode, size and both of its times.
Its own file is taken only where nobody but this user can have written it; whatever else is found
there, or can't be read or written, is as if nothing had been hashed. Knows files and hashes; which
hash a model should have is verify.py's affair.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import logging
import os
import stat
import tempfile
from dataclasses import asdict, dataclass, fields
from pathlib import Path

from headrace.core.errors import HeadraceError
from headrace.core.state import make_private, state_folder

# Times of files move in ticks, on some file systems of whole seconds: a file that changed just
# before it was hashed may change once more without its times showing it.
SETTLED_NS = 2_000_000_000
_MAX_BYTES = 1 << 16  # of a verdict's own file; a path takes the most of it

logger = logging.getLogger("headrace")


@dataclass(frozen=True, slots=True, kw_only=True)
class FileState:
    """Writing to a file moves `changed_ns`, and no call sets that back."""

    device: int
    inode: int
    size_bytes: int
    modified_ns: int
    changed_ns: int

    @classmethod
    def of(cls, place: Path | int) -> FileState:
        """`place` is a path, or a descriptor of an open file."""
        found = os.stat(place)
        return cls(
            device=found.st_dev,
            inode=found.st_ino,
            size_bytes=found.st_size,
            modified_ns=found.st_mtime_ns,
            changed_ns=found.st_ctime_ns,
        )

    def is_settled(self, began_ns: int) -> bool:
        """Whether any change since `began_ns`, when hashing began, shows in the times."""
        return self.changed_ns + SETTLED_NS <= began_ns


def remember(path: Path, state: FileState, digest: str) -> None:
    """Where it can't be kept, the file is hashed again next time."""
    verdict = {"path": os.path.realpath(path), "digest": digest, **asdict(state)}
    try:
        place = _place(path)
        make_private(place.parent)
        descriptor, name = tempfile.mkstemp(dir=place.parent)  # for its owner alone
        try:
            with os.fdopen(descriptor, "w", encoding="utf-8") as file:
                json.dump(verdict, file)
            os.replace(name, place)  # whole, whoever else writes
        except BaseException:
            with contextlib.suppress(OSError):
                os.unlink(name)
            raise
    except (OSError, HeadraceError) as error:
        logger.debug("that %s was verified is not remembered: %s", path, error)


def recall(path: Path, state: FileState) -> str | None:
    """The hash that was found of the file in exactly this state; None: hash it."""
    try:
        verdict = json.loads(_read_own(_place(path)))
    except (OSError, ValueError, RecursionError, HeadraceError):
        return None
    if not isinstance(verdict, dict) or verdict.get("path") != os.path.realpath(path):
        return None
    for each in fields(FileState):
        if verdict.get(each.name) != getattr(state, each.name):
            return None
    digest = verdict.get("digest")
    return digest if isinstance(digest, str) else None


def forget(path: Path) -> None:
    with contextlib.suppress(OSError, HeadraceError):
        _place(path).unlink()


def _place(path: Path) -> Path:
    name = hashlib.sha256(os.path.realpath(path).encode("utf-8", "surrogateescape")).hexdigest()
    return state_folder() / "verified" / f"{name[:32]}.json"


def _read_own(place: Path) -> bytes:
    """The content of a file that only this user can have written; OSError for any other."""
    flags = os.O_RDONLY | getattr(os, "O_CLOEXEC", 0) | getattr(os, "O_NOFOLLOW", 0)
    descriptor = os.open(place, flags | getattr(os, "O_NONBLOCK", 0))  # a pipe would wait
    with os.fdopen(descriptor, "rb") as file:
        found = os.fstat(descriptor)
        if not stat.S_ISREG(found.st_mode):
            raise OSError("not a regular file")
        if hasattr(os, "geteuid") and (found.st_uid != os.geteuid() or found.st_mode & 0o022):
            raise OSError("others may have written it")
        return file.read(_MAX_BYTES)
