"""The folder for a user's small persistent files: the history of `chat`, a record of each running
server, and the hashes of files. Unlike the cache it is private.

Knows the folder; not the contents of the files in it.
"""

from __future__ import annotations

import os
from pathlib import Path

from headrace.core.folders import UserFolder

_STATE = UserFolder(
    variable="HEADRACE_STATE",
    xdg_variable="XDG_STATE_HOME",
    holds="state",
    linux=".local/state/headrace",
    macos="Library/Application Support/headrace",
    windows="headrace-state",
)


def state_folder() -> Path:
    """$HEADRACE_STATE, else $XDG_STATE_HOME/headrace, else the platform's own place."""
    return _STATE.path()


def make_private(folder: Path) -> Path:
    """Creates the folder, readable by its owner only, if it does not exist."""
    folder.mkdir(parents=True, exist_ok=True, mode=0o700)
    return folder


def open_private(path: Path, flags: int) -> int:
    """A descriptor of a file that only its owner may read. Does not follow symbolic links."""
    flags |= os.O_CREAT | getattr(os, "O_CLOEXEC", 0) | getattr(os, "O_NOFOLLOW", 0)
    descriptor = os.open(path, flags, 0o600)
    if hasattr(os, "fchmod"):  # an existing file may be readable by others
        os.fchmod(descriptor, 0o600)
    return descriptor
