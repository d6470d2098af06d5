"""The official JavaScript SDK against a real server; skipped where npm can't fetch it."""

from __future__ import annotations

import json
import shutil
import subprocess
from pathlib import Path
from typing import Any

import openai
import pytest

SCRIPT = Path(__file__).parent / "openai_js" / "ask.mjs"
FETCH_LIMIT_S = 60


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A copy of the script with the SDK beside it."""
    if shutil.which("npm") is None or shutil.which("node") is None:
        pytest.skip("there is no node")
    shutil.copy(SCRIPT, tmp_path)
    command = ["npm", "install", "--no-audit", "--no-fund", "--ignore-scripts", "openai"]
    try:
        made = subprocess.run(command, cwd=tmp_path, capture_output=True, timeout=FETCH_LIMIT_S)
    except subprocess.TimeoutExpired:
        pytest.skip("npm did not answer")
    if made.returncode != 0:
        pytest.skip(f"npm can't fetch: {made.stderr.decode()[-200:]}")
    return tmp_path


def test_a_javascript_client_sees_what_a_python_client_sees(server: Any, folder: Path) -> None:
    base_url = f"{server.base_url}/v1"
    run = subprocess.run(
        ["node", SCRIPT.name, base_url], cwd=folder, capture_output=True, text=True, timeout=120
    )
    assert run.returncode == 0, run.stderr
    found = json.loads(run.stdout)
    with openai.OpenAI(base_url=base_url, api_key="none", max_retries=0) as client:
        wanted = client.chat.completions.create(
            model="smollm2",
            messages=[{"role": "user", "content": "Name three primary colors."}],
            temperature=0,
            max_tokens=16,
        )
    text = wanted.choices[0].message.content
    assert text
    assert found["whole"] == found["streamed"] == found["helper"] == text
    assert wanted.usage is not None
    for usage in (found["usage"], found["stream_usage"]):
        assert usage["prompt_tokens"] == wanted.usage.prompt_tokens
        assert usage["completion_tokens"] == wanted.usage.completion_tokens
    assert len(found["completions"]) == 2
    assert found["completions"][0].startswith(" Paris")
    assert found["models"] == ["smollm2"]
    assert found["error"] == {"name": "BadRequestError", "status": 400, "param": "n"}
