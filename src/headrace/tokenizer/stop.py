"""Stop strings in a stream of text.

Text that may be the beginning of a stop string is held back until it is clear. It knows nothing
of tokens: a stop string may span any number of pushes, or begin in the middle of one.
"""

from __future__ import annotations

from collections.abc import Sequence

from headrace.core.errors import InvalidRequestError


class _Matcher:
    """How much of one stop string the text so far ends with (Knuth, Morris and Pratt)."""

    def __init__(self, stop: str) -> None:
        self.stop = stop
        self.matched = 0
        # fallback[n]: the longest proper prefix of stop[:n] that is also its suffix.
        self._fallback = [0] * (len(stop) + 1)
        length = 0
        for place in range(1, len(stop)):
            while length and stop[place] != stop[length]:
                length = self._fallback[length]
            length += stop[place] == stop[length]
            self._fallback[place + 1] = length

    def advance(self, character: str) -> bool:
        """Take one character; whether the stop string is now complete."""
        while self.matched and self.stop[self.matched] != character:
            self.matched = self._fallback[self.matched]
        self.matched += self.stop[self.matched] == character
        return self.matched == len(self.stop)


class StopChecker:
    """Cuts a text before the first stop string to be completed (of two at once, the longer).

    What is emitted does not depend on how the text is cut into pushes.
    """

    def __init__(self, stops: Sequence[str]) -> None:
        if not all(isinstance(stop, str) and stop for stop in stops):
            raise InvalidRequestError(
                f"stop is {list(stops)!r}; expected non-empty strings.",
                "Leave empty ones out.",
                param="stop",
            )
        self._matchers = [_Matcher(stop) for stop in stops]
        self._held = ""
        self._stopped = False
        self.met: str | None = None  # the stop string that ended the text

    def push(self, text: str) -> tuple[str, bool]:
        """Text that is safe to show, and whether a stop string was met; nothing follows one."""
        if self._stopped:
            return "", True
        if not self._matchers:
            return text, False
        pending = self._held + text
        for place in range(len(self._held), len(pending)):
            # Every matcher must see the character; no short circuit.
            complete = [m for m in self._matchers if m.advance(pending[place])]
            if complete:
                self._held, self._stopped = "", True
                self.met = max((matcher.stop for matcher in complete), key=len)
                return pending[: place + 1 - len(self.met)], True
        safe = len(pending) - max(matcher.matched for matcher in self._matchers)
        self._held = pending[safe:]
        return pending[:safe], False

    def finish(self) -> str:
        """The text held back for a stop string that did not come."""
        held, self._held = self._held, ""
        return held
