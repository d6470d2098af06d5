"""Errors of TTFT and TPOT on silicon.csv, beside AIConfigurator's on the same rows, as markdown.

    PYTHONPATH=benchmarks python -m planning.silicon [--rows FILE] [--json] [--all-rows]

Three predictions of ours: by the shipped coefficients (fitted to these rows; computed here), by
coefficients fitted to the other four of five folds, and by coefficients fitted without the model
(both from silicon_predictions.csv, written by fit_silicon.py). AIConfigurator's are from
aiconfigurator_predictions.csv, written by run_aiconfigurator.py. An error is
|predicted / measured - 1|; medians and means. Every row counts; tables that compare have the rows
that both predict.
"""

from __future__ import annotations

import argparse
import csv
import json
import statistics
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from headrace.simulate.closed_loop import closed_loop_s
from headrace.simulate.engines import profile
from headrace.simulate.roofline import step_times
from planning.silicon_model import case_of, family
from planning.silicon_rows import DEFAULT_ROWS, Row, duplicates, read_rows

HERE = Path(__file__).resolve().parent
OURS = {"shipped": "shipped", "folds": "five folds", "model_out": "model left out"}
OTHER = "aiconfigurator"
Pair = tuple[float, float]  # TTFT and TPOT: seconds, or errors


@dataclass(frozen=True, slots=True, kw_only=True)
class Judged:
    row: Row
    predicted: dict[str, Pair]  # seconds, by who predicts

    def errors(self, who: str) -> Pair:
        ttft, tpot = self.predicted[who]
        return abs(ttft / self.row.ttft_s - 1), abs(tpot / self.row.tpot_s - 1)


def judge(rows: Sequence[Row], folder: Path = HERE) -> list[Judged]:
    held = _by_id(folder / "silicon_predictions.csv")
    other = _by_id(folder / "aiconfigurator_predictions.csv")
    return [
        Judged(
            row=row,
            predicted={
                "shipped": shipped(row),
                **_pairs(held.get(row.id, {}), "folds", "folds_"),
                **_pairs(held.get(row.id, {}), "model_out", "model_out_"),
                **_pairs(other.get(row.id, {}), OTHER, ""),
            },
        )
        for row in rows
    ]


def shipped(row: Row) -> Pair:
    """By engines.toml, as the package has it."""
    case = case_of(row)
    known = profile(row.engine, case.gpu, case.formats)
    times = step_times(case.work, case.peaks, known.efficiencies)
    return closed_loop_s(times, case.loop, known.waits)


def _by_id(path: Path) -> dict[str, dict[str, str]]:
    with path.open(newline="") as file:
        return {line["id"]: line for line in csv.DictReader(file)}


def _pairs(line: dict[str, str], who: str, prefix: str) -> dict[str, Pair]:
    ttft, tpot = line.get(f"{prefix}ttft_ms"), line.get(f"{prefix}tpot_ms")
    return {who: (float(ttft) / 1e3, float(tpot) / 1e3)} if ttft and tpot else {}


def summary(judged: Sequence[Judged], who: str) -> dict[str, float]:
    errors = [one.errors(who) for one in judged]
    ttft, tpot = zip(*errors, strict=True)
    return {
        "rows": len(errors),
        "ttft_median": statistics.median(ttft),
        "ttft_mean": statistics.fmean(ttft),
        "tpot_median": statistics.median(tpot),
        "tpot_mean": statistics.fmean(tpot),
    }


GROUPS: dict[str, Callable[[Row], str]] = {
    "GPU": lambda row: row.gpu,
    "model": lambda row: family(row.model),
    "engine": lambda row: row.engine,
}


def tables(judged: Sequence[Judged]) -> Iterator[str]:
    both = [one for one in judged if OTHER in one.predicted]
    yield f"All rows, and the {len(both):,} that AIConfigurator predicts too:\n"
    yield "| | rows | TTFT median | mean | TPOT median | mean |\n|---|---|---|---|---|---|"
    for who, name in OURS.items():
        yield _line(f"Headrace, {name}", summary(judged, who))
    for who, name in OURS.items():
        yield _line(f"Headrace, {name}, rows of both", summary(both, who))
    yield _line("AIConfigurator", summary(both, OTHER))
    ordinary = [one for one in judged if not one.row.odd]
    yield _line("Headrace, model left out, without GB200 totals", summary(ordinary, "model_out"))
    for title, key in GROUPS.items():
        yield f"\nBy {title}, rows of both; median TTFT / TPOT error:\n"
        yield f"| {title} | rows | model left out | five folds | AIConfigurator |"
        yield "|---|---|---|---|---|"
        for value in sorted({key(one.row) for one in both}):
            chosen = [one for one in both if key(one.row) == value]
            parts = [_both(summary(chosen, who)) for who in ("model_out", "folds", OTHER)]
            yield f"| {value} | {len(chosen)} | {' | '.join(parts)} |"


def _line(name: str, found: dict[str, float]) -> str:
    shares = ("ttft_median", "ttft_mean", "tpot_median", "tpot_mean")
    return f"| {name} | {found['rows']:,} | " + " | ".join(f"{found[s]:.1%}" for s in shares) + " |"


def _both(found: dict[str, float]) -> str:
    return f"{found['ttft_median']:.1%} / {found['tpot_median']:.1%}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rows", type=Path, default=DEFAULT_ROWS)
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--all-rows", action="store_true", help="every row with its predictions")
    args = parser.parse_args()
    rows = read_rows(args.rows)
    judged = judge(rows)
    if args.json:
        print(json.dumps(_as_json(judged), indent=1))
        return
    odd = sum(row.odd for row in rows)
    print(f"{len(rows):,} rows, {duplicates(rows)} of them repeat the conditions of another,")
    print(f"{odd} are totals of GB200 racks that no layout explains (judged, never fitted to).\n")
    print("\n".join(tables(judged)))
    if args.all_rows:
        print("\n| row | measured | model left out | shipped | AIConfigurator |")
        print("|---|---|---|---|---|")
        for one in judged:
            told = [one.predicted.get(who) for who in ("model_out", "shipped", OTHER)]
            cells = [(one.row.ttft_s, one.row.tpot_s), *told]
            shown = ["-" if c is None else f"{c[0] * 1e3:.0f} / {c[1] * 1e3:.2f} ms" for c in cells]
            print(f"| {one.row.id} | {' | '.join(shown)} |")


def _as_json(judged: Sequence[Judged]) -> dict[str, object]:
    both = [one for one in judged if OTHER in one.predicted]
    everyone = (*OURS, OTHER)
    return {
        "rows": len(judged),
        "rows_of_both": len(both),
        "all": {who: summary(judged, who) for who in OURS},
        "both": {who: summary(both, who) for who in everyone},
        **{
            f"by_{title.lower()}": {
                value: {
                    who: summary([one for one in both if key(one.row) == value], who)
                    for who in everyone
                }
                for value in sorted({key(one.row) for one in both})
            }
            for title, key in GROUPS.items()
        },
    }


if __name__ == "__main__":
    main()
