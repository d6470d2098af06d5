"""The benchmark for a GPU runs where there is none, on a tiny shape: it must not fail there."""

from __future__ import annotations

import argparse
import json
from pathlib import Path

from cuda.speculation import measure


def test_it_runs_on_a_cpu(tmp_path: Path) -> None:
    out = tmp_path / "found.json"
    args = argparse.Namespace(
        out=out,
        device="cpu",
        shape="tiny",
        sequences=[1, 4],
        rate=0.8,
        prompt_tokens=16,
        answer_tokens=24,
        rounds=2,
        budget_s=60.0,
    )
    measure(args)
    sizes = json.loads(out.read_text())["sizes"]
    assert [size["sequences"] for size in sizes] == [1, 4]
    for size in sizes:
        assert len(size["gains"]) == 2
        for run in (*size["plain"], *size["guessing"]):
            # All but the first tokens of the last sequence to begin, however many were guessed.
            assert 0 < run["tokens"] <= 23 * size["sequences"]
            assert run["right"] <= run["guesses"]
        assert all(run["guesses"] == 0 for run in size["plain"])
