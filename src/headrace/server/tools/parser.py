"""Finds tool calls in an answer while it is generated, however it is cut into pieces.

The grammar of formats.py makes the model keep to the format parsed here; anything else is passed on
as text. Knows the format's texts; neither tokens nor OpenAI's shapes.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass, field

from headrace.server.tools.formats import ToolFormat

_IN_STRING = re.compile(r'["\\]')
_OUTSIDE = re.compile(r'["{}\[\]]')


@dataclass(frozen=True, slots=True)
class Content:
    text: str


@dataclass(frozen=True, slots=True)
class CallStart:
    index: int
    call_id: str
    name: str


@dataclass(frozen=True, slots=True)
class Arguments:
    """The next piece of a call's arguments: JSON as the model wrote it."""

    index: int
    text: str


@dataclass(frozen=True, slots=True)
class CallEnd:
    """The call's arguments are complete."""

    index: int


Piece = Content | CallStart | Arguments | CallEnd


class CallParser:
    """Takes one answer's text and returns text and calls. At most a tag and the whitespace before
    it are held back."""

    def __init__(self, tool_format: ToolFormat) -> None:
        self._format = tool_format
        self._pending = ""
        self._out: list[Piece] = []
        self._index = -1  # of the last call
        self.whole_calls = 0
        self._json = _ObjectEnd()
        self._state: Callable[[], bool] = self._text if tool_format.opening else self._beginning

    def push(self, text: str) -> list[Piece]:
        self._pending += text
        while self._pending and self._state():
            pass
        out, self._out = self._out, []
        return out

    def finish(self) -> list[Piece]:
        """Returns the text that was held back and is not a tag. The beginning of a call is left
        out."""
        held, self._pending = self._pending, ""
        return [Content(held)] if held and self._state == self._text else []

    # Each state consumes what it can of the pending text, and returns whether the next state should
    # run.

    def _text(self) -> bool:
        opening = self._format.opening
        place = self._pending.find(opening)
        if place < 0:
            self._emit(len(self._pending) - _held_back(self._pending, opening))
            return False
        self._emit(len(self._pending[:place].rstrip()))
        self._pending = self._pending.lstrip()[len(opening) :]
        self._state = self._first
        return True

    def _beginning(self) -> bool:
        """For formats in which only a whole answer can be a call."""
        return self._take(self._format.first, self._name)

    def _first(self) -> bool:
        if self._format.is_padded:
            self._pending = self._pending.lstrip(" ")
        return self._take(self._format.first, self._name)

    def _name(self) -> bool:
        name, quote, _ = self._pending.partition('"')
        if not quote:
            return False
        self._index += 1
        self._out.append(CallStart(self._index, self._format.new_id(), name))
        self._pending = self._pending[len(name) :]
        self._state = self._middle
        return True

    def _middle(self) -> bool:
        self._json = _ObjectEnd()
        return self._take(self._format.middle, self._arguments)

    def _arguments(self) -> bool:
        length = self._json.find(self._pending)
        taken = self._pending if length is None else self._pending[:length]
        self._out.append(Arguments(self._index, taken))
        self._pending = self._pending[len(taken) :]
        if length is None:
            return False
        self._out.append(CallEnd(self._index))
        self.whole_calls += 1
        self._state = self._trail
        return True

    def _trail(self) -> bool:
        return self._take(self._format.trail, self._next)

    def _next(self) -> bool:
        end, again = self._format.end, self._format.again
        if end and self._pending.startswith(end):
            self._pending = self._pending[len(end) :]
            self._state = self._rest
            return True
        return self._take(again, self._name) if again else self._fail()

    def _rest(self) -> bool:
        """Plain text up to the end, even if it looks like a call."""
        self._emit(len(self._pending))
        return False

    def _take(self, expected: str, then: Callable[[], bool]) -> bool:
        if self._pending.startswith(expected):
            self._pending = self._pending[len(expected) :]
            self._state = then
            return True
        return False if expected.startswith(self._pending) else self._fail()

    def _fail(self) -> bool:
        self._state = self._rest
        return True

    def _emit(self, length: int) -> None:
        if length:
            self._out.append(Content(self._pending[:length]))
            self._pending = self._pending[length:]


def _held_back(text: str, tag: str) -> int:
    """How much of the end may be the start of the tag, or whitespace before it."""
    begun = next(
        (n for n in range(min(len(tag) - 1, len(text)), 0, -1) if text.endswith(tag[:n])), 0
    )
    return begun + len(text[: len(text) - begun]) - len(text[: len(text) - begun].rstrip())


class _ObjectEnd:
    """Finds the end of a JSON object or list that arrives in pieces."""

    def __init__(self) -> None:
        self._depth = 0
        self._in_string = False
        self._escaped = False

    def find(self, text: str) -> int | None:
        """How much of `text` belongs to the value if it ends there; else None."""
        at = 0
        if self._escaped:
            self._escaped, at = False, 1
        while found := (_IN_STRING if self._in_string else _OUTSIDE).search(text, at):
            at, sign = found.end(), found.group()
            if sign == '"':
                self._in_string = not self._in_string
            elif sign == "\\":
                self._escaped = at == len(text)
                at += 1
            else:
                self._depth += 1 if sign in "{[" else -1
                if not self._depth:
                    return at
        return None


@dataclass(slots=True)
class FoundCall:
    call_id: str
    name: str
    arguments: str = ""
    is_whole: bool = False


@dataclass(slots=True)
class ParsedAnswer:
    """Puts an answer's pieces together again."""

    content: str = ""
    calls: list[FoundCall] = field(default_factory=list)

    def add(self, pieces: list[Piece]) -> None:
        for piece in pieces:
            if isinstance(piece, Content):
                self.content += piece.text
            elif isinstance(piece, CallStart):
                self.calls.append(FoundCall(piece.call_id, piece.name))
            elif isinstance(piece, Arguments):
                self.calls[piece.index].arguments += piece.text
            else:
                self.calls[piece.index].is_whole = True

    @property
    def whole_calls(self) -> list[FoundCall]:
        """The calls, without one that max_tokens cut off."""
        return [call for call in self.calls if call.is_whole]


def parse_answer(tool_format: ToolFormat, text: str) -> ParsedAnswer:
    parser, answer = CallParser(tool_format), ParsedAnswer()
    answer.add(parser.push(text))
    answer.add(parser.finish())
    return answer
