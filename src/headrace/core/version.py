"""The version of Headrace, and how to install an extra."""

from __future__ import annotations


def headrace_version() -> str:
    from importlib import metadata  # imported late: it takes longer than most commands

    try:
        return metadata.version("headrace")
    except metadata.PackageNotFoundError:
        return _of_source_tree()


def _of_source_tree() -> str:
    """For a source tree that was never installed: the version in its pyproject.toml."""
    import tomllib
    from pathlib import Path

    try:
        text = (Path(__file__).parents[3] / "pyproject.toml").read_text("utf-8")
        project = tomllib.loads(text)["project"]
        return str(project["version"]) if project["name"] == "headrace" else "unknown"
    except (OSError, ValueError, KeyError):
        return "unknown"


def install_extra(name: str) -> str:
    """A sentence for a remedy. Installs from a checkout, as Headrace is on no package index yet."""
    return f"In Headrace's checkout, run pip install '.[{name}]'"
