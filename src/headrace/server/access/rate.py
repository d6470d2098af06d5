"""How fast requests leave the queue, learnt from those that left. Knows counts and times."""

from __future__ import annotations

import math

MEMORY_S = 30.0  # how far back it looks, in seconds in which somebody waited
FEWEST_STARTS = 8  # before that many were seen nothing is known


class Rate:
    """How fast requests, and their prompt tokens, leave the queue.

    All sums fade together, by the time that is counted: a pause in which nobody came says nothing
    about how fast the engine is.
    """

    def __init__(self) -> None:
        self._seen = 0
        self._starts = 0.0
        self._tokens = 0.0
        self._busy_s = 0.0

    def pass_time(self, busy_s: float) -> None:
        fade = math.exp(-busy_s / MEMORY_S)
        self._starts *= fade
        self._tokens *= fade
        # What is added fades too while it passes.
        self._busy_s = self._busy_s * fade + MEMORY_S * (1 - fade)

    def count(self, prompt_tokens: int) -> None:
        self._seen += 1
        self._starts += 1
        self._tokens += prompt_tokens

    def wait_s(self, requests: float, tokens: float) -> float | None:
        """How long until so many requests and so many tokens have left; None: not known."""
        if self._seen < FEWEST_STARTS:
            return None
        # In a queue that stands still both fade to nothing, and the wait grows beyond all bounds.
        starts, seen_tokens = max(self._starts, 1e-6), max(self._tokens, 1e-6)
        return self._busy_s * max(requests / starts, tokens / seen_tokens)
