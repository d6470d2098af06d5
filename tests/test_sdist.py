"""The sdist has what builds the wheel and nothing else; a wheel from it works by itself."""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
import tarfile
import venv
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
MAKE = "import sys, scikit_build_core.build as b; print(b.build_sdist(sys.argv[1]))"
AT_THE_TOP = {"CHANGELOG.md", "CMakeLists.txt", "CONTRIBUTING.md", "LICENSE", "PKG-INFO",
              "README.md", "pyproject.toml", "docs", "src"}  # fmt: skip


def run(*words: str | Path, cwd: Path = ROOT) -> str:
    environment = dict(os.environ)
    if cwd != ROOT:
        environment.pop("PYTHONPATH", None)  # the sources must not be found
    done = subprocess.run(words, cwd=cwd, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.fixture(scope="module")
def sdist(tmp_path_factory: pytest.TempPathFactory) -> Path:
    if importlib.util.find_spec("scikit_build_core") is None:
        pytest.skip("scikit-build-core is not installed in this environment")
    folder = tmp_path_factory.mktemp("sdist")
    run(sys.executable, "-c", MAKE, folder)
    (made,) = folder.glob("headrace-*.tar.gz")
    return made


def test_the_sdist_has_all_sources_and_nothing_else(sdist: Path) -> None:
    with tarfile.open(sdist) as archive:
        found = {Path(*Path(name).parts[1:]) for name in archive.getnames()}
    assert {path.parts[0] for path in found} == AT_THE_TOP
    tracked = run("git", "ls-files", "src", "docs").split()
    assert len(tracked) > 200
    inside = {str(path) for path in found if path.parts[0] in ("src", "docs")}
    assert {*tracked} - inside == set()
    others = run("git", "ls-files", "--others", "--exclude-standard", "src", "docs").split()
    assert inside - {*tracked, *others} == set()  # no cache, no module that was built here


@pytest.mark.builds
@pytest.mark.timeout(3600)
def test_a_wheel_from_the_sdist_works_without_the_sources(sdist: Path, tmp_path: Path) -> None:
    with tarfile.open(sdist) as archive:
        archive.extractall(tmp_path, filter="data")
    (source,) = (path for path in tmp_path.iterdir() if path.is_dir())
    venv.create(tmp_path / "venv", with_pip=True)
    python = tmp_path / "venv/bin/python"
    pip = (python, "-m", "pip")
    run(*pip, "wheel", "--quiet", "--no-deps", "-w", tmp_path, source, cwd=tmp_path)
    (wheel,) = tmp_path.glob("headrace-*.whl")
    run(*pip, "install", "--quiet", wheel, cwd=tmp_path)
    source.rename(tmp_path / "gone")
    assert run(tmp_path / "venv/bin/headrace", "--version", cwd=tmp_path).startswith("headrace ")
    assert str(tmp_path / "venv") in run(python, "-I", ROOT / "tests/wheel_check.py", cwd=tmp_path)
    here = "import headrace, pathlib as p; print(*p.Path(headrace.__file__).parent.rglob('*'))"
    names = {Path(name).name for name in run(python, "-I", "-c", here, cwd=tmp_path).split()}
    assert {"py.typed", "choices.json", "_native.pyi"} <= names
    assert {"gpus.toml", "cpus.toml", "engines.toml", "api_prices.toml"} <= names
    assert "kernels.h" not in names
