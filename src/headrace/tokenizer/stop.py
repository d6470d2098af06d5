"""Stop strings in a stream of text.

Text that may be the beginning of a stop string is held back until it is clear. It knows nothing
of tokens: a stop string may span any number of pushes, or begin in the middle of one.
"""

from __future__ import annotations

from collections.abc import Sequence

from headrace.core.bounds import shown
from headrace.core.errors import InvalidRequestError


class _Pattern:
    """One stop string, for any number of texts (Knuth-Morris-Pratt). The failure table is computed
    lazily, as far as a text has matched: a long stop string that no text begins with costs nothing.
    """

    def __init__(self, stop: str) -> None:
        self.stop = stop
        # [n]: the longest proper prefix of stop[:n] that is also its suffix.
        self._fallback = [0, 0]

    def advance(self, matched: int, character: str) -> int:
        """How many of its characters the text ends with after this character, given how many it
        ended with before."""
        stop = self.stop
        while matched and stop[matched] != character:
            matched = self._fall_back(matched)
        return matched + (stop[matched] == character)

    def _fall_back(self, length: int) -> int:
        stop, fallback = self.stop, self._fallback
        for place in range(len(fallback) - 1, length):
            shorter = fallback[place]
            while shorter and stop[place] != stop[shorter]:
                shorter = fallback[shorter]
            fallback.append(shorter + (stop[place] == stop[shorter]))
        return fallback[length]


class StopStrings:
    """A request's stop strings, prepared once for all of its continuations."""

    def __init__(self, stops: Sequence[str]) -> None:
        if not all(isinstance(stop, str) and stop for stop in stops):
            raise InvalidRequestError(
                f"stop is {shown(list(stops))}; expected non-empty strings.",
                "Leave empty ones out.",
                param="stop",
            )
        self.patterns = tuple(_Pattern(stop) for stop in stops)


class StopChecker:
    """Cuts a text before the first stop string to be completed (of two at once, the longer).

    What is emitted does not depend on how the text is cut into pushes.
    """

    def __init__(self, stops: StopStrings | Sequence[str]) -> None:
        strings = stops if isinstance(stops, StopStrings) else StopStrings(stops)
        self._patterns = strings.patterns
        self._matched = [0] * len(self._patterns)  # how much of each the text ends with
        self._held = ""
        self._stopped = False
        self.met: str | None = None  # the stop string that ended the text

    def push(self, text: str) -> tuple[str, bool]:
        """Text that is safe to show, and whether a stop string was met; nothing follows one."""
        if self._stopped:
            return "", True
        if not self._patterns:
            return text, False
        pending = self._held + text
        matched = self._matched
        for place in range(len(self._held), len(pending)):
            character, complete = pending[place], ""
            for number, pattern in enumerate(self._patterns):  # each must see the character
                matched[number] = length = pattern.advance(matched[number], character)
                if length == len(pattern.stop) and length > len(complete):
                    complete = pattern.stop
            if complete:
                self._held, self._stopped, self.met = "", True, complete
                return pending[: place + 1 - len(complete)], True
        safe = len(pending) - max(matched)
        self._held = pending[safe:]
        return pending[:safe], False

    def finish(self) -> str:
        """The text held back for a stop string that did not come."""
        held, self._held = self._held, ""
        return held
