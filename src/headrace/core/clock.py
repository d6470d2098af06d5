"""Clocks that can be swapped: the machine's, or one that only moves when it is told to."""

from __future__ import annotations

import time
from typing import Protocol


class Clock(Protocol):
    def now_s(self) -> float:
        """Seconds from some fixed point; never goes back."""
        ...


class WallClock:
    def now_s(self) -> float:
        return time.monotonic()


class VirtualClock:
    def __init__(self, start_s: float = 0.0) -> None:
        self._now_s = start_s

    def now_s(self) -> float:
        return self._now_s

    def advance(self, seconds: float) -> None:
        if seconds < 0:
            raise ValueError(f"time went back by {-seconds} s")
        self._now_s += seconds
