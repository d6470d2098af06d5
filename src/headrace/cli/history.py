"""What was typed into `chat`, kept between sessions: private, bounded, one JSON string per line.

In our own format, since each line-editing library has a different one. Knows only a file; the chat
works without a history where the file can't be written.
"""

from __future__ import annotations

import contextlib
import json
import os
from pathlib import Path

from headrace.core.errors import HeadraceError
from headrace.core.state import make_private, open_private, state_folder

MAX_ENTRIES = 1000
MAX_ENTRY_CHARACTERS = 10_000  # a longer one was pasted, and is of no use in a history


def history_path() -> Path:
    return state_folder() / "chat_history.jsonl"


class History:
    def __init__(self, path: Path) -> None:
        self._path = path
        self._last = ""

    def load(self) -> list[str]:
        """Oldest first, the latest MAX_ENTRIES. The file is cut to them where it has grown."""
        try:
            lines = self._path.read_text("utf-8", errors="replace").splitlines()
        except (OSError, HeadraceError):
            return []
        kept = []
        for line in lines[-MAX_ENTRIES:]:
            with contextlib.suppress(ValueError):
                entry = json.loads(line)
                if isinstance(entry, str) and entry:
                    kept.append(entry)
        if len(lines) > MAX_ENTRIES:
            self._rewrite(kept)
        self._last = kept[-1] if kept else ""
        return kept

    def add(self, text: str) -> bool:
        """Returns whether it was added: a repeat of the last entry is not. Written at once, so that
        a session that is killed loses nothing."""
        if not text.strip() or text == self._last or len(text) > MAX_ENTRY_CHARACTERS:
            return False
        self._last = text
        with contextlib.suppress(OSError, HeadraceError):
            make_private(self._path.parent)
            self._append(f"{json.dumps(text)}\n")
        return True

    def _append(self, line: str) -> None:
        descriptor = open_private(self._path, os.O_WRONLY | os.O_APPEND)
        try:
            os.write(descriptor, line.encode())
        finally:
            os.close(descriptor)

    def _rewrite(self, entries: list[str]) -> None:
        fresh = self._path.with_suffix(f".{os.getpid()}")
        with contextlib.suppress(OSError):
            descriptor = open_private(fresh, os.O_WRONLY | os.O_TRUNC)
            with os.fdopen(descriptor, "w", encoding="utf-8") as file:
                file.writelines(f"{json.dumps(entry)}\n" for entry in entries)
            os.replace(fresh, self._path)
