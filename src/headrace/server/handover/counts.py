"""What is counted about hand-overs, on either side. Threads count; the loop's thread reads."""

from __future__ import annotations

import threading
from collections import Counter

from headrace.server.handover.frames import Cause, End

WHOLE = "whole"  # every block that was asked for


class HandoverCounts:
    def __init__(self) -> None:
        self._lock = threading.Lock()
        self.outcomes: Counter[str] = Counter()  # WHOLE, or the cause of what was missing
        self.bytes = 0
        self.seconds = 0.0  # of all of them, from the first byte to the last
        self.blocks = 0  # that were put to use
        self.skipped = 0  # prompts that had too few blocks missing

    def done(self, end: End | None, size: int, seconds: float) -> None:
        cause = None if end is None else end.cause
        with self._lock:
            self.outcomes[WHOLE if cause is None else str(cause)] += 1
            self.bytes += size
            self.seconds += seconds

    def refused(self, cause: Cause) -> None:
        with self._lock:
            self.outcomes[str(cause)] += 1
