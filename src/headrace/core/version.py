"""Which Headrace this is, and how an extra is added to it."""

from __future__ import annotations


def headrace_version() -> str:
    from importlib import metadata  # late: it costs more than most commands' own work

    try:
        return metadata.version("headrace")
    except metadata.PackageNotFoundError:
        return _of_source_tree()


def _of_source_tree() -> str:
    """Of one that was never installed: what its pyproject.toml says."""
    import tomllib
    from pathlib import Path

    try:
        text = (Path(__file__).parents[3] / "pyproject.toml").read_text("utf-8")
        project = tomllib.loads(text)["project"]
        return str(project["version"]) if project["name"] == "headrace" else "unknown"
    except (OSError, ValueError, KeyError):
        return "unknown"


def install_extra(name: str) -> str:
    """For a remedy. From a checkout, as long as no package index has Headrace."""
    return f"In Headrace's checkout, run pip install '.[{name}]'"
