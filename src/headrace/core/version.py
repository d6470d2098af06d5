"""Which Headrace this is."""

from __future__ import annotations


def headrace_version() -> str:
    from importlib import metadata  # late: it costs more than most commands' own work

    try:
        return metadata.version("headrace")
    except metadata.PackageNotFoundError:  # run from a source tree that was never installed
        return "unknown"
