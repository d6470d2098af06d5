"""Verdicts: a real difference is found, and noise is not called one."""

from __future__ import annotations

import json
from datetime import UTC, datetime
from pathlib import Path
from random import Random

import pytest
from tests.bench.test_summary import summary_of, whole
from typer.testing import CliRunner

from headrace.bench.compare import (
    Measured,
    compare,
    ratio_of_medians,
    read_run,
    rendered,
)
from headrace.bench.vllm_result import result
from headrace.cli.commands import app
from headrace.core.errors import ConfigError
from headrace.core.ratio import Verdict


def written(path: Path, seed: int, *, slower: float = 1.0, count: int = 60) -> Path:
    random = Random(seed)
    records = [
        whole(0.2 * n, ttft_s=0.2 * slower * random.lognormvariate(0, 0.3),
              gap_s=0.02 * random.lognormvariate(0, 0.1), tokens=20)
        for n in range(count)
    ]  # fmt: skip
    found = result(
        summary_of(records), {"model_id": "m"}, date=datetime(2026, 1, 1, tzinfo=UTC), detailed=True
    )
    path.write_text(json.dumps(found))
    return path


def test_one_run_each_says_what_it_can_not_see(tmp_path: Path) -> None:
    before, after = written(tmp_path / "a", 1), written(tmp_path / "b", 2, slower=2.0)
    found = compare([read_run(before)], [read_run(after)])
    verdicts = {row.name: row.verdict for row in found.rows}
    assert verdicts["TTFT"] is Verdict.WORSE
    assert verdicts["TPOT"] is Verdict.INCONCLUSIVE
    assert verdicts["throughput"] is Verdict.INCONCLUSIVE
    ttft = found.rows[0]
    assert ttft.low < 0.5 < ttft.high
    assert "fewer than three runs" in found.notes[0]
    assert max(map(len, rendered(found)[:5])) <= 100


def test_three_runs_a_side_find_a_real_difference(tmp_path: Path) -> None:
    sides = [
        [read_run(written(tmp_path / f"{side}{n}", 7 * n + len(side), slower=slower))
         for n in range(3)]
        for side, slower in (("a", 1.0), ("bb", 0.6))
    ]  # fmt: skip
    found = compare(*sides)
    assert found.rows[0].verdict is Verdict.BETTER
    assert not found.notes


def test_resampled_intervals_hold_what_they_promise() -> None:
    random = Random(5)
    held = 0
    for _ in range(60):
        sides = [[random.lognormvariate(0, 0.5) for _ in range(50)] for _ in range(2)]
        low, high = ratio_of_medians(*sides)
        held += low <= 1 <= high
    assert held >= 52  # 95% of 60 are 57; fewer than 52 come once in a hundred. The seed is fixed.


def test_files_that_can_not_be_compared(tmp_path: Path) -> None:
    path = tmp_path / "x.json"
    path.write_text("{}")
    with pytest.raises(ConfigError, match="lacks ttfts"):
        read_run(path)
    path.write_text("nonsense")
    with pytest.raises(ConfigError, match="not JSON"):
        read_run(path)
    with pytest.raises(ConfigError, match="can't be read"):
        read_run(tmp_path / "none")


def test_what_makes_a_comparison_doubtful_is_said() -> None:
    def run(name: str, prompt: float, valid: bool) -> Measured:
        return Measured(name=name, ttft_s=(1.0,) * 30, tpot_s=(1.0,) * 30, e2e_s=(1.0,) * 30,
                        output_tokens_s=1.0, rates=(1.0,) * 10, mix=(prompt, 10.0), failed=2,
                        is_valid=valid)  # fmt: skip

    notes = "\n".join(compare([run("a", 100, True)], [run("b", 200, False)]).notes)
    assert "prompts differ: 100 tokens and 200" in notes
    assert "b is marked invalid" in notes
    assert "a: 2 requests failed" in notes


def test_the_command(tmp_path: Path) -> None:
    before, after = written(tmp_path / "a", 1), written(tmp_path / "b", 2, slower=2.0)
    worse = CliRunner().invoke(app, ["bench", "compare", str(before), str(after)])
    assert (worse.exit_code, "worse" in worse.output) == (1, True)
    better = CliRunner().invoke(app, ["bench", "compare", str(after), str(before), "--json"])
    assert better.exit_code == 0
    assert json.loads(better.output)["rows"][0]["verdict"] == "better"
