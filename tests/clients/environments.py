"""Installs each client in an environment of its own, under the cache folder: newest versions.

Knows packages and registries, not what a client is asked to do. An environment that is there is
brought up to date on every run; where no registry answers then, the one that is there is used, and
the versions that are printed say so.
"""

from __future__ import annotations

import json
import re
import shutil
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import pytest

from headrace.fetch.model_folder import cache_folder

INSTALL_LIMIT_S = 1500  # the largest brings torch along
# A bare "torch" takes a CUDA build of several gigabytes on some indexes.
CONSTRAINTS = ("torch==2.13.0",)


class NotInstalled(Exception):
    """A client that could not be had: what was missing, and what the installer said."""


@dataclass(frozen=True, slots=True)
class Environment:
    """Where a client is installed, and in which versions."""

    folder: Path
    versions: dict[str, str]
    failure: str | None = None  # why it was not brought up to date

    @property
    def newest(self) -> bool:
        return self.failure is None

    @property
    def python(self) -> Path:
        return self.folder / "bin" / "python"

    def program(self, name: str) -> Path:
        """A command that a package brought along."""
        places = (self.folder / "bin" / name, self.folder / "node_modules" / ".bin" / name)
        return next(place for place in places if place.exists())


@dataclass(frozen=True, slots=True)
class ClientSet:
    """Packages that are installed together, as a user of the first one would."""

    name: str
    packages: tuple[str, ...]
    registry: str = "pip"


SETS = {
    each.name: each
    for each in (
        ClientSet("openai-python", ("openai",)),
        ClientSet("anthropic", ("anthropic",)),
        ClientSet("litellm", ("litellm", "mcp")),  # 1.106 imports mcp wherever there are tools
        ClientSet("langchain", ("langchain-openai", "langchain")),
        ClientSet("instructor", ("instructor",)),
        ClientSet("pydantic-ai", ("pydantic-ai-slim[openai]",)),
        ClientSet("openai-agents", ("openai-agents",)),
        ClientSet("llm", ("llm",)),
        ClientSet("lm-eval", ("lm-eval[api]",)),
        ClientSet("guidellm", ("guidellm",)),
        ClientSet("aiperf", ("aiperf",)),
        ClientSet("openai-node", ("openai", "zod"), "npm"),
        ClientSet("ai-sdk", ("ai", "@ai-sdk/openai-compatible", "@ai-sdk/openai", "zod"), "npm"),
        ClientSet("anthropic-node", ("@anthropic-ai/sdk",), "npm"),
        ClientSet("codex", ("@openai/codex",), "npm"),
    )
}


def clients_folder() -> Path:
    return cache_folder() / "clients"


_made: dict[str, Environment] = {}
_failed: dict[str, str] = {}


def environment(name: str) -> Environment:
    """The environment of a set, made or brought up to date once in a session; the test fails where
    that can't be."""
    if name not in _made and name not in _failed:
        wanted = SETS[name]
        try:
            _made[name] = _with_npm(wanted) if wanted.registry == "npm" else _with_pip(wanted)
        except NotInstalled as error:  # once: every other test of this client would wait again
            _failed[name] = str(error)
    if name in _failed:
        pytest.fail(_failed[name], pytrace=False)
    return _made[name]


def made() -> dict[str, Environment]:
    """What this session has tried, for its summary."""
    return dict(_made)


def _with_pip(wanted: ClientSet) -> Environment:
    folder = clients_folder() / wanted.name
    python = folder / "bin" / "python"
    if not python.exists():
        folder.parent.mkdir(parents=True, exist_ok=True)
        _call([sys.executable, "-m", "venv", "--clear", str(folder)], folder.parent)
    constraints = folder / "headrace-constraints.txt"
    constraints.write_text("\n".join(CONSTRAINTS) + "\n")
    names = [package.partition("[")[0] for package in wanted.packages]
    install = [str(python), "-m", "pip", "install", "--quiet", "--upgrade"]
    failure = _call([*install, "--constraint", str(constraints), *wanted.packages], folder)
    shown = [str(python), "-m", "pip", "list", "--format", "json"]
    listed = subprocess.run(shown, capture_output=True, text=True, check=True, cwd=folder)
    versions = {_spelt(row["name"]): row["version"] for row in json.loads(listed.stdout)}
    return _checked(wanted, folder, {n: versions.get(_spelt(n), "") for n in names}, failure)


def _spelt(name: str) -> str:
    """A package's name as indexes compare names: lm_eval is lm-eval."""
    return re.sub(r"[-_.]+", "-", name).lower()


def _with_npm(wanted: ClientSet) -> Environment:
    if shutil.which("npm") is None or shutil.which("node") is None:
        pytest.skip("there is no node: install it (on Debian: apt-get install nodejs npm)")
    folder = clients_folder() / wanted.name
    folder.mkdir(parents=True, exist_ok=True)
    install = ["npm", "install", "--no-audit", "--no-fund", "--ignore-scripts", "--save"]
    failure = _call([*install, *(f"{package}@latest" for package in wanted.packages)], folder)
    versions = {package: _npm_version(folder, package) for package in wanted.packages}
    return _checked(wanted, folder, versions, failure)


def _npm_version(folder: Path, package: str) -> str:
    described = folder / "node_modules" / package / "package.json"
    return str(json.loads(described.read_text())["version"]) if described.exists() else ""


def _checked(
    wanted: ClientSet, folder: Path, versions: dict[str, str], failure: str | None
) -> Environment:
    """The environment, where all of it is there: from an earlier session, if need be."""
    absent = [name for name, version in versions.items() if not version]
    if absent:
        raise NotInstalled(
            f"{' and '.join(absent)} could not be installed by {wanted.registry}, "
            f"so {wanted.name} was not tested: {failure or 'it said nothing'}\n"
            "Check that the registry can be reached, or leave it out: -k 'not ...'"
        )
    return Environment(folder, versions, failure)


def _call(command: Sequence[str], folder: Path) -> str | None:
    """None if all went well, else what the program said last."""
    try:
        done = subprocess.run(
            command, cwd=folder, capture_output=True, text=True, timeout=INSTALL_LIMIT_S
        )
    except subprocess.TimeoutExpired:
        return f"nothing came within {INSTALL_LIMIT_S} s"
    if done.returncode == 0:
        return None
    return "\n".join((done.stderr or done.stdout).strip().splitlines()[-5:])
