"""How much of the machine others took while something was measured, from /proc (Linux).

A run beside others measures them, too. Knows processor time, and nothing of what is measured.
"""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path


@dataclass(slots=True)
class Share:
    """0 to 1, of all cores; 0 where it is not known."""

    of_others: float = 0.0


@contextmanager
def watched() -> Iterator[Share]:
    share = Share()
    before_s, own_s, began_s = busy_s(), time.process_time(), time.perf_counter()
    yield share
    now_s = busy_s()
    if before_s is not None and now_s is not None:
        others_s = (now_s - before_s) - (time.process_time() - own_s)
        whole_s = (time.perf_counter() - began_s) * (os.cpu_count() or 1)
        share.of_others = max(0.0, others_s / whole_s)


def busy_s() -> float | None:
    """Of all cores together: user, nice, system, interrupts, and what the host took away."""
    try:
        fields = Path("/proc/stat").read_text().split("\n", 1)[0].split()
    except OSError:
        return None
    ticks = [int(field) for field in fields[1:9]]
    return (sum(ticks) - ticks[3] - ticks[4]) / os.sysconf("SC_CLK_TCK")
