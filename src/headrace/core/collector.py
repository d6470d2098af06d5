"""Python's garbage collector, out of the way of steps.

Every step creates and drops a few objects for each of its sequences. With Python's default
thresholds, a hundred steps or so trigger a full collection, which visits every object of every
imported module: with torch that takes 100 ms, during which the device is idle. Objects that are not
part of a reference cycle are freed without the collector, so this only delays finding cycles.
"""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager

# How many new objects trigger a collection of the youngest generation. Two steps in flight with 512
# sequences hold about 5,000 short-lived ones: in a steady state no collection is triggered at all.
YOUNG_OBJECTS = 20_000


def settle() -> None:
    """Exclude all objects that exist now from collections. Call once, when everything is loaded."""
    gc.collect()
    gc.freeze()


def unsettle() -> None:
    """Undo `settle` before the process exits, so that the interpreter can free everything."""
    gc.unfreeze()


@contextmanager
def rarely() -> Iterator[None]:
    """Make collections rare inside of the block. A threshold that is already higher is kept, and so
    is 0 (off)."""
    before = gc.get_threshold()
    if before[0]:
        gc.set_threshold(max(before[0], YOUNG_OBJECTS), *before[1:])
    try:
        yield
    finally:
        gc.set_threshold(*before)
