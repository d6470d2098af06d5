"""What a simulation does to its process while it runs: fewer garbage collections, and no log line
for every preemption (there may be thousands, and the report counts them)."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager

from headrace.core.collector import rarely


@contextmanager
def undisturbed() -> Iterator[None]:
    log = logging.getLogger("headrace.engine")
    before = log.level
    log.setLevel(max(before, logging.ERROR))
    try:
        with rarely():
            yield
    finally:
        log.setLevel(before)
