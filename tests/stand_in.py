"""Stands in for commands that a document names and a test can't run, and refuses what they would.

    python tests/stand_in.py NAME ARGUMENTS...

A name is one of `docker`, `kubectl`, `kustomize`, `make` and `pip`: there is no daemon, no cluster
and no index with Headrace in it, and a build takes minutes. What can be known without them is
checked: paths, targets, extras, ports. `headrace` is the real one, with short answers (a shared
machine may do two tokens a second), and `serve` with --dry-run, on the default model where a
document says path/to/model.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
import tomllib
from pathlib import Path
from typing import NoReturn

MAX_TOKENS = "4"


def refuse(why: str) -> NoReturn:
    sys.exit(f"stand-in: {why}")


def pip(arguments: list[str]) -> None:
    if len(arguments) != 2 or arguments[0] != "install":
        refuse(f"pip {' '.join(arguments)}: expected one thing to install")
    found = re.fullmatch(r"\.(?:\[([\w,]+)\])?", arguments[1])
    if found is None:
        refuse(f"no package index has {arguments[1]}")
    project = tomllib.loads(Path("pyproject.toml").read_text())["project"]  # of this folder
    extras = set(found[1].split(",")) if found[1] else set()
    if unknown := extras - project["optional-dependencies"].keys():
        refuse(f"there is no extra {unknown}")


def make(arguments: list[str]) -> None:
    done = subprocess.run([os.environ["REAL_MAKE"], "--dry-run", *arguments], capture_output=True)
    if done.returncode:
        refuse(done.stderr.decode())


def docker(arguments: list[str]) -> None:
    command, *rest = arguments
    if command == "build":
        name = rest[rest.index("-f") + 1] if "-f" in rest else "Dockerfile"
        if not (Path(rest[-1]) / name).exists():
            refuse(f"no {name} in {rest[-1]}")
    elif command == "run":
        text = Path("Dockerfile").read_text()
        (volume,) = re.findall(r"^VOLUME (\S+)", text, re.MULTILINE)
        (port,) = re.findall(r"^EXPOSE (\S+)", text, re.MULTILINE)
        published = rest[rest.index("-p") + 1]
        mounted = rest[rest.index("-v") + 1]
        if published.rpartition(":")[2] != port or mounted.rpartition(":")[2] != volume:
            refuse(f"the image has {volume} and {port}; found {mounted} and {published}")
    elif command not in ("push", "stop", "rm"):
        refuse(f"docker {command}")


def kustomize(arguments: list[str]) -> None:
    if arguments[:3] != ["edit", "set", "image"] or not Path("kustomization.yaml").exists():
        refuse(f"kustomize {' '.join(arguments)} in {Path.cwd()}")
    name = arguments[3].partition("=")[0]
    if not any(f"image: {name}:" in path.read_text() for path in Path().rglob("*.yaml")):
        refuse(f"{Path.cwd()} has no image {name}")


def kubectl(arguments: list[str]) -> None:
    if arguments[:2] != ["apply", "-k"]:
        refuse(f"kubectl {' '.join(arguments)}")
    folder = Path(arguments[2])
    if not (folder / "kustomization.yaml").exists():
        refuse(f"{folder} has no kustomization.yaml, seen from {Path.cwd()}")
    if real := os.environ.get("REAL_KUBECTL"):
        done = subprocess.run([real, "kustomize", str(folder)], capture_output=True)
        if done.returncode:
            refuse(done.stderr.decode())


def headrace(arguments: list[str]) -> None:
    if arguments[:1] in (["run"], ["chat"]) and "--max-tokens" not in arguments:
        arguments = [*arguments, "--max-tokens", MAX_TOKENS]
    served = arguments[:1] == ["serve"] and not os.environ.get("REALLY_SERVE")
    if served and "--dry-run" not in arguments:
        arguments = [*arguments, "--dry-run"]
    model = os.environ["DEFAULT_MODEL"]
    arguments = [model if each == "path/to/model" else each for each in arguments]
    command = [sys.executable, "-c", "from headrace.cli.commands import main; main()", *arguments]
    if not (served and "cuda" in arguments):
        os.execv(sys.executable, command)
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode and "device is 'cuda', and " not in done.stderr:  # every flag was taken
        refuse(done.stderr)


if __name__ == "__main__":
    {f.__name__: f for f in (pip, make, docker, kustomize, kubectl, headrace)}[sys.argv[1]](
        sys.argv[2:]
    )
