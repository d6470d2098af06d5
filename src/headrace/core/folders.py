"""Default folders for a user's files: from an environment variable, else the platform's default.

Knows the rules of each platform; not what is kept in the folders (see core/state.py and
fetch/model_folder.py).
"""

from __future__ import annotations

import os
import sys
from dataclasses import dataclass
from pathlib import Path

from headrace.core.errors import ConfigError


@dataclass(frozen=True, slots=True, kw_only=True)
class UserFolder:
    """One kind of files, with its place on each platform."""

    variable: str  # takes precedence if it is set
    xdg_variable: str
    holds: str  # for a sentence
    linux: str  # below the home folder, as the others
    macos: str
    windows: str  # below %LOCALAPPDATA%

    def path(self) -> Path:
        if chosen := os.environ.get(self.variable):
            return Path(chosen).expanduser().absolute()
        xdg = os.environ.get(self.xdg_variable, "")
        if os.path.isabs(xdg):  # the XDG specification says to ignore relative paths
            return Path(xdg) / "headrace"
        try:
            home = Path.home()
        except RuntimeError:
            raise ConfigError(
                f"There is no home folder to keep {self.holds} in.",
                f"Set {self.variable} to a folder you may write to.",
                param=self.variable,
            ) from None
        if sys.platform == "darwin":
            return home / self.macos
        if sys.platform == "win32":
            return Path(os.environ.get("LOCALAPPDATA", home / "AppData" / "Local")) / self.windows
        return home / self.linux
