"""The table of peers: medians, spreads, ratios and failures, worked out by hand here."""

from __future__ import annotations

import json

import pytest

from peers.report import Cell, Results, find_ratio, meets, render_markdown, show_cell, to_json
from peers.workloads import CONTENDERS, WORKLOADS, Contender, Workload, takes_part

OURS = Contender("headrace", "q4_1")
OURS_OTHER = Contender("headrace", "q4_0")
SAME = Contender("llama.cpp", "q4_1")
FAST = Contender("llama.cpp", "q4_0")
BROKEN = Contender("vllm", "float32")
DECODE = Workload("decode 1", "4-bit", "decode", 1, target=2.0)
FIRST = Workload("first token 1", "4-bit", "first_token", 1, target=0.6)


def make_results() -> Results:
    results = Results(notes={"headrace": "threads 2"})
    samples = {OURS: [300.0, 100.0, 200.0], OURS_OTHER: [900.0], SAME: [40.0, 60.0], FAST: [80.0]}
    for who, values in samples.items():
        results.cell(DECODE, who).samples.extend(values)
    results.cell(DECODE, BROKEN).failures.append("ended with signal SIGILL:\n a | b")
    return results


def test_the_ratio_is_of_our_first_contender_to_the_best_peer() -> None:
    ratio = find_ratio(make_results(), DECODE)
    assert ratio is not None
    assert (ratio.value, ratio.contender) == (2.5, FAST)  # 200 / 80: neither 900 nor the mean


def test_the_same_weights_are_compared_apart() -> None:
    ratio = find_ratio(make_results(), DECODE, same_format=True)
    assert ratio is not None
    assert (ratio.value, ratio.contender) == (4.0, SAME)  # 200 / median(40, 60)


def test_where_less_is_better_the_best_peer_is_the_quickest() -> None:
    results = Results()
    for who, value in ((OURS, 50.0), (SAME, 200.0), (FAST, 100.0)):
        results.cell(FIRST, who).samples.append(value)
    ratio = find_ratio(results, FIRST)
    assert ratio is not None
    assert (ratio.value, ratio.contender) == (0.5, FAST)
    assert meets(FIRST, ratio)
    results.cell(FIRST, OURS).samples[:] = [61.0]
    slower = find_ratio(results, FIRST)
    assert slower is not None
    assert not meets(FIRST, slower)


def test_a_target_is_met_at_the_target_and_not_below() -> None:
    results = make_results()
    results.cell(DECODE, OURS).samples[:] = [160.0]
    at = find_ratio(results, DECODE)
    assert at is not None
    assert meets(DECODE, at)
    results.cell(DECODE, OURS).samples[:] = [159.0]
    below = find_ratio(results, DECODE)
    assert below is not None
    assert not meets(DECODE, below)


@pytest.mark.parametrize("missing", [OURS, "peers"])
def test_without_one_side_there_is_no_ratio(missing: Contender | str) -> None:
    results = Results()
    present = [SAME, FAST] if missing is OURS else [OURS, OURS_OTHER]
    for who in present:
        results.cell(DECODE, who).samples.append(1.0)
    assert find_ratio(results, DECODE) is None


def test_our_second_contender_does_not_stand_in_for_a_first_that_failed() -> None:
    results = make_results()
    results.cell(DECODE, OURS).samples.clear()
    assert find_ratio(results, DECODE) is None


@pytest.mark.parametrize(
    ("cell", "shown"),
    [
        (Cell([300.0, 100.0, 200.0]), "200 (100-300)"),
        (Cell([1234.5]), "1,234"),
        (Cell([9.87, 12.0]), "10.9 (9.9-12.0)"),
        (Cell([5.0], ["late"]), "5.0, 1 failed"),
        (Cell([], ["first", "no\nanswer | in time"]), "failed: no answer / in time"),
        (Cell(), ""),
        (None, ""),
    ],
)
def test_cells_are_shown_with_their_spread_or_their_reason(cell: Cell | None, shown: str) -> None:
    assert show_cell(cell) == shown


def test_a_long_reason_is_cut() -> None:
    shown = show_cell(Cell([], ["x" * 500]))
    assert len(shown) < 200
    assert shown.endswith("…")


def test_the_table_has_a_column_for_each_contender_and_keeps_failures() -> None:
    table = render_markdown(make_results(), [DECODE], "Medians", "A machine.").splitlines()
    rows = [line for line in table if line.startswith("|")]
    widths = {row.count("|") for row in rows}
    assert len(widths) == 1, "a reason with a bar in it would break the table"
    assert [cell.strip() for cell in rows[0].split("|")[2:7]] == [
        who.name for who in (OURS, OURS_OTHER, SAME, FAST, BROKEN)
    ]
    assert "failed: ended with signal SIGILL" in rows[2]
    assert "**2.50× (llama.cpp q4_0)**" in rows[2]
    assert "at least 2×" in rows[2]
    assert table[-1] == "- headrace: threads 2"


def test_json_holds_every_sample_and_every_failure() -> None:
    report = json.loads(json.dumps(to_json(make_results(), [DECODE, FIRST], "A machine.", 3)))
    decode, first = report["rows"]
    assert decode["contenders"]["headrace q4_1"]["samples"] == [300.0, 100.0, 200.0]
    assert decode["contenders"]["vllm float32"]["median"] is None
    assert decode["contenders"]["vllm float32"]["failures"] == ["ended with signal SIGILL:\n a | b"]
    assert (decode["ratio"], decode["best_peer"]) == (2.5, "llama.cpp q4_0")
    assert (decode["meets_target"], decode["same_weights_ratio"]) == (True, 4.0)
    assert (first["ratio"], first["contenders"]) == (None, {})


def test_every_row_has_us_and_a_peer() -> None:
    for workload in WORKLOADS:
        taking = [who for who in CONTENDERS[workload.group] if takes_part(who, workload)]
        assert taking[0].engine == "headrace", workload.name
        assert {who.engine for who in taking} >= {"headrace", "llama.cpp", "openvino"}
        assert workload.target > 0
