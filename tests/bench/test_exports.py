"""Others' formats: what their readers need is there, with the right values."""

from __future__ import annotations

import csv
import io
import json
from html.parser import HTMLParser
from pathlib import Path
from xml.etree import ElementTree

import pytest
from tests.bench.test_summary import failed, summary_of, whole

from headrace.bench.aiperf import write_records, write_table
from headrace.bench.charts import Series, chart, ticks
from headrace.bench.html import page
from headrace.bench.observed import observed_asks
from headrace.bench.plot import bars
from headrace.bench.plot import lines as plotted
from headrace.bench.series import at_once, slice_means, time_means, token_rates
from headrace.bench.sweep import Bracket, Point
from headrace.client.answer import Failure
from headrace.workload.slo import Slo
from headrace.workload.trace import read_trace, write_mooncake

RECORDS = [whole(0.1 * n) for n in range(40)] + [failed(4.1, Failure.HTTP, "503: busy")]


def test_aiperfs_records(tmp_path: Path) -> None:
    path = tmp_path / "profile_export.jsonl"
    assert write_records(summary_of(RECORDS), path, began_unix_s=1e9) == 41
    rows = [json.loads(line) for line in path.read_text().splitlines()]
    first, last = rows[0], rows[-1]
    assert first["metadata"]["request_start_ns"] == 10**18
    assert first["metadata"]["request_end_ns"] == 10**18 + 400_000_000
    assert first["metadata"]["benchmark_phase"] == "profiling"
    metrics = first["metrics"]
    assert metrics["time_to_first_token"] == {"value": pytest.approx(200.0), "unit": "ms"}
    assert metrics["inter_token_latency"] == {"value": pytest.approx(50.0), "unit": "ms"}
    assert metrics["request_latency"] == {"value": pytest.approx(400.0), "unit": "ms"}
    assert metrics["output_sequence_length"] == {"value": 5, "unit": "tokens"}
    assert metrics["inter_chunk_latency"]["value"] == pytest.approx([50.0] * 4)
    assert first["error"] is None
    assert last["error"] == {"code": 503, "type": "HTTP status", "message": "503: busy"}
    assert last["metrics"] == {"error_isl": {"value": 90, "unit": "tokens"}}


def test_aiperfs_table() -> None:
    file = io.StringIO()
    write_table(summary_of(RECORDS), file)
    rows = list(csv.reader(io.StringIO(file.getvalue())))
    names = ["p1", "p5", "p10", "p25", "p50", "p75", "p90", "p95", "p99"]
    assert rows[0] == ["Metric", "avg", "min", "max", *names, "std"]
    table = {row[0]: row[1:] for row in rows if row}
    ttft = dict(zip(rows[0][1:], table["Time to First Token (ms)"], strict=True))
    assert (ttft["avg"], ttft["p50"], ttft["p90"], ttft["std"]) == ("200.00",) * 3 + ("0.00",)
    assert ttft["p99"] == ttft["p1"] == ""  # refused: 40 requests
    assert table["Request Count"] == ["40.00"]
    assert table["Error Request Count"] == ["1.00"]


def test_what_was_sent_can_be_sent_again(tmp_path: Path) -> None:
    path = tmp_path / "trace.jsonl"
    assert write_mooncake(observed_asks(RECORDS), path) == 41
    asks = list(read_trace(path).asks())
    assert [ask.at_s for ask in asks] == pytest.approx([0.1 * n for n in range(40)] + [4.1])
    assert asks[0].prompt_tokens == 100  # by the endpoint's count, not the 90 that were asked for
    assert asks[0].output_tokens == 5


class _Loads(HTMLParser):
    """Everything that a page would fetch, and every tag that stays open."""

    def __init__(self) -> None:
        super().__init__()
        self.fetched: list[str] = []
        self.open: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        if tag not in ("meta", "line", "rect", "circle", "path"):
            self.open.append(tag)
        self.fetched += [f"{tag} {name}" for name, _ in attrs if name in ("src", "href")]

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        pass

    def handle_endtag(self, tag: str) -> None:
        if tag != "rect":
            assert self.open.pop() == tag


def test_the_report_is_one_file_that_fetches_nothing() -> None:
    summary = summary_of(RECORDS, slo=Slo(ttft_s=0.1))
    bracket = Bracket(low_s=1.0, high_s=1.2, points=(
        Point(rate_s=1.0, summary=summary, is_saturated=False, is_kept=True),
        Point(rate_s=1.2, summary=summary, is_saturated=True, is_kept=False),
    ))  # fmt: skip
    text = page(summary, {"model_id": "<b>"}, title="<script>", date="today", bracket=bracket)
    parser = _Loads()
    parser.feed(text)
    assert (parser.fetched, parser.open) == ([], [])
    assert "<script" not in text
    assert "&lt;script&gt;" in text
    assert "HTTP 503" in text
    assert "between 1 and 1.2 requests/s" in text
    assert "refused" in text  # P99
    assert text.count("<svg") == 8


def test_a_report_of_nothing() -> None:
    text = page(summary_of([failed(0.0, Failure.CONNECT)]), {}, title="t", date="d")
    assert text.count("No data.") >= 4


def test_charts_are_xml_with_round_numbers() -> None:
    drawn = chart("A & B", "x", "y", [
        Series(name="a", points=[(0, 1), (10, 3)], style="area"),
        Series(name="b", points=[(5, 2)], style="dots", tone=1),
        Series(name="c", points=[(1, 1), (2, 4)], style="steps", tone=2),
    ])  # fmt: skip
    root = ElementTree.fromstring(drawn)
    texts = [found.text for found in root.iter("text")]
    assert {"0", "2", "4", "6", "8", "10"} <= set(texts)
    assert root.find("svg/g/circle") is not None
    assert ticks(0, 1) == pytest.approx([0, 0.2, 0.4, 0.6, 0.8, 1.0])
    assert ticks(3, 3) == [3]
    assert ticks(0, 4300, 4) == [0, 2000, 4000]


def test_pictures_for_a_terminal() -> None:
    assert bars([0, 1, 2, 7]) == "▁▂▃█"
    assert bars([0, 0]) == "▁▁"
    assert bars([7, None, 7]) == "█ █"  # nothing was measured there, which is not 0
    shown = list(plotted(summary_of(RECORDS)))
    assert [line.split()[0] for line in shown] == ["tokens/s", "at", "TTFT"]
    assert max(map(len, shown)) <= 100


def test_series_hold_every_token_and_every_request() -> None:
    summary = summary_of(RECORDS[:40])
    rates = token_rates(summary, 10)
    assert sum(rate for _, rate in rates) * summary.wall_s / 10 == pytest.approx(200)
    for one in summary.records:
        one.end_s = one.last_s
    found = at_once(summary)
    assert max(number for _, number in found) in (4, 5)  # 0.4 s each, one every 0.1 s
    assert found[-1][1] == 0


def test_a_level_lasts_until_the_next_step() -> None:
    """Four requests for ten seconds are four in every slice, not only in those where one began."""
    steps = [(0.0, 4.0), (9.0, 2.0), (10.0, 0.0)]
    assert [y for _, y in time_means(steps, 5)] == pytest.approx([4, 4, 4, 4, 3])
    assert time_means([], 5) == time_means([(1.0, 2.0)], 5) == []


def test_steps_too_many_to_see_become_means_over_time() -> None:
    few = [(0.0, 1.0), (1.0, 2.0)]
    assert slice_means(few) == few
    # 7 for a tenth of each millisecond, 8 for the rest.
    many = [
        (0.001 * n + part, level) for n in range(1000) for part, level in ((0, 7.0), (1e-4, 8.0))
    ]
    found = slice_means([*many, (1.0, 0.0)], slices=10)
    assert [at_s for at_s, _ in found] == pytest.approx([0.1 * n for n in range(11)])
    assert [level for _, level in found] == pytest.approx([7.9] * 10 + [0.0])
