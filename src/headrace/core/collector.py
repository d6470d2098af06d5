"""Python's garbage collector, out of the way of steps.

Every step makes and drops a few objects for each of its sequences. By Python's own thresholds some
hundred such steps make a full pass due, and a full pass looks at whatever a process has imported:
with torch that takes a hundred milliseconds, in which the device has nothing to do. What refers to
nothing in a circle is freed without the collector; all this changes is how soon circles are found.
"""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager

# Objects more than at the last pass before the youngest are looked at. Two steps in flight of 512
# sequences hold some 5,000, which come and go: in a steady state no pass is due at all.
YOUNG_OBJECTS = 20_000


def settle() -> None:
    """What is here now stays: no pass need look at it again. Once, when everything is loaded."""
    gc.collect()
    gc.freeze()


def unsettle() -> None:
    """At the end: the interpreter lets go of everything, and says if it can't."""
    gc.unfreeze()


@contextmanager
def rarely() -> Iterator[None]:
    """Passes are rare meanwhile. A threshold that is higher already stays, and so does 0: off."""
    before = gc.get_threshold()
    if before[0]:
        gc.set_threshold(max(before[0], YOUNG_OBJECTS), *before[1:])
    try:
        yield
    finally:
        gc.set_threshold(*before)
