"""A plan's columns stay together, whatever is put in and taken out."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from headrace.core.step import DrawParams, FlatBias, RowExtra, StepPlan

GREEDY = DrawParams(temperature=0.0)


def added(plan: StepPlan, number: int, tokens: int) -> None:
    """A row in which everything tells its number."""
    plan.add(
        number,
        [number] * tokens,
        10 * number,
        [number, number],
        number + 1,
        GREEDY if number % 2 else None,
        number / 100,
        RowExtra(top_logprobs=number) if number % 3 == 0 else None,
    )


@given(st.lists(st.integers(1, 4), max_size=8), st.data())
def test_rows_are_removed_as_if_they_had_never_been_there(
    counts: list[int], data: st.DataObject
) -> None:
    plan = StepPlan()
    rows = list(enumerate(counts))
    for number, count in rows:
        added(plan, number, count)
    for _ in range(data.draw(st.integers(0, len(rows)))):
        row = data.draw(st.integers(0, len(rows) - 1))
        plan.remove(row)
        del rows[row]
    expected = StepPlan()
    for number, count in rows:
        added(expected, number, count)
    assert plan == expected
    assert len(plan) == len(rows)
    assert plan.batch_tokens == sum(count for _, count in rows)


def test_what_a_draw_is() -> None:
    assert not GREEDY.samples
    assert not DrawParams(temperature=0.0, top_p=0.5, top_k=3).samples
    assert DrawParams(temperature=0.1).samples
    for draw in (
        DrawParams(temperature=0.0, repetition_penalty=0.5),
        DrawParams(temperature=0.0, presence_penalty=0.5),
        DrawParams(temperature=0.0, frequency_penalty=0.5),
    ):
        assert draw.penalizes
        assert draw.adjusts
        assert draw.samples
    for draw in (
        DrawParams(temperature=0.0, bias=FlatBias({3: 1.0})),
        DrawParams(temperature=0.0, allowed=[]),
    ):
        assert draw.adjusts
        assert draw.samples
        assert not draw.penalizes
