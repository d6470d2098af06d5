"""The native module as other compilers build it gives the same bits, and passes its own tests.

Slow (`make test-slow`): every compiler that is installed builds all of it.
"""

from __future__ import annotations

import os
import site
import sys
import sysconfig
from pathlib import Path

import pytest
from tests.compilers import builds

pytestmark = [pytest.mark.builds, pytest.mark.timeout(7200)]

NAMES = [f"g++-{n}" for n in range(11, 16)] + [f"clang++-{n}" for n in range(14, 23)]
COMPILERS = [name for name in NAMES if builds.newest(name)]
TESTS = ("bits", "ops", "attention", "sampling")
# An editable install finds our package before any folder does: without `site`, it is not there.
START = (
    "import os, sys; sys.path[:0] = sys.argv.pop(1).split(os.pathsep); "
    "import pytest; sys.exit(pytest.main())"
)


def test_there_are_compilers() -> None:
    assert COMPILERS, "apt-get install g++-11 clang-14 clang-16 (or others of 11 and 14 and newer)"


@pytest.mark.parametrize("compiler", COMPILERS)
def test_a_build(tmp_path: Path, compiler: str) -> None:
    builds.configure(tmp_path / "build", compiler)
    suffix = sysconfig.get_config_var("EXT_SUFFIX")
    package = builds.package(tmp_path / "package", builds.build(tmp_path / "build"), suffix)
    folders = os.pathsep.join([str(package), str(builds.ROOT), *site.getsitepackages()])
    tests = [f"tests/backends/cpu/test_{name}.py" for name in TESTS]
    words = (sys.executable, "-S", "-c", START, folders, "-q", *tests)
    said = builds.run(*words, env={"PYTHONPATH": ""})
    print(said)
    assert " passed" in said
