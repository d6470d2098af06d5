'''Where the messages of a conversation come from: lines of a pipe, or a terminal with editing.

A message is a line, a block between """ and """, or a paste of several lines at once. What a
message means is decided in chat.py.
'''

from __future__ import annotations

import select
import sys
from collections.abc import Callable
from typing import NamedTuple, Protocol, TextIO

from headrace.cli.history import History
from headrace.core.terminal import wants_colour

PROMPT, CONTINUED = ">>> ", "... "
MARK = '"""'
_PASTE_S = 0.03  # lines that arrive faster than this were pasted, not typed


class Typed(NamedTuple):
    text: str
    is_command_free: bool = False  # a block or a paste: a leading slash is text, not a command


class Lines(Protocol):
    def read(self, prompt: str) -> str | None:
        """The next line, or several lines pasted together; None at the end of the input."""
        ...

    def remember(self, text: str) -> None: ...


class StreamLines:
    """Lines of a pipe or a file; prompts are written to `notes` if that is a terminal."""

    def __init__(self, source: TextIO, notes: TextIO, *, prompts: bool) -> None:
        self._source, self._notes, self._prompts = source, notes, prompts

    def read(self, prompt: str) -> str | None:
        if self._prompts:
            self._notes.write(prompt)
            self._notes.flush()
        return self._source.readline() or None

    def remember(self, text: str) -> None:
        pass


class TerminalLines:
    """The standard library's line editing, where it is available. GNU readline recognizes a paste
    by the terminal's bracketed-paste marks; libedit (macOS, some builds for Linux) does not, so
    there lines that arrive faster than anyone types are taken as one message."""

    def __init__(self, history: History | None, notes: TextIO) -> None:
        self._history, self._notes = history, notes
        self._marks_pastes = False
        self._add: Callable[[str], object] = lambda text: None
        self._set_up()

    def _set_up(self) -> None:
        try:
            import readline
        except ImportError:  # Windows has no readline
            return
        self._marks_pastes = "libedit" not in (readline.__doc__ or "")
        if self._marks_pastes:
            readline.parse_and_bind("set enable-bracketed-paste on")  # Python turns it off
        readline.set_auto_history(False)
        self._add = readline.add_history
        if self._history is not None:
            for entry in self._history.load():
                self._add(entry)

    def read(self, prompt: str) -> str | None:
        try:
            text = input(self._painted(prompt))
            while not self._marks_pastes and self._more_waits():
                text += "\n" + input("")
        except EOFError:
            self._notes.write("\n")
            return None
        return text

    def remember(self, text: str) -> None:
        if self._history is None or self._history.add(text):
            self._add(text)

    def _painted(self, prompt: str) -> str:
        """Marks color codes for readline, which must know which characters have no width."""
        if not self._marks_pastes or not wants_colour(sys.stdout):
            return prompt
        return f"\x01\x1b[1;32m\x02{prompt}\x01\x1b[0m\x02"

    def _more_waits(self) -> bool:
        try:
            return bool(select.select([sys.stdin], [], [], _PASTE_S)[0])
        except (OSError, ValueError):
            return False


def read_message(lines: Lines) -> Typed | None:
    """The next message; None at the end of the input."""
    line = lines.read(PROMPT)
    if line is None:
        return None
    opening = line.strip()
    if not opening.startswith(MARK):
        text = line.strip()
        typed = Typed(text, is_command_free="\n" in text)
    else:
        typed = Typed(_read_block(lines, line.lstrip()[len(MARK) :]), is_command_free=True)
    lines.remember(line.strip() if not opening.startswith(MARK) else _marked(typed.text))
    return typed


def _read_block(lines: Lines, first: str) -> str:
    """Reads up to the closing mark, or the end of the input."""
    parts: list[str] = []
    line: str | None = first
    while line is not None:
        bare = line.rstrip()
        if bare.endswith(MARK):
            parts.append(bare[: -len(MARK)])
            break
        parts.append(line.rstrip("\n"))
        line = lines.read(CONTINUED)
    return "\n".join(parts).strip("\n")


def _marked(text: str) -> str:
    """The message as a user would type it again."""
    return f"{MARK}{text}{MARK}"
