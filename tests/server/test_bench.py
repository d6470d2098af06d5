"""`headrace bench` against a real server. What it says of itself is checked, not how fast it is."""

from __future__ import annotations

import json
from pathlib import Path

from tests.server.conftest import RunningServer
from typer.testing import CliRunner

from headrace.cli.commands import app
from headrace.search.measured import read_measured
from headrace.workload.trace import read_trace


def test_a_run_against_a_real_server(
    server: RunningServer, default_model_path: Path, tmp_path: Path
) -> None:
    path = tmp_path / "result.json"
    words = ["bench", server.base_url, "--input", "40", "--output", "8", "--concurrency", "3"]
    more = ["--requests", "9", "--prefixes", "1", "--prefix-tokens", "64", "--save", str(path)]
    page, trace, folder = tmp_path / "page.html", tmp_path / "trace.jsonl", tmp_path / "aiperf"
    files = ["--html", str(page), "--mooncake", str(trace), "--aiperf", str(folder)]
    checked = ["--save-detailed", "--tokenizer", str(default_model_path)]
    shown = CliRunner().invoke(app, [*words, *more, *files, *checked])
    found = json.loads(path.read_text())
    assert (found["completed"], found["failed"], found["total_output_tokens"]) == (9, 0, 72)
    assert found["model_id"] == "smollm2"
    assert all(abs(each - 104) <= 8 for each in found["input_lens"])
    assert found["max_concurrent_requests"] == 3
    assert found["headrace"]["tokens_counted_by"] == {"usage": 9}
    assert found["headrace"]["cached_share"] > 0.3  # the shared prefix
    assert found["headrace"]["tokens_disagreed"][1] == 9
    assert [len(gaps) for gaps in found["itls"]] == [7] * 9
    assert "9 of 9 whole" in shown.output
    assert read_measured(path).mix.output_tokens == 8
    assert page.read_text().count("<svg") == 6
    assert len(list(read_trace(trace).asks())) == 9
    assert len((folder / "profile_export.jsonl").read_text().splitlines()) == 9
    again = CliRunner().invoke(app, ["bench", "compare", str(path), str(path)])
    assert again.exit_code == 0  # nothing is worse than itself
