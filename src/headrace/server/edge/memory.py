"""Returns freed memory to the system, which the C library would otherwise keep.

Only glibc needs this; with another C library nothing is done.
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
    except (OSError, AttributeError):  # musl has no malloc_trim
        return None
    return library


def give_back() -> None:
    library = _library()
    if library is not None:
        library.malloc_trim(0)
