"""tests/marks.py: every path in it exists, and a quick run has most folders in it."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
from tests import marks

EXAMPLE = """
import pytest

def test_quick(): pass

@pytest.mark.builds
def test_built(): pass

@pytest.fixture
def start_server(): pass

@pytest.fixture
def server(start_server): pass

def test_served(server): pass
"""


def test_every_slow_path_exists_and_every_slow_fixture_is_defined() -> None:
    assert [path for path in marks.PATHS if not (marks.ROOT / path).exists()] == []
    fixtures = (marks.ROOT / "tests/server/conftest.py").read_text()
    assert [name for name in marks.FIXTURES if f"def {name}(" not in fixtures] == []


def test_a_quick_run_has_something_of_every_part_but_those_named_as_a_whole() -> None:
    tests = marks.ROOT / "tests"
    parts = {p.name for p in tests.iterdir() if any(p.rglob("test_*.py"))}
    files = [path for path in tests.rglob("test_*.py") if not marks.is_slow(path)]
    quick = {path.relative_to(tests).parts[0] for path in files}
    slow = {path.removeprefix("tests/") for path in marks.PATHS if (marks.ROOT / path).is_dir()}
    assert parts - quick == slow & parts


@pytest.mark.parametrize(
    ("words", "chosen"),
    [
        ((), {"test_quick", "test_served"}),
        (("-m", "not slow"), {"test_quick"}),
        (("-m", "builds"), {"test_built"}),
    ],
)
def test_what_a_command_chooses(tmp_path: Path, words: tuple[str, ...], chosen: set[str]) -> None:
    """With the project's own settings, and tests of all three kinds."""
    (tmp_path / "conftest.py").write_text(
        "from tests import marks\n"
        "import pytest\n"
        "@pytest.hookimpl(tryfirst=True)\n"
        "def pytest_collection_modifyitems(items): marks.mark(items)\n"
    )
    (tmp_path / "test_example.py").write_text(EXAMPLE)
    command = [sys.executable, "-m", "pytest", "-c", str(marks.ROOT / "pyproject.toml")]
    command += [f"--rootdir={tmp_path}", "-p", "no:cacheprovider", "--collect-only", "-q", *words]
    said = subprocess.run(
        [*command, str(tmp_path)], cwd=marks.ROOT, capture_output=True, text=True, check=False
    )
    found = {line.partition("::")[2] for line in said.stdout.splitlines() if "::" in line}
    assert found == chosen, said.stdout + said.stderr
