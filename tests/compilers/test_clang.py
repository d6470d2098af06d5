"""Every source is compiled by clang without a warning, for this machine and for a Mac.

What it makes of them is looked at in test_builds.py and test_arm.py, which take long.
"""

from __future__ import annotations

import platform
from pathlib import Path

import pytest
from tests.compilers import builds

X86_SOURCES = {"path_avx2.cpp", "path_avxvnni.cpp", "path_avx512.cpp"}
ARM_SOURCES = {"path_neon.cpp", "path_dotprod.cpp"}


@pytest.mark.timeout(900)
def test_for_this_machine(tmp_path: Path) -> None:
    machine = platform.machine()
    compiler = builds.need(
        builds.clang() or builds.zig(tmp_path, f"{machine}-linux-gnu"), "clang or ziglang"
    )
    builds.configure(tmp_path / "build", compiler)
    ours = builds.commands(tmp_path / "build")
    names = {command.source.name for command in ours}
    assert names >= (X86_SOURCES if machine == "x86_64" else ARM_SOURCES)
    assert (
        names | X86_SOURCES | ARM_SOURCES | {"path_amx.cpp"}
        == {source.name for source in builds.KERNELS.glob("*.cpp")} | X86_SOURCES | ARM_SOURCES
    )
    assert builds.compile_all(ours, compiler, tmp_path) == []


@pytest.mark.timeout(900)
def test_for_a_mac(tmp_path: Path) -> None:
    """CMake's commands for ARM and Linux, given to a clang for ARM and macOS: CMake itself would
    want Apple's tools."""
    linux, mac = (
        builds.need(builds.zig(tmp_path, target), "ziglang")
        for target in ("aarch64-linux-gnu", "aarch64-macos")
    )
    system = ("-DCMAKE_SYSTEM_NAME=Linux", "-DCMAKE_SYSTEM_PROCESSOR=aarch64")
    builds.configure(tmp_path / "build", linux, *system)
    ours = builds.commands(tmp_path / "build")
    names = {command.source.name for command in ours}
    assert names >= ARM_SOURCES
    assert not names & X86_SOURCES
    assert builds.compile_all(ours, mac, tmp_path) == []
