"""The folder of small files that are a user's own and outlive a process: the history of `chat`,
and a note of each server that runs. Unlike the cache it is private.

Knows the folder; what is in its files is their writers' affair.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path

from headrace.core.errors import ConfigError


def state_folder() -> Path:
    """$HEADRACE_STATE, else $XDG_STATE_HOME/headrace, else the platform's own place."""
    if chosen := os.environ.get("HEADRACE_STATE"):
        return Path(chosen).expanduser().absolute()
    xdg = os.environ.get("XDG_STATE_HOME", "")
    if os.path.isabs(xdg):  # the XDG specification has relative values ignored
        return Path(xdg) / "headrace"
    try:
        home = Path.home()
    except RuntimeError:
        raise ConfigError(
            "There is no home folder to keep state in.",
            "Set HEADRACE_STATE to a folder you may write to.",
            param="HEADRACE_STATE",
        ) from None
    if sys.platform == "darwin":
        return home / "Library" / "Application Support" / "headrace"
    if sys.platform == "win32":
        return Path(os.environ.get("LOCALAPPDATA", home / "AppData" / "Local")) / "headrace-state"
    return home / ".local" / "state" / "headrace"


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
