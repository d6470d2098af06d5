"""The image's lock files are whole, pinned by hashes, and no older than what pyproject.toml asks
for. That they install is the image's build to say: it takes nothing that is not in them."""

from __future__ import annotations

import re
import tomllib
from pathlib import Path
from typing import Any

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name
from packaging.version import Version

ROOT = Path(__file__).resolve().parent.parent
RUN, BUILD = "deploy/requirements.lock", "deploy/build-requirements.lock"
CUDA = "deploy/requirements-cuda.lock"
# What each image installs.
IMAGES = {"Dockerfile": [RUN, BUILD], "Dockerfile.cuda": [CUDA, BUILD]}
PINNED = re.compile(r"([a-z0-9-]+)==(\S+)((?: --hash=sha256:[0-9a-f]{64})+)")


def read_lock(name: str) -> dict[str, tuple[Version, int]]:
    """Of each package: its version, and how many files of it may be installed."""
    found = {}
    lines = (ROOT / name).read_text().replace(" \\\n", "")
    for line in re.sub(r" +", " ", lines).splitlines():
        if line.strip().startswith("#"):
            continue
        pinned = PINNED.fullmatch(line)
        assert pinned is not None, f"{name}: {line[:100]}"
        assert pinned[1] not in found
        found[pinned[1]] = (Version(pinned[2]), pinned[3].count("--hash"))
    return found


def project() -> dict[str, Any]:
    return tomllib.loads((ROOT / "pyproject.toml").read_text())


def wanted(name: str) -> list[str]:
    if name == BUILD:
        return [*project()["build-system"]["requires"], "cmake", "ninja"]
    table = project()["project"]
    extras = ("otel", "hub", "cuda") if name == CUDA else ("otel", "hub")
    chosen = [each for extra in extras for each in table["optional-dependencies"][extra]]
    return [*table["dependencies"], *chosen]


@pytest.mark.parametrize("name", [RUN, BUILD, CUDA])
def test_what_is_locked_is_what_is_asked_for(name: str) -> None:
    locked = read_lock(name)
    for each in map(Requirement, wanted(name)):
        package = canonicalize_name(each.name)
        assert package in locked, f"{each}: run `make lock`"
        version, _ = locked[package]
        assert each.specifier.contains(version, prereleases=True), f"{each}: run `make lock`"


def test_files_for_both_processors_may_be_installed() -> None:
    """Compiled packages have a wheel for each: more hashes than the two of a plain one."""
    locked = read_lock(RUN)
    for name in ("httptools", "llguidance", "msgspec", "numpy", "tokenizers", "uvloop"):
        assert locked[name][1] > 2, name


@pytest.mark.parametrize("name", [RUN, BUILD, CUDA])
def test_no_index_is_named(name: str) -> None:
    text = (ROOT / name).read_text()
    assert "://" not in text
    assert not re.search(r"^\s*-", text.replace("--hash", ""), re.MULTILINE)


def test_the_gpus_versions_are_those_that_were_tested() -> None:
    locked = read_lock(CUDA)
    tested = (ROOT / "deploy/cuda-constraints.txt").read_text().splitlines()
    pinned = [Requirement(line) for line in tested if not line.startswith("#")]
    assert {each.name for each in pinned} == {"torch", "triton"}
    document = (ROOT / "docs/gpu.md").read_text()
    for each in pinned:
        version, _ = locked[each.name]
        assert each.specifier.contains(version)
        assert re.search(rf"^  {each.name} +{re.escape(str(version))}\b", document, re.MULTILINE)


def test_both_images_serve_with_the_same_packages() -> None:
    one, other = read_lock(RUN), read_lock(CUDA)
    assert {name: one[name][0] for name in one} == {name: other[name][0] for name in one}


def docker_text(name: str) -> str:
    lines = (ROOT / name).read_text().splitlines()
    return "\n".join(line for line in lines if not line.startswith("#")).replace("\\\n", " ")


@pytest.mark.parametrize("name", IMAGES)
def test_the_image_installs_nothing_else(name: str) -> None:
    commands = re.findall(r"pip (?:install|wheel|download)[^&\n]*", docker_text(name))
    assert len(commands) == 4
    for command in commands:
        assert ("--require-hashes" in command) != ("--no-index" in command), command
    installed = [Path(found).name for found in re.findall(r"-r (\S+)", docker_text(name))]
    assert sorted(installed) == sorted(Path(lock).name for lock in IMAGES[name])


@pytest.mark.parametrize("name", IMAGES)
def test_the_locks_are_for_the_images_python(name: str) -> None:
    python = re.search(r"^ARG PYTHON=(\d+\.\d+)-", docker_text(name), re.MULTILINE)
    assert python is not None
    assert f"--python-version {python[1]} " in (ROOT / "Makefile").read_text()


@pytest.mark.parametrize("name", IMAGES)
def test_the_image_imports_nothing_from_what_can_be_written(name: str) -> None:
    last = docker_text(name).rpartition("\nFROM ")[2]
    (folder,) = re.findall(r"^WORKDIR (\S+)", last, re.MULTILINE)
    assert folder == "/"
    assert re.search(r"\bPYTHONSAFEPATH=1\b", last)
