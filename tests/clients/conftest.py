"""One server for the session and one that asks for a key, for real clients; and their versions.

`make test` does not come here (tests/conftest.py): these install dozens of packages.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest
from tests.clients import environments
from tests.server.conftest import RunningServer

MODEL = "smollm2-135m-instruct"  # what `headrace serve` calls its default model
CONTEXT = 8192
KEY = "the-key-of-the-tests"
TEST_LIMIT_S = 1800  # the first test of a client installs it
VERSIONS = Path("build/clients/versions.txt")


@dataclass(frozen=True, slots=True)
class Servers:
    """Where clients find what they ask."""

    open: RunningServer
    keyed: RunningServer

    def variables(self, home: Path) -> dict[str, str]:
        """The environment of a client: nothing of ours, and a home folder of its own."""
        kept = {name: os.environ[name] for name in ("PATH", "LANG") if name in os.environ}
        return {
            **kept,
            "HOME": str(home),
            "CLIENTS_URL": self.open.base_url,
            "CLIENTS_KEYED_URL": self.keyed.base_url,
            "CLIENTS_KEY": KEY,
            "CLIENTS_MODEL": MODEL,
            "CLIENTS_CONTEXT": str(CONTEXT),
            # Clients call home, unless they are told not to.
            "ANONYMIZED_TELEMETRY": "false",
            "DO_NOT_TRACK": "1",
            "HF_HUB_OFFLINE": "1",
            "HF_DATASETS_OFFLINE": "1",
            "LITELLM_LOCAL_MODEL_COST_MAP": "True",
            "OPENAI_AGENTS_DISABLE_TRACING": "1",
            "NO_COLOR": "1",
        }


@pytest.fixture(scope="session")
def servers(
    default_model_path: Path, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Servers]:
    folder = tmp_path_factory.mktemp("servers")
    named: dict[str, object] = {"served_model_name": MODEL}
    engine: dict[str, object] = {"kv_tokens": 65536}
    opened = RunningServer(default_model_path, folder, named, engine)
    keyed = RunningServer(default_model_path, folder, {**named, "api_key": KEY}, engine)
    try:
        for each in (opened, keyed):
            each.wait_ready()
        yield Servers(opened, keyed)
    finally:
        for each in (opened, keyed):
            each.stop()


@pytest.fixture(scope="session")
def variables(servers: Servers, tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """The environment that clients are started in."""
    return servers.variables(tmp_path_factory.mktemp("home"))


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if Path(__file__).parent in item.path.parents:
            item.add_marker(pytest.mark.timeout(TEST_LIMIT_S))


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """Which versions these results are about: on the screen and in a file."""
    made = environments.made()
    if not made:
        return
    lines = [
        f"{name}: {', '.join(f'{package} {version}' for package, version in each.versions.items())}"
        + ("" if each.newest else f" (perhaps not the newest: {each.failure})")
        for name, each in sorted(made.items())
    ]
    terminalreporter.section("versions of the clients")
    terminalreporter.write_line("\n".join(lines))
    VERSIONS.parent.mkdir(parents=True, exist_ok=True)
    VERSIONS.write_text("\n".join(lines) + "\n")
