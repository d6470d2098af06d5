"""The error for a full disk: which path, how much is free, how much is needed.

Knows errors of the file system; not what is written.
"""

from __future__ import annotations

import errno
import os
import shutil
from pathlib import Path

from headrace.core.errors import ConfigError

_FULL = {errno.ENOSPC, errno.EDQUOT}
_SHOWN = ((1e9, "GB"), (1e6, "MB"))
ELSEWHERE = "Free some space there, or write to another disk."


class DiskFullError(ConfigError):
    """There is no room left for what is being written."""

    status = 507


def is_full(error: BaseException) -> bool:
    """Whether a full disk is the original cause of this error, however it was wrapped."""
    seen: set[int] = set()
    at: BaseException | None = error
    while at is not None and id(at) not in seen:
        seen.add(id(at))
        if isinstance(at, OSError) and at.errno in _FULL:
            return True
        at = at.__cause__ or at.__context__
    return False


def disk_full(
    path: str | os.PathLike[str] | None, remedy: str = ELSEWHERE, *, needed_bytes: int | None = None
) -> DiskFullError:
    """`path` is the file that was being written, or its folder; None: not known."""
    where = "The disk is full" if path is None else f"The disk of {os.fspath(path)} is full"
    free_bytes = None if path is None else free_at(Path(path))
    free = "" if free_bytes is None else f"{show(free_bytes)} are free"
    needed = "" if needed_bytes is None else f"{show(needed_bytes)} are needed"
    why = " and ".join(part for part in (free, needed) if part)
    return DiskFullError(f"{where}: {why}." if why else f"{where}.", remedy)


def free_at(path: Path) -> int | None:
    """Free bytes on the disk that `path` is on, or would be on; None if that is not known."""
    for place in (path, *path.parents):
        try:
            return int(shutil.disk_usage(place).free)
        except OSError:
            continue
    return None


def show(count: int) -> str:
    for unit, name in _SHOWN:
        if count >= 10 * unit:
            return f"{count / unit:,.0f} {name}"
    return f"{count / 1e6:,.0f} MB" if count >= 1e6 or count == 0 else f"{count:,} bytes"
