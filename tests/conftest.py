"""Fixtures that several folders share: the default model, and a cache that may be broken.

A machine that runs the CUDA tests has pytest and what those need, and perhaps no more: what else is
imported here may be missing there.
"""

from __future__ import annotations

import importlib.util
import os
import signal
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
from tests import marks

from headrace.fetch.resolve import resolve_model

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


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    return marks.leaves_out(config, collection_path) or None


# First: the marks must be there when -m chooses among tests.
@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    marks.mark(items)


@pytest.fixture(scope="session")
def default_model_path() -> Path:
    """The default model's GGUF in the user's own cache, fetched on first need. Read it only."""
    return resolve_model(None)


@pytest.fixture(scope="session")
def default_reader(default_model_path: Path) -> Iterator[Any]:
    """The default model's file as the gguf package reads it, in 4 s: once, and while there is one
    transformers gets this one too."""
    import gguf

    made = gguf.GGUFReader
    whole = made(default_model_path)

    def read(path: str | Path, *rest: Any) -> Any:
        return whole if Path(path) == default_model_path and not rest else made(path, *rest)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(gguf, "GGUFReader", read)
        yield whole


@pytest.fixture(scope="session", autouse=True)
def own_state(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """No test leaves a history or a note of a server among the user's own."""
    folder = tmp_path_factory.mktemp("state")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("HEADRACE_STATE", str(folder))
        yield folder


@pytest.fixture
def empty_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A cache of this test's own: nothing done in it reaches the user's."""
    folder = tmp_path / "cache"
    monkeypatch.setenv("HEADRACE_CACHE", str(folder))
    monkeypatch.delenv("HEADRACE_OFFLINE", raising=False)
    return folder


# The command line with a stand-in for the model; tests/cli_harness.py has the rest.


@pytest.fixture
def model(tmp_path: Path, empty_cache: Path) -> str:
    """Any file will do: the stand-in does not open it."""
    path = tmp_path / "any.gguf"
    path.write_bytes(b"GGUF")
    return str(path)


@pytest.fixture
def fake(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """A headrace.llm with no model behind it, in the place of the real one."""
    place = Path(__file__).with_name("fake_llm.py")
    spec = importlib.util.spec_from_file_location("headrace.llm", place)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    monkeypatch.setitem(sys.modules, "headrace.llm", module)
    return module


@pytest.fixture
def invoke(fake: ModuleType, monkeypatch: pytest.MonkeyPatch) -> Callable[..., Any]:
    """The command in this process: arguments, and what is typed."""
    from typer.testing import CliRunner

    from headrace.cli.commands import app

    monkeypatch.delenv("HEADRACE_DEBUG", raising=False)

    def call(*arguments: str, typed: str | bytes | None = None) -> Any:
        return CliRunner().invoke(app, list(arguments), input=typed)

    return call
