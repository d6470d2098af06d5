"""A rate-limited log: a few lines per second for each event, and how many were left out.

For lines that any client can cause, as fast as it can connect. Metrics count all of them. Knows
time; logs.py writes the lines.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from typing import Any

LINES_PER_S = 5


class SparingLog:
    def __init__(
        self,
        logger: logging.Logger,
        lines_per_s: int = LINES_PER_S,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._logger = logger
        self._lines_per_s = lines_per_s
        self._clock = clock
        self._windows: dict[str, _Window] = {}

    def info(self, event: str, message: str, *values: object, **extra: Any) -> None:
        left_out = self.allow(event)
        if left_out is not None:
            more = {"left_out": left_out} if left_out else {}
            self._logger.info(message, *values, extra={"event": event, **extra, **more})

    def allow(self, event: str) -> int | None:
        """How many lines were left out before this one; None: leave this one out too."""
        window = self._windows.setdefault(event, _Window())
        now_s = self._clock()
        if now_s - window.began_s >= 1.0:
            window.began_s, window.lines = now_s, 0
        if window.lines >= self._lines_per_s:
            window.left_out += 1
            return None
        window.lines += 1
        left_out, window.left_out = window.left_out, 0
        return left_out


class _Window:
    def __init__(self) -> None:
        self.began_s = float("-inf")
        self.lines = 0
        self.left_out = 0  # since the last line
