"""How fast requests leave the queue, estimated from those that left. Knows counts and times."""

from __future__ import annotations

import math

MEMORY_S = 30.0  # time constant, in seconds during which requests were waiting
FEWEST_STARTS = 8  # with fewer starts there is no estimate


class Rate:
    """How fast requests, and their prompt tokens, leave the queue.

    All sums decay together, only while requests wait: a pause without requests says nothing about
    the engine's speed.
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
        # The time that is added decays too while it passes.
        self._busy_s = self._busy_s * fade + MEMORY_S * (1 - fade)

    def count(self, prompt_tokens: int) -> None:
        self._seen += 1
        self._starts += 1
        self._tokens += prompt_tokens

    def wait_s(self, requests: float, tokens: float) -> float | None:
        """Seconds until that many requests and tokens have left; None: not known."""
        if self._seen < FEWEST_STARTS:
            return None
        # In a queue that stands still both decay to nothing, and the wait grows without bound.
        starts, seen_tokens = max(self._starts, 1e-6), max(self._tokens, 1e-6)
        return self._busy_s * max(requests / starts, tokens / seen_tokens)
