"""Fixtures that several folders share: the default model, and a cache that may be broken.

A machine that runs the CUDA tests has pytest and what those need, and perhaps no more: what else is
imported here may be missing there.
"""

from __future__ import annotations

import importlib.util
import os
import signal
from pathlib import Path

import pytest

from headrace.models.resolve import resolve_model

# They install dozens of packages: collected only where they are named, as by `make test-clients`.
collect_ignore = ["clients"]

# Timing never decides a test, and a shared machine may stop for a second anywhere.
# CI runs the same examples every time; on a developer's machine every run looks for new ones.
if importlib.util.find_spec("hypothesis") is not None:
    from hypothesis import settings

    settings.register_profile("headrace", deadline=None, derandomize=bool(os.environ.get("CI")))
    settings.load_profile("headrace")

# Started in the background by a shell, we inherit that SIGINT is ignored, and so would every
# process that a test starts and then interrupts.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)


def pytest_addoption(parser: pytest.Parser, pluginmanager: pytest.PytestPluginManager) -> None:
    if importlib.util.find_spec("pytest_timeout") is None:
        parser.addini("timeout", "pytest-timeout's, which is not installed: nothing is timed out")


@pytest.fixture(scope="session")
def default_model_path() -> Path:
    """The default model's GGUF in the user's own cache, fetched on first need. Read it only."""
    return resolve_model(None)


@pytest.fixture
def empty_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A cache of this test's own: nothing done in it reaches the user's."""
    folder = tmp_path / "cache"
    monkeypatch.setenv("HEADRACE_CACHE", str(folder))
    monkeypatch.delenv("HEADRACE_OFFLINE", raising=False)
    return folder
