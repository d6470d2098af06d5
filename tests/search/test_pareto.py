"""The front by its definition, and pictures that are well-formed and show every point."""

from __future__ import annotations

from xml.etree import ElementTree

from hypothesis import given
from hypothesis import strategies as st

from headrace.search.pareto import Point, front_of
from headrace.search.picture import Axes, svg, terminal

AXES = Axes(title="70B, 20 requests/s", cost="USD a month", speed="tokens/s a user sees")
SVG = "{http://www.w3.org/2000/svg}"


def point(cost: float, speed: float, label: str = "p") -> Point:
    return Point(
        label=label,
        group=f"gpu {cost % 3:.0f}",
        cost=cost,
        speed=speed,
        speed_low=speed * 0.8,
        speed_high=speed * 1.2,
    )


points_lists = st.lists(
    st.builds(point, st.integers(0, 50).map(float), st.integers(1, 50).map(float)), max_size=20
)


@given(points=points_lists)
def test_the_front_is_what_nothing_beats(points: list[Point]) -> None:
    front = front_of(points)

    def beats(one: Point, other: Point) -> bool:
        no_worse = one.cost <= other.cost and one.speed >= other.speed
        return no_worse and (one.cost, one.speed) != (other.cost, other.speed)

    unbeaten = {(p.cost, p.speed) for p in points if not any(beats(o, p) for o in points)}
    found = [(points[i].cost, points[i].speed) for i in front]
    assert set(found) == unbeaten
    assert found == sorted(found)
    assert len(found) == len(unbeaten)


@given(points=points_lists.filter(bool))
def test_pictures_hold_every_point(points: list[Point]) -> None:
    root = ElementTree.fromstring(svg(points, AXES))
    dots = [c for c in root.iter(f"{SVG}circle") if c.find(f"{SVG}title") is not None]
    assert len(dots) == len(points)
    for dot in dots:
        assert 0 <= float(dot.attrib["cx"]) <= 820
        assert 0 <= float(dot.attrib["cy"]) <= 460
    lines = terminal(points, AXES).splitlines()
    assert max(map(len, lines)) <= 100
    assert sum(line.startswith("  A  ") for line in lines) == 1


def test_labels_are_escaped() -> None:
    ElementTree.fromstring(svg([point(1, 1, 'a < b & "c"')], AXES))
