"""The kernels' own tests on 64-bit ARM, emulated: built here by a cross compiler, run under qemu.

Slow (`make test-slow`). One processor has dot products of bytes, the other has not. What they
compute is checked, to the last bit; how fast they are can't be seen here.
"""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from tests.compilers import builds
from tests.compilers.arm_root import ArmRoot

pytestmark = [pytest.mark.builds, pytest.mark.timeout(7200)]

TESTS = [f"tests/backends/cpu/test_{name}.py" for name in ("bits", "ops", "attention", "sampling")]
TOOLS = "apt-get install g++-aarch64-linux-gnu qemu-user"


@pytest.fixture(scope="module")
def arm() -> ArmRoot:
    for tool in ("aarch64-linux-gnu-g++", "qemu-aarch64", "apt-get", "dpkg-deb"):
        builds.need(builds.newest(tool), f"{tool} ({TOOLS})")
    cache = os.environ.get("XDG_CACHE_HOME", str(Path.home() / ".cache"))
    return ArmRoot(Path(cache) / "headrace-tests/arm64")


@pytest.fixture(scope="module")
def package(arm: ArmRoot, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("arm")
    builds.configure(
        folder / "build",
        "aarch64-linux-gnu-g++",
        *("-DCMAKE_SYSTEM_NAME=Linux", "-DCMAKE_SYSTEM_PROCESSOR=aarch64"),
        *(
            f"-DPython_INCLUDE_DIR={arm.headers}",
            f"-DCMAKE_CXX_FLAGS=-isystem {arm.headers.parent}",
        ),
    )
    return builds.package(folder / "package", builds.build(folder / "build"), arm.suffix)


PROCESSORS = {
    "max": (["neon-dotprod", "neon", "portable"], ["neon", "dotprod"]),
    "cortex-a53": (["neon", "portable"], ["neon"]),
}


@pytest.mark.parametrize("processor", list(PROCESSORS))
def test_paths(arm: ArmRoot, package: Path, processor: str) -> None:
    show = "from headrace.backends.cpu import _native; print(*_native.paths())"
    assert arm.run(processor, package, "-c", show).split() == PROCESSORS[processor][0]


@pytest.mark.parametrize("processor", list(PROCESSORS))
def test_kernels(arm: ArmRoot, package: Path, processor: str) -> None:
    quietly = ("-m", "pytest", "-q", "-p", "no:cacheprovider", "-o", "timeout=0")
    said = arm.run(processor, package, *quietly, *TESTS)
    print(said)
    assert " passed" in said
    assert " failed" not in said
