"""The suite on the oldest dependencies that pyproject.toml allows, and on the newest.

    python tests/floors.py FOLDER      # make test-floors; FOLDER has build/floors

Each has an environment of its own in FOLDER, with a wheel of this tree in it. Runs what depends on
those packages: server, grammars, tokenizer, settings, commands, metrics, traces, hub. Oracles that
need newer packages than the oldest (torch, transformers) are left out, and so are tests that ask
them. Ends with the versions that were tested, as docs/development.md lists them.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
import tomllib
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
EXTRAS = ("otel", "hub")  # cuda and ray: gigabytes, and machines that are not here
RESOLUTIONS = {"oldest": "lowest-direct", "newest": "highest"}
# Of the dev group, what the tests below import. schemathesis needs a newer rich than the oldest.
TOOLS = ("gguf", "httpx", "hypothesis", "jsonschema", "openai", "pytest", "pytest-timeout",
         "pyyaml", "safetensors", "sentencepiece")  # fmt: skip
TESTS = ("tests/core", "tests/grammar", "tests/tokenizer", "tests/server",
         "tests/cli/test_commands.py", "tests/cli/test_end_to_end.py", "tests/cli/test_info.py",
         "tests/fetch/test_catalog.py",
         "tests/test_llm.py", "tests/test_llm_sampling.py", "tests/test_async_engine.py",
         "tests/test_leaving.py", "tests/test_deploy.py",
         "tests/test_configuration_docs.py")  # fmt: skip
LEFT_OUT = re.compile(r"^(?:import|from) (?:transformers|torch|schemathesis|tests\.weights)", re.M)


def main(folder: Path) -> int:
    folder.mkdir(parents=True, exist_ok=True)
    run(sys.executable, "-m", "venv", folder / "tools")
    run(folder / "tools/bin/pip", "install", "--quiet", "uv")
    for old in folder.glob("*.whl"):
        old.unlink()
    run(folder / "tools/bin/uv", "build", "--quiet", "--wheel", "--out-dir", folder, ROOT)
    (wheel,) = folder.glob("*.whl")
    results = {name: try_out(name, folder, wheel) for name in RESOLUTIONS}
    tables = {name: versions(folder / name) for name in RESOLUTIONS}
    print("\n| package | oldest | newest |\n|---|---|---|")
    for package in direct_dependencies():
        print(f"| `{package}` | {tables['oldest'][package]} | {tables['newest'][package]} |")
    print("\n" + ", ".join(f"{name}: {'failed' if r else 'passed'}" for name, r in results.items()))
    return max(results.values())


def try_out(name: str, folder: Path, wheel: Path) -> int:
    uv, place, pins = folder / "tools/bin/uv", folder / name, folder / f"{name}.txt"
    extras = [word for extra in EXTRAS for word in ("--extra", extra)]
    resolution = ("--resolution", RESOLUTIONS[name])
    compiling = ("pip", "compile", "--quiet", "--no-header", "--upgrade", *resolution, *extras)
    run(uv, *compiling, "--python", sys.executable, "-o", pins, ROOT / "pyproject.toml")
    run(uv, "venv", "--quiet", "--clear", "--python", sys.executable, place)
    python = place / "bin/python"
    install = (uv, "pip", "install", "--quiet", "--python", python)
    run(*install, "-r", pins)
    run(*install, "--no-deps", wheel)
    run(*install, "-c", pins, *tools())
    ignored = [f"--ignore={path}" for path in sorted(needing_oracles())]
    return pytest(python, *TESTS, *ignored)


def pytest(python: Path, *arguments: str) -> int:
    # The wheel, not the tree; `headrace` is that of the environment.
    environment = {k: v for k, v in os.environ.items() if k not in ("PYTHONPATH", "VIRTUAL_ENV")}
    environment["PATH"] = f"{python.parent}:{environment['PATH']}"
    command = [str(python), "-m", "pytest", "-q", *arguments]
    return subprocess.run(command, cwd=ROOT, env=environment, check=False).returncode


def needing_oracles() -> list[str]:
    files = [f for test in TESTS for f in (ROOT / test).rglob("test_*.py")]
    return [str(f.relative_to(ROOT)) for f in files if LEFT_OUT.search(f.read_text())]


def project() -> dict[str, list[str]]:
    """Requirements by group, as pyproject.toml has them."""
    data = tomllib.loads((ROOT / "pyproject.toml").read_text())
    groups: dict[str, list[str]] = data["project"]["optional-dependencies"]
    dev: list[str] = data["dependency-groups"]["dev"]
    return {**groups, "": data["project"]["dependencies"], "dev": dev}


def direct_dependencies() -> list[str]:
    groups = project()
    listed = [*groups[""], *(each for extra in EXTRAS for each in groups[extra])]
    return [name_of(requirement) for requirement in listed]


def tools() -> list[str]:
    return [each for each in project()["dev"] if name_of(each) in TOOLS]


def name_of(requirement: str) -> str:
    found = re.match(r"[\w.-]+", requirement)
    assert found is not None, requirement
    return found[0]


def versions(place: Path) -> dict[str, str]:
    script = (
        "import sys; from importlib.metadata import version\n"
        "for name in sys.argv[1:]: print(name, version(name))"
    )
    command = [str(place / "bin/python"), "-c", script, *direct_dependencies()]
    done = subprocess.run(command, check=True, capture_output=True, text=True)
    return {line.split()[0]: line.split()[1] for line in done.stdout.splitlines()}


def run(*command: object) -> None:
    subprocess.run([str(word) for word in command], cwd=ROOT, check=True)


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1]).resolve()))
