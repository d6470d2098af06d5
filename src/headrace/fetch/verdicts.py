"""Remembers which files were hashed and have not changed since, so that a model is read whole once
and not at every load.

    state folder/verified/HASH OF PATH.json    a file's state and the hash that it had

A verdict is valid while the file's device, inode, size, mtime and ctime are the same. A verdict
file is trusted only if no other user can have written it; one that is not, or can't be read or
written, counts as missing. Knows files and hashes; verify.py knows which hash a model should have.
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

# File times have a coarse resolution, whole seconds on some file systems: a file that changed just
# before it was hashed may change again without a new time.
SETTLED_NS = 2_000_000_000
_MAX_BYTES = 1 << 16  # of a verdict file; most of it is the path

logger = logging.getLogger("headrace")


@dataclass(frozen=True, slots=True, kw_only=True)
class FileState:
    """Writing to a file updates `changed_ns` (ctime), and no system call can set that back."""

    device: int
    inode: int
    size_bytes: int
    modified_ns: int
    changed_ns: int

    @classmethod
    def of(cls, place: Path | int) -> FileState:
        """`place` is a path, or the descriptor of an open file."""
        found = os.stat(place)
        return cls(
            device=found.st_dev,
            inode=found.st_ino,
            size_bytes=found.st_size,
            modified_ns=found.st_mtime_ns,
            changed_ns=found.st_ctime_ns,
        )

    def is_settled(self, began_ns: int) -> bool:
        """Whether any change after `began_ns`, when hashing began, would show in the file times."""
        return self.changed_ns + SETTLED_NS <= began_ns


def remember(path: Path, state: FileState, digest: str) -> None:
    """Where the verdict can't be written, the file is hashed again next time."""
    verdict = {"path": os.path.realpath(path), "digest": digest, **asdict(state)}
    try:
        place = _place(path)
        make_private(place.parent)
        descriptor, name = tempfile.mkstemp(dir=place.parent)  # readable by its owner alone
        try:
            with os.fdopen(descriptor, "w", encoding="utf-8") as file:
                json.dump(verdict, file)
            os.replace(name, place)  # atomic, even if another process writes too
        except BaseException:
            with contextlib.suppress(OSError):
                os.unlink(name)
            raise
    except (OSError, HeadraceError) as error:
        logger.debug("could not remember that %s was verified: %s", path, error)


def recall(path: Path, state: FileState) -> str | None:
    """The hash that the file had in exactly this state; None: it must be hashed."""
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
    descriptor = os.open(place, flags | getattr(os, "O_NONBLOCK", 0))  # opening a pipe would block
    with os.fdopen(descriptor, "rb") as file:
        found = os.fstat(descriptor)
        if not stat.S_ISREG(found.st_mode):
            raise OSError("not a regular file")
        if hasattr(os, "geteuid") and (found.st_uid != os.geteuid() or found.st_mode & 0o022):
            raise OSError("another user may have written it")
        return file.read(_MAX_BYTES)
