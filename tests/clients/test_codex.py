"""Codex CLI: one turn of `codex exec` against /v1/responses, with its own prompt and tools."""

from __future__ import annotations

import json
from pathlib import Path

from tests.clients.conftest import CONTEXT, MODEL, Servers
from tests.clients.environments import environment
from tests.clients.programs import counted, run_program

SETTINGS = """\
model = "{model}"
model_provider = "headrace"
model_context_window = {context}
web_search = "disabled"

[features]
multi_agent = false

[model_providers.headrace]
name = "Headrace"
base_url = "{url}/v1"
wire_api = "responses"
"""


def events_of(
    servers: Servers, variables: dict[str, str], folder: Path, settings: str
) -> list[dict[str, object]]:
    home, work = folder / "codex", folder / "work"
    home.mkdir()
    work.mkdir()
    filled = settings.format(model=MODEL, context=CONTEXT, url=servers.open.base_url)
    (home / "config.toml").write_text(filled)
    arguments = ["exec", "--json", "--skip-git-repo-check", "--sandbox", "read-only", "Say hello."]
    command: list[str | Path] = [environment("codex").program("codex"), *arguments]
    out = run_program(command, work, {**variables, "CODEX_HOME": str(home)})
    return [json.loads(line) for line in out.splitlines()]


def check_one_turn(events: list[dict[str, object]]) -> None:
    kinds = [event["type"] for event in events]
    assert kinds[0] == "thread.started"
    assert kinds[-1] == "turn.completed", events[-3:]
    usage = events[-1]["usage"]
    assert isinstance(usage, dict)
    assert usage["input_tokens"] > 1000  # its own prompt came along
    assert usage["output_tokens"] > 0


def test_a_turn_ends(servers: Servers, variables: dict[str, str], tmp_path: Path) -> None:
    """With the settings that docs/clients.md gives, which leave room in a context of 8,192."""
    before = counted(servers.open.base_url, "headrace:generation_tokens_total")
    check_one_turn(events_of(servers, variables, tmp_path, SETTINGS))
    after = counted(servers.open.base_url, "headrace:generation_tokens_total")
    assert after != before


def test_all_of_its_tools_are_taken(
    servers: Servers, variables: dict[str, str], tmp_path: Path
) -> None:
    """By default it sends tools of kinds that are not functions; a short prompt leaves room."""
    (tmp_path / "prompt.md").write_text("You are a coding agent. " + "Be brief. " * 200)
    settings = SETTINGS.replace('web_search = "disabled"\n\n[features]\nmulti_agent = false\n', "")
    prompt = f'model_instructions_file = "{tmp_path / "prompt.md"}"\n'
    check_one_turn(events_of(servers, variables, tmp_path, prompt + settings))
