"""Compilers that may be here, and the native module built by one of them: a test's helper.

The commands are CMake's own, so that what is tested is what CMakeLists.txt says.
"""

from __future__ import annotations

import importlib.util
import json
import os
import shlex
import shutil
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
KERNELS = ROOT / "src/headrace/backends/cpu/kernels"
# What zig calls the instruction sets that our sources ask for in every other compiler's words.
_ZIG_WORDS = {"-march=armv8.2-a+dotprod": "-mcpu=generic+v8_2a+dotprod"}


@dataclass(frozen=True, slots=True, kw_only=True)
class Command:
    """A command as compile_commands.json has it, for one of our sources."""

    source: Path
    words: tuple[str, ...]


def newest(*names: str) -> str | None:
    """The first of these programs that is installed."""
    return next((found for name in names if (found := shutil.which(name))), None)


def clang() -> str | None:
    return newest("clang++", *(f"clang++-{version}" for version in range(25, 13, -1)))


def zig(folder: Path, target: str) -> Path | None:
    """A program that is clang for another machine, headers and all: the ziglang package has one."""
    spec = importlib.util.find_spec("ziglang")
    if spec is None or spec.origin is None:
        return None
    program = Path(spec.origin).with_name("zig")
    cases = "".join(f"    {ours}) a={theirs} ;;\n" for ours, theirs in _ZIG_WORDS.items())
    # By default it looks for undefined behaviour and notes lines: nobody runs what it makes here.
    plain = "-fno-sanitize=undefined -g0"
    script = folder / f"zig-{target}"
    script.write_text(
        f'#!/bin/sh\nfor a do\n  shift\n  case $a in\n{cases}  esac\n  set -- "$@" "$a"\ndone\n'
        f'exec {shlex.quote(str(program))} c++ -target {target} {plain} "$@"\n'
    )
    script.chmod(0o755)
    return script


def need(found: str | Path | None, what: str) -> str:
    if found is None:
        pytest.skip(f"{what} is not installed")
    return str(found)


def configure(folder: Path, compiler: str, *definitions: str) -> None:
    """CMake's preparations in `folder`. Nothing is linked, for another machine's libraries may not
    be here."""
    cmake = need(newest("cmake"), "cmake")
    if importlib.util.find_spec("nanobind") is None:
        pytest.skip("nanobind is not installed in this environment")
    run(
        cmake,
        *("-S", str(ROOT), "-B", str(folder)),
        *(f"-DCMAKE_CXX_COMPILER={compiler}", f"-DPython_EXECUTABLE={sys.executable}"),
        *("-DCMAKE_BUILD_TYPE=Release", "-DCMAKE_EXPORT_COMPILE_COMMANDS=ON"),
        *("-DCMAKE_TRY_COMPILE_TARGET_TYPE=STATIC_LIBRARY", *definitions),
        "-DCMAKE_CXX_COMPILER_ID_TEST_FLAGS_FIRST=-c",  # who it is, without a linked program either
    )


def commands(folder: Path) -> list[Command]:
    """How our own sources are compiled; nanobind's are its authors'."""
    entries = json.loads((folder / "compile_commands.json").read_text())
    all_ = [
        Command(source=Path(e["file"]), words=tuple(shlex.split(e["command"]))) for e in entries
    ]
    return [command for command in all_ if KERNELS in command.source.parents]


def compile_all(ours: list[Command], compiler: str, folder: Path) -> list[str]:
    """What the compiler has to say of each source; nothing, where all is well. Without its
    optimizer, which takes most of the time."""

    def compile_one(command: Command) -> str:
        words = list(command.words)
        at = words.index("-o")
        del words[at : at + 2]
        out = folder / f"{command.source.stem}.o"
        done = subprocess.run(
            [compiler, *words[1:], "-O0", "-Werror", "-o", str(out)],
            capture_output=True,
            text=True,
        )
        return "" if done.returncode == 0 else f"{command.source.name}: {done.stderr}"

    with ThreadPoolExecutor(os.cpu_count() or 1) as threads:
        return [said for said in threads.map(compile_one, ours) if said]


def build(folder: Path) -> Path:
    """Everything, as CMake would for a wheel; gives the module. A warning of our sources fails."""
    cmake = need(newest("cmake"), "cmake")
    said = run(cmake, "--build", str(folder), "--parallel", str(os.cpu_count() or 1))
    assert [line for line in said.splitlines() if str(KERNELS) in line and "warning:" in line] == []
    (module,) = folder.glob("_native*.so")
    return module


def package(folder: Path, module: Path, suffix: str) -> Path:
    """Our package with this module in it: a folder for PYTHONPATH."""
    shutil.copytree(
        ROOT / "src/headrace",
        folder / "headrace",
        ignore=shutil.ignore_patterns("*.so", "__pycache__"),
    )
    shutil.copy(module, folder / f"headrace/backends/cpu/_native{suffix}")
    return folder


def run(*words: str, env: dict[str, str] | None = None, timeout_s: float = 3600) -> str:
    """Its output; a failing program fails the test with all that it said."""
    done = subprocess.run(
        words,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        env=None if env is None else os.environ | env,
        timeout=timeout_s,
        cwd=ROOT,
    )
    assert done.returncode == 0, f"{shlex.join(words)}\n{done.stdout}"
    return done.stdout
