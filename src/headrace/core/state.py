"""The folder of small files that are a user's own and outlive a process: the history of `chat`, a
note of each server that runs, and of what was hashed. Unlike the cache it is private.

Knows the folder; what is in its files is their writers' affair.
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
    """The folder, made for its owner alone where it was not there."""
    folder.mkdir(parents=True, exist_ok=True, mode=0o700)
    return folder


def open_private(path: Path, flags: int) -> int:
    """A descriptor of a file that only its owner may read; a link in its place is not followed."""
    flags |= os.O_CREAT | getattr(os, "O_CLOEXEC", 0) | getattr(os, "O_NOFOLLOW", 0)
    descriptor = os.open(path, flags, 0o600)
    if hasattr(os, "fchmod"):  # it may have been there, open to others
        os.fchmod(descriptor, 0o600)
    return descriptor
