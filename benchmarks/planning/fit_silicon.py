"""Fit the coefficients of engines to silicon.csv, judge them on rows that they were not fitted to.

    PYTHONPATH=benchmarks python -m planning.fit_silicon [--rows FILE]

Writes the shipped coefficients (fitted to all rows) and their bands into
src/headrace/simulate/engines.toml, and what five folds and folds by model predict for every row
into benchmarks/planning/silicon_predictions.csv, which silicon.py tabulates. Takes two minutes.
"""

from __future__ import annotations

import argparse
import csv
import random
import re
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import numpy as np

from headrace.simulate.engines import MOST
from planning.silicon_fit import ENGINES, NAMES, Column, fit, predict, table_of
from planning.silicon_model import Case, case_of, family
from planning.silicon_rows import DEFAULT_ROWS, Row, read_rows

HERE = Path(__file__).resolve().parent
ENGINES_FILE = HERE.parents[1] / "src/headrace/simulate/engines.toml"
PREDICTIONS = HERE / "silicon_predictions.csv"
FOLDS = 5
_BAND = (0.1, 0.9)
Values = Mapping[tuple[str, str, str], float]  # (coefficient, kind of factor, its value)
Bands = Mapping[str, Mapping[str, tuple[float, float]]]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rows", type=Path, default=DEFAULT_ROWS)
    args = parser.parse_args()
    cases = [case_of(row) for row in read_rows(args.rows)]
    folds = held_out(cases, _folds([case.row for case in cases]))
    by_model = held_out(cases, [family(case.row.model) for case in cases])
    at = fit([case for case in cases if not case.row.odd])
    _write_predictions(cases, (*folds, *by_model, *predict(table_of(cases), at)))
    values = {
        (name, kind or "base", value): min(amount, MOST.get(name, amount)) if not kind else amount
        for (name, kind, value), amount in zip(NAMES, map(float, np.exp(at)), strict=True)
    }
    found = bands(cases, by_model)
    ENGINES_FILE.write_text(put_values(ENGINES_FILE.read_text(), values, found))


def held_out(cases: Sequence[Case], groups: Sequence[object]) -> tuple[Column, Column]:
    """TTFT and TPOT of each row by coefficients that were fitted without its group."""
    table = table_of(cases)
    ttft, tpot = np.zeros(len(cases)), np.zeros(len(cases))
    for group in sorted(set(map(str, groups))):
        judged = np.array([str(other) == group for other in groups])
        at = fit([c for c, out in zip(cases, judged, strict=True) if not out and not c.row.odd])
        predicted = predict(table, at)
        ttft[judged], tpot[judged] = predicted[0][judged], predicted[1][judged]
    return ttft, tpot


def _folds(rows: Sequence[Row]) -> list[int]:
    """Equal conditions in the same fold, whatever a row calls the model."""
    conditions = [(family(row.model), *row.conditions[3:]) for row in rows]
    distinct = sorted(set(conditions), key=str)
    random.Random(15).shuffle(distinct)
    fold = {one: index % FOLDS for index, one in enumerate(distinct)}
    return [fold[one] for one in conditions]


def bands(cases: Sequence[Case], held: tuple[Column, Column]) -> Bands:
    """By engine: between which multiples of a prediction eight of ten measurements were, for models
    that were left out."""
    found = {}
    for engine in ENGINES:
        own = np.array([case.row.engine == engine and not case.row.odd for case in cases])
        found[engine] = {
            name: _quantiles(np.array([pick(case.row) for case in cases])[own] / predicted[own])
            for name, predicted, pick in zip(("ttft", "tpot"), held, _MEASURED, strict=True)
        }
    return found


def _ttft(row: Row) -> float:
    return row.ttft_s


def _tpot(row: Row) -> float:
    return row.tpot_s


_MEASURED: tuple[Callable[[Row], float], ...] = (_ttft, _tpot)


def _quantiles(ratios: Column) -> tuple[float, float]:
    low, high = np.quantile(ratios, _BAND)
    return float(low), float(high)


def put_values(text: str, values: Values, found: Bands) -> str:
    """engines.toml with these values in place of its own; what is not among them stays."""
    kind = value = ""
    lines = []
    for line in text.splitlines():
        if header := re.match(r"\[(\w+)\.?(\w*)\]", line):
            kind, value = header.groups()
        name = line.partition(" = ")[0]
        if kind == "band" and value in found and name in found[value]:
            low, high = found[value][name]
            line = _put(line, name, f"[{low:.2f}, {high:.2f}]")
        elif (name, kind, value) in values:
            line = _put(line, name, f"{values[name, kind, value]:.4g}")
        lines.append(line)
    return "\n".join(lines) + "\n"


def _put(line: str, name: str, value: str) -> str:
    _, mark, remark = line.partition("  # ")
    return f"{name} = {value}{mark}{remark}"


def _write_predictions(cases: Sequence[Case], columns: Sequence[Column]) -> None:
    kinds = ("folds", "model_out", "shipped")
    with PREDICTIONS.open("w", newline="") as file:
        writer = csv.writer(file, lineterminator="\n")
        names = [f"{kind}_{what}_ms" for kind in kinds for what in ("ttft", "tpot")]
        writer.writerow(("id", *names))
        for case, *values in zip(cases, *columns, strict=True):
            writer.writerow([case.row.id, *(f"{value * 1e3:.4g}" for value in values)])


if __name__ == "__main__":
    main()
