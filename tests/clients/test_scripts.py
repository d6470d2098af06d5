"""Clients that are libraries: each check of each script is a test.

A script runs once, in its client's own environment, when its first test is asked for; it prints a
line for each check (scripts/checks.py, scripts/checks.mjs).
"""

from __future__ import annotations

import functools
import json
import re
import shutil
import subprocess
from pathlib import Path

import pytest
from tests.clients.environments import environment

FOLDER = Path(__file__).parent / "scripts"
SCRIPT_LIMIT_S = 900
ENVIRONMENTS = {
    "openai_client.py": "openai-python",
    "openai_responses_client.py": "openai-python",
    "anthropic_client.py": "anthropic",
    "litellm_client.py": "litellm",
    "langchain_client.py": "langchain",
    "instructor_client.py": "instructor",
    "pydantic_ai_client.py": "pydantic-ai",
    "agents_client.py": "openai-agents",
    "openai_client.mjs": "openai-node",
    "anthropic_client.mjs": "anthropic-node",
    "ai_sdk_client.mjs": "ai-sdk",
}


def names_of_checks(script: str) -> list[str]:
    """As they are written in the file: nothing of the client is imported here."""
    written = r'^check\("([^"]+)"' if script.endswith(".mjs") else r"^(?:async )?def (check_\w+)"
    return re.findall(written, (FOLDER / script).read_text(), re.MULTILINE)


ALL_CHECKS = [(script, check) for script in ENVIRONMENTS for check in names_of_checks(script)]


class Results:
    """What a script's checks found, and what it wrote beside that."""

    def __init__(self, command: list[str], folder: Path, variables: dict[str, str]) -> None:
        log = folder / "script.log"
        with log.open("w") as lines:
            process = subprocess.Popen(
                command, cwd=folder, env=variables, stdout=lines, stderr=subprocess.STDOUT
            )
            try:
                self._end = f"it ended with {process.wait(SCRIPT_LIMIT_S)}"
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
                self._end = f"it was ended after {SCRIPT_LIMIT_S} s"
        self._log = log.read_text(errors="replace")
        said = [json.loads(line) for line in self._log.splitlines() if line.startswith('{"')]
        self._begun = {line["begun"] for line in said if "begun" in line}
        self._errors = {line["done"]: line["error"] for line in said if "done" in line}

    def require(self, check: str) -> None:
        """Fails unless that check passed."""
        if check not in self._errors:
            word = "did not end" if check in self._begun else "was not reached"
            pytest.fail(f"{check} {word}; the script: {self._end}\n{self._log}", pytrace=False)
        if self._errors[check] is not None:
            pytest.fail(self._errors[check], pytrace=False)


@pytest.fixture(scope="session")
def results(variables: dict[str, str], tmp_path_factory: pytest.TempPathFactory) -> object:
    @functools.cache
    def of(script: str) -> Results:
        made = environment(ENVIRONMENTS[script])
        if not script.endswith(".mjs"):
            folder = tmp_path_factory.mktemp("script")
            return Results([str(made.python), str(FOLDER / script)], folder, variables)
        for each in (script, "checks.mjs"):  # node looks for packages beside the script
            shutil.copy(FOLDER / each, made.folder)
        return Results(["node", script], made.folder, variables)

    return of


@pytest.mark.parametrize(("script", "check"), ALL_CHECKS)
def test_check(results: functools._lru_cache_wrapper[Results], script: str, check: str) -> None:
    results(script).require(check)


def test_every_script_is_run() -> None:
    shared = {"checks.py", "checks.mjs"}
    assert {path.name for path in FOLDER.iterdir() if path.is_file()} - shared == set(ENVIRONMENTS)
