"""Which Headrace this is, and how an extra is added to it."""

from __future__ import annotations


def headrace_version() -> str:
    from importlib import metadata  # late: it costs more than most commands' own work

    try:
        return metadata.version("headrace")
    except metadata.PackageNotFoundError:  # run from a source tree that was never installed
        return "unknown"


def install_extra(name: str) -> str:
    """For a remedy. From a checkout, as long as no package index has Headrace."""
    return f"In Headrace's checkout, run pip install '.[{name}]'"
