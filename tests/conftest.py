"""Fixtures that several folders share: the default model, and a cache that may be broken."""

from __future__ import annotations

import os
import signal
from pathlib import Path

import pytest
from hypothesis import settings

from headrace.models.resolve import resolve_model

# Timing never decides a test, and a shared machine may stop for a second anywhere.
# CI runs the same examples every time; on a developer's machine every run looks for new ones.
settings.register_profile("headrace", deadline=None, derandomize=bool(os.environ.get("CI")))
settings.load_profile("headrace")

# Started in the background by a shell, we inherit that SIGINT is ignored, and so would every
# process that a test starts and then interrupts.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)


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
