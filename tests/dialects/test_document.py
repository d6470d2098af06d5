"""docs/from-other-engines.md says what the code does."""

from __future__ import annotations

import contextlib
import io
import re
from pathlib import Path

import pytest
import typer.main

from headrace.cli.commands import app
from headrace.cli.foreign import translated
from headrace.core.foreign.engines import ENGINES

DOCUMENT = (Path(__file__).parents[2] / "docs/from-other-engines.md").read_text()
SERVE = typer.main.get_command(app).commands["serve"]  # type: ignore[attr-defined]
ROWS = [
    [re.findall(r"`([^`]+)`", cell) for cell in line.split("|")[1:-1]]
    for line in DOCUMENT.splitlines()
    if line.startswith("| `--")
]
VALUES = ("1", "0.5", "fp8", "f16", "auto", "fcfs", "fp8_e4m3fn", "info")


@pytest.mark.parametrize("row", ROWS, ids=lambda row: row[0][0])
def test_their_words_are_ours(row: list[list[str]]) -> None:
    (ours,), theirs = row[0], [word for cell in row[1:] for word in cell]
    assert theirs
    for word in theirs:
        flag, *given = word.split()
        found = next(engine.find(flag) for engine in ENGINES.values() if engine.find(flag))
        assert found is not None
        tried = [[]] if found[0].is_switch else [given] if given else [[v] for v in VALUES]
        results = []
        for value in tried:
            with contextlib.suppress(Exception):
                results.append(" ".join(translated([flag, *value], SERVE.params)))
        assert any(result.startswith(ours) for result in results), (word, results)


def test_versions_are_named() -> None:
    for engine in ENGINES.values():
        assert engine.version.removeprefix("of ") in DOCUMENT


def test_what_the_example_prints() -> None:
    example = re.search(r"```python\n(from headrace.dialects.*?)```", DOCUMENT, re.DOTALL)
    expected = re.search(r"This prints:\n\n```text\n(.*?)```", DOCUMENT, re.DOTALL)
    assert example
    assert expected
    said = io.StringIO()
    with contextlib.redirect_stdout(said):
        exec(example[1], {})
    assert said.getvalue() == expected[1]
