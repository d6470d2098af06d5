"""The published errors on measured rows are what the package predicts: on a few rows of every
engine, GPU and model, with AIConfigurator's stored predictions beside them.

silicon_some.csv is 59 lines of silicon.csv (repository ai-dynamo/aiconfigurator, Apache-2.0)."""

from __future__ import annotations

import csv
from pathlib import Path

import pytest

from planning.fit_silicon import PREDICTIONS, put_values
from planning.silicon import OTHER, judge, summary, tables
from planning.silicon_fit import begin, fit, loss, table_of
from planning.silicon_model import case_of
from planning.silicon_rows import duplicates, read_rows

ROWS = read_rows(Path(__file__).parent / "data" / "silicon_some.csv")


def test_the_shipped_coefficients_give_the_published_predictions() -> None:
    with PREDICTIONS.open(newline="") as file:
        published = {line["id"]: line for line in csv.DictReader(file)}
    for one in judge(ROWS):
        ttft, tpot = one.predicted["shipped"]
        line = published[one.row.id]
        assert ttft * 1e3 == pytest.approx(float(line["shipped_ttft_ms"]), rel=0.01)
        assert tpot * 1e3 == pytest.approx(float(line["shipped_tpot_ms"]), rel=0.01)


def test_models_that_were_left_out_are_closer_than_by_aiconfigurator() -> None:
    both = [one for one in judge(ROWS) if OTHER in one.predicted]
    ours, theirs = summary(both, "model_out"), summary(both, OTHER)
    assert ours["ttft_median"] < theirs["ttft_median"]
    assert ours["tpot_median"] < theirs["tpot_median"]


def test_tables_have_every_group() -> None:
    text = "\n".join(tables(judge(ROWS)))
    for name in ("b200_sxm", "DeepSeek-V3", "sglang", "Headrace, model left out"):
        assert f"| {name}" in text


def test_gpus_are_counted_once() -> None:
    layouts = {row.id: row for row in ROWS}
    assert all(row.gpus <= 8 or row.odd for row in ROWS)
    assert all(row.gpus % row.attention_copies == 0 for row in ROWS)
    twice = [row for name, row in layouts.items() if "_tp8_ep8_" in name]
    assert twice
    assert all(row.gpus == 8 == row.expert_parallel for row in twice)
    assert duplicates([*ROWS, ROWS[0]]) == duplicates(ROWS) + 1


def test_a_fit_comes_closer_than_its_beginning() -> None:
    cases = [case_of(row) for row in ROWS if not row.odd]
    table = table_of(cases)
    assert loss(table, fit(cases, rounds=15)) < 0.9 * loss(table, begin())


def test_values_are_put_where_they_belong() -> None:
    text = "[base]\nmemory = 1  # share\n[engine.a]\nmemory = 1\n[band.a]\ntpot = [0, 0]\n"
    found = put_values(text, {("memory", "engine", "a"): 0.5}, {"a": {"tpot": (0.9, 1.1)}})
    assert found == text.replace("[engine.a]\nmemory = 1", "[engine.a]\nmemory = 0.5").replace(
        "[0, 0]", "[0.90, 1.10]"
    )
