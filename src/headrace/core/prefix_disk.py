"""The setting `prefix_disk`: where a prefix cache is kept on disk, and how large it may be.

Values in, values out; the folder itself is looked at when the engine starts (prefix_disk/).
"""

from __future__ import annotations

import os
from typing import Any, NamedTuple

from headrace.core.checks import ErrorType
from headrace.core.errors import ConfigError
from headrace.core.sizes import parse_bytes

EXAMPLE = "/var/cache/headrace,20GiB"


class PrefixDisk(NamedTuple):
    folder: str  # absolute
    most_bytes: int


def read_prefix_disk(
    text: str, param: str = "prefix_disk", error: ErrorType = ConfigError
) -> PrefixDisk:
    """Reads "DIR,SIZE". A folder's name may have commas: the size is after the last one."""
    folder, comma, size = text.rpartition(",")
    if not comma or not folder.strip():
        raise error(
            f"{param} is {text[:200]!r}; expected a folder and a size, as in {EXAMPLE}.",
            "Write DIR,SIZE: the size is the most that all files there may take.",
            param=param,
        )
    try:
        most_bytes = parse_bytes(size, param)
    except ConfigError:
        raise error(
            f"{param} is {text[:200]!r}, whose size is {size.strip()[:40]!r}; expected a number of "
            "bytes, or a number and a unit such as 20GiB.",
            f"Write DIR,SIZE, as in {EXAMPLE}.",
            param=param,
        ) from None
    return PrefixDisk(os.path.abspath(os.path.expanduser(folder.strip())), most_bytes)


class PrefixDiskText:
    """The rule of the setting; kept as it was written."""

    def settled(self, param: str, value: Any, error: ErrorType) -> str:
        text = value if isinstance(value, str) else str(value)
        read_prefix_disk(text, param, error)
        return text
