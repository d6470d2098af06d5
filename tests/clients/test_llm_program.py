"""Simon Willison's `llm`, with Headrace in its extra-openai-models.yaml."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest
from tests.clients.conftest import MODEL, Servers
from tests.clients.environments import environment
from tests.clients.programs import run_program

MODELS = """\
- model_id: headrace
  model_name: {model}
  api_base: "{url}/v1"
  supports_tools: true
  supports_schema: true
"""
PLAIN = ("-m", "headrace", "-o", "temperature", "0", "-o", "max_tokens", "24")
ROOMY = ("-m", "headrace", "-o", "temperature", "0", "-o", "max_tokens", "300")

Llm = Callable[..., str]


@pytest.fixture
def llm(servers: Servers, variables: dict[str, str], tmp_path: Path) -> Llm:
    """Runs llm with these arguments; its settings and its log are this test's own."""
    made = environment("llm")
    described = MODELS.format(model=MODEL, url=servers.open.base_url)
    (tmp_path / "extra-openai-models.yaml").write_text(described)

    def run(*arguments: str, input: str = "", expect: int = 0) -> str:
        command: list[str | Path] = [made.program("llm"), *arguments]
        own = {**variables, "LLM_USER_PATH": str(tmp_path)}
        return run_program(command, tmp_path, own, input=input, expect=expect)

    return run


def test_streamed_and_whole_are_the_same(llm: Llm) -> None:
    streamed = llm(*PLAIN, "Name a river.")
    assert streamed.strip()
    assert llm(*PLAIN, "--no-stream", "Name a river.") == streamed
    for row in json.loads(llm("logs", "--json", "-n", "2")):
        assert row["input_tokens"] > 0
        assert 0 < row["output_tokens"] <= 24


def test_a_pipe_with_a_system_prompt_and_a_second_turn(llm: Llm) -> None:
    llm(*PLAIN, "-s", "Summarize.", input="Rivers flow to the sea.")
    llm(*PLAIN, "-c", "And then?")
    first, second = sorted(
        json.loads(llm("logs", "--json", "-n", "2")), key=lambda row: str(row["datetime_utc"])
    )
    assert first["conversation_id"] == second["conversation_id"]
    assert second["input_tokens"] > first["input_tokens"]


def test_a_schema(llm: Llm) -> None:
    found = json.loads(llm(*ROOMY, "--schema", "name, length_km int", "The Rhine: 1230 km."))
    assert {"name", "length_km"} <= set(found)  # llm's short schemas leave room for more
    assert isinstance(found["length_km"], int)


def test_tools_end(llm: Llm) -> None:
    """Whether the model calls is its own; the chain of calls ends by llm's limit at the latest."""
    llm(*ROOMY, "-T", "llm_version", "--chain-limit", "2", "Which version of llm is this?")
    rows = json.loads(llm("logs", "--json", "-n", "1"))
    assert rows[0]["tools"][0]["name"] == "llm_version"


def test_an_error_is_shown(llm: Llm) -> None:
    with_nothing = llm("-m", "headrace", "-o", "temperature", "-1", "Name a river.", expect=1)
    assert with_nothing == ""
