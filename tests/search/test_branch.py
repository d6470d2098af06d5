"""Branch and bound finds what trying everything finds, with fewer trials, in any wave order."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from hypothesis import given, settings
from hypothesis import strategies as st

from headrace.search.branch import WAVE, Found, Shape, branch_and_bound, least_replicas

Variant = tuple[str, float]  # a name, and the rate that it really holds


@dataclass(frozen=True)
class Trial:
    holds: bool
    rate: float


def run(jobs: Sequence[tuple[Variant, float]]) -> list[Trial]:
    return [Trial(rate <= variant[1] * (1 + 1e-12), rate) for variant, rate in jobs]


def settled(shapes: Sequence[Shape[Variant]], rate: float, keep: int) -> Found[Variant, Trial]:
    *_, found = branch_and_bound(shapes, rate, run, keep=keep, most_tries=100)
    return found


@st.composite
def shape_lists(draw: st.DrawFn) -> list[Shape[Variant]]:
    shapes = []
    for number in range(draw(st.integers(1, 8))):
        held = draw(st.lists(st.floats(0.2, 20), min_size=1, max_size=4))
        slack = draw(st.lists(st.floats(1, 3), min_size=len(held), max_size=len(held)))
        shapes.append(
            Shape(
                name=f"shape {number}",
                variants=tuple((f"{number}.{i}", h) for i, h in enumerate(held)),
                bounds=tuple(h * s for h, s in zip(held, slack, strict=True)),
                replica_cost=draw(st.floats(1, 10)),
            )
        )
    return shapes


@given(shapes=shape_lists(), rate=st.floats(0.1, 100), keep=st.integers(1, 4))
@settings(max_examples=300, deadline=None)
def test_pruning_never_removes_a_winner(
    shapes: list[Shape[Variant]], rate: float, keep: int
) -> None:
    everything = sorted(
        math.ceil(rate / max(held for _, held in shape.variants) - 1e-9) * shape.replica_cost
        for shape in shapes
    )
    found = settled(shapes, rate, keep).ranked()
    costs = [sized.cost for sized in found]
    assert [round(c, 6) for c in costs[:keep]] == [round(c, 6) for c in everything[:keep]]


def test_shapes_that_can_not_win_are_not_tried() -> None:
    cheap = [
        Shape(name=f"cheap {i}", variants=(("a", 5.0),), bounds=(6.0,), replica_cost=1.0)
        for i in range(WAVE)
    ]
    dear = Shape(name="dear", variants=(("b", 9.0),), bounds=(10.0,), replica_cost=50.0)
    found = settled([dear, *cheap], 5.0, keep=1)
    assert {sized.shape.name for sized in found.sized} == {shape.name for shape in cheap}
    assert found.beaten() == [(dear, 50.0)]
    assert found.trials == WAVE


def test_another_variant_is_tried_before_another_replica() -> None:
    shape = Shape(
        name="s", variants=(("slow", 2.0), ("fast", 5.0)), bounds=(6.0, 6.0), replica_cost=1.0
    )
    (sized,) = settled([shape], 5.0, keep=1).sized
    assert (sized.variant[0], sized.replicas) == ("fast", 1)


def test_a_large_fleet_takes_few_trials_and_is_exact() -> None:
    shape = Shape(name="s", variants=(("v", 1.0),), bounds=(2.0,), replica_cost=1.0)
    found = settled([shape], 100.0, keep=1)
    assert found.sized[0].replicas == 100
    assert found.trials < 15


def test_one_replica_serves_a_rate_below_its_bound() -> None:
    assert least_replicas(0.01, 5.0) == 1
    assert least_replicas(20.0, 5.0) == 4
    assert least_replicas(20.1, 5.0) == 5
