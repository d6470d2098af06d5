"""Memory that was used and is free, given back to the system: the C library keeps it otherwise.

glibc alone needs to be asked; where there is another, nothing is done.
"""

from __future__ import annotations

import ctypes
import sys
from functools import cache


@cache
def _library() -> ctypes.CDLL | None:
    if not sys.platform.startswith("linux"):
        return None
    try:
        library = ctypes.CDLL(None)
        library.malloc_trim.argtypes = [ctypes.c_size_t]
        library.malloc_trim.restype = ctypes.c_int
    except (OSError, AttributeError):  # musl has none
        return None
    return library


def give_back() -> None:
    library = _library()
    if library is not None:
        library.malloc_trim(0)
