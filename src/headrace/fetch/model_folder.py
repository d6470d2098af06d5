"""Where model files are kept between runs: the folder, its lock, and a place to stage a download.

Knows files and folders only; catalog.py lists the models and pull.py fetches them.
"""

from __future__ import annotations

import os
import shutil
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from headrace.core.disk import disk_full, free_at, is_full
from headrace.core.errors import ConfigError
from headrace.core.folders import UserFolder

_ELSEWHERE = "Free some space, or set HEADRACE_CACHE to a folder on another disk."
_LOCK_POLL_S = 0.1


_CACHE = UserFolder(
    variable="HEADRACE_CACHE",
    xdg_variable="XDG_CACHE_HOME",
    holds="models",
    linux=".cache/headrace",
    macos="Library/Caches/headrace",
    windows="headrace",
)


def cache_folder() -> Path:
    """$HEADRACE_CACHE, else $XDG_CACHE_HOME/headrace, else the platform's cache folder."""
    return _CACHE.path()


def models_folder() -> Path:
    return cache_folder() / "models"


@contextmanager
def storage_errors(folder: Path, needed_bytes: int | None = None) -> Iterator[None]:
    """Turns a file system error raised inside into one error about the cache folder."""
    try:
        yield
    except OSError as error:
        if is_full(error):
            raise disk_full(folder, _ELSEWHERE, needed_bytes=needed_bytes) from error
        raise ConfigError(
            f"The cache folder {folder} can't be used: {error.strerror or error}"
            + (f" ({error.filename})." if error.filename else "."),
            "Make it writable, or set HEADRACE_CACHE to a folder you may write to.",
            param="HEADRACE_CACHE",
        ) from error


def check_room(folder: Path, wanted_bytes: int) -> None:
    """Checks for free space before the download instead of failing near its end."""
    free_bytes = free_at(folder)
    if free_bytes is not None and free_bytes < wanted_bytes:
        raise disk_full(folder, _ELSEWHERE, needed_bytes=wanted_bytes)


@contextmanager
def locked(folder: Path, name: str, waiting: Callable[[], None]) -> Iterator[bool]:
    """Holds the lock of `name` while inside; calls `waiting` while another process has it.

    Yields whether the lock is real: some file systems and Windows have no flock. Correctness does
    not depend on it (files appear by atomic rename); it avoids fetching the same file twice.
    """
    if sys.platform == "win32":
        yield False
        return
    import fcntl

    descriptor = os.open(folder / f".{name}.lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
    try:
        yield _acquire(lambda: fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB), waiting)
    finally:
        # Closing releases it. The file stays: removing it would let two holders lock two inodes.
        os.close(descriptor)


def _acquire(lock: Callable[[], None], waiting: Callable[[], None]) -> bool:
    while True:
        try:
            lock()
        except BlockingIOError:
            waiting()
            time.sleep(_LOCK_POLL_S)
        except OSError:  # ENOLCK, ENOTSUP: a network file system without locks
            return False
        else:
            return True


@contextmanager
def staging(folder: Path, name: str, *, sweep: bool) -> Iterator[Path]:
    """A temporary folder beside the final place (so a rename out of it is atomic), always removed.

    `sweep`: the caller holds the lock, so any older stage of this name belongs to a dead process.
    """
    prefix = f".pull-{name}-"
    if sweep:
        for stale in folder.glob(f"{prefix}*"):
            shutil.rmtree(stale, ignore_errors=True)
    stage = Path(tempfile.mkdtemp(prefix=prefix, dir=folder))
    try:
        yield stage
    finally:
        shutil.rmtree(stage, ignore_errors=True)


def publish(staged: Path, target: Path) -> None:
    """Moves a finished file to its place: even after a crash it is there whole or not at all."""
    os.replace(staged, target)
    if sys.platform != "win32":  # Windows can't open a folder to sync it
        descriptor = os.open(target.parent, os.O_RDONLY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)
