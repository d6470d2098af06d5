"""The break-even plot: well-formed, complete, and right where it can be read off."""

from __future__ import annotations

import re
from xml.etree import ElementTree

import pytest
from hypothesis import given
from hypothesis import strategies as st

from headrace.hardware.api_prices import parse_api
from headrace.search.cost import Hosting, Mix, break_even
from headrace.search.cost_picture import Chart, chart_of, stairs, svg, terminal

SVG = "{http://www.w3.org/2000/svg}"
HOSTING = Hosting(
    output_tokens_s=215,
    mix=Mix(input_tokens=0, output_tokens=256),
    gpus=2,
    usd_per_gpu_hour=4.9,
)
APIS = (parse_api("<gpt&4>=20/20"), parse_api("4o=7.5/7.5"))


def chart(hosting: Hosting = HOSTING, tokens: float | None = 80e6) -> Chart:
    found = chart_of(hosting, [break_even(hosting, api) for api in APIS], tokens)
    assert found is not None
    return found


def test_stairs_rise_by_a_replica_at_each_capacity() -> None:
    corners = stairs(chart())
    assert [tokens for tokens, _ in corners[:3]] == pytest.approx([0, 557.28e6, 557.28e6])
    assert [usd for _, usd in corners[:3]] == pytest.approx([7056, 7056, 14112])


def test_the_svg_has_what_it_should() -> None:
    picture = chart()
    root = ElementTree.fromstring(svg(picture))
    titles = [title.text for title in root.iter(f"{SVG}title")]
    assert "needs 2 replicas from here on" in titles
    assert "break-even with <gpt&4>: 352.8M tokens a month" in titles
    assert not any("4o" in (title or "") for title in titles)  # it never breaks even
    text = [each.text for each in root.iter(f"{SVG}text")]
    assert "you: 80M" in text
    assert "2 replicas" in text
    for line in root.iter(f"{SVG}line"):
        for name in ("x1", "x2", "y1", "y2"):
            assert 0 <= float(line.attrib[name]) <= 820


@given(
    st.floats(1, 1e5), st.floats(0, 100), st.one_of(st.none(), st.floats(1e3, 1e13)),
    st.floats(0, 1e6),
)  # fmt: skip
def test_any_picture_stays_within_its_frame(
    rate: float, usd: float, tokens: float | None, work: float
) -> None:
    hosting = Hosting(
        output_tokens_s=rate,
        mix=Mix(input_tokens=100, output_tokens=100),
        usd_per_gpu_hour=usd,
        engineering_hours=1,
        engineering_usd_per_hour=work,
    )
    picture = chart(hosting, tokens)
    root = ElementTree.fromstring(svg(picture))
    for line in root.iter(f"{SVG}polyline"):
        for pair in line.attrib["points"].split():
            x, y = map(float, pair.split(","))
            assert 0 <= x <= 820
            assert 0 <= y <= 440
    shown = terminal(picture)
    assert all(len(row) <= 100 for row in shown.splitlines())
    assert "#" in shown


def test_the_terminal_shows_each_line() -> None:
    shown = terminal(chart())
    assert re.search(r"# hosted   a <gpt&4>   b 4o   \| your volume", shown)
    rows = [row for row in shown.splitlines() if "|" in row]
    assert sum("#" in row for row in rows) >= 3  # three levels
    assert "|" in terminal(chart(tokens=None))  # the axis
    assert "your volume" not in terminal(chart(tokens=None))


def test_without_a_price_there_is_no_picture() -> None:
    hosting = Hosting(output_tokens_s=1, mix=Mix(input_tokens=0, output_tokens=1))
    assert chart_of(hosting, [break_even(hosting, APIS[0])]) is None
    assert chart_of(HOSTING, []) is None
