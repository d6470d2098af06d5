"""core/sampling.py: what a row of the table must have, so that a new one is not left half done."""

from __future__ import annotations

from dataclasses import asdict, fields

import pytest

from headrace.backends.reference import sampling as reference
from headrace.core.request import SamplingParams
from headrace.core.sampling import (
    FILTERS,
    MODEL_DEFAULTS,
    NEUTRAL,
    PENALTIES,
    DrawFields,
    DrawNumbers,
    filters_of,
    model_defaults,
    penalties_of,
    rows_of,
)

ROWS = dict(rows_of(DrawFields))


def test_every_draw_parameter_is_a_row_with_a_column() -> None:
    assert list(ROWS) == [each.name for each in fields(DrawFields)]
    assert {*FILTERS, *PENALTIES} == set(ROWS)
    # Kernels read them by place: new ones come behind.
    assert FILTERS[:5] == ("temperature", "top_p", "min_p", "typical_p", "top_k")
    assert PENALTIES[:3] == ("repetition_penalty", "presence_penalty", "frequency_penalty")


@pytest.mark.parametrize("name", ROWS)
def test_the_reference_says_what_a_parameter_does(name: str) -> None:
    assert reference.__doc__ is not None
    assert name in reference.__doc__


@pytest.mark.parametrize("name", dict(rows_of(SamplingParams)))
def test_its_meaning_is_a_sentence(name: str) -> None:
    help = dict(rows_of(SamplingParams))[name].help
    assert help[0].isupper() or help[0].isdigit()
    assert help.endswith(".")
    assert len(help) <= 100


def test_what_a_model_may_give_has_a_key_in_gguf_and_is_open_by_default() -> None:
    assert tuple(name for name, row in ROWS.items() if row.gguf_key) == MODEL_DEFAULTS
    assert all(getattr(SamplingParams(), name) is None for name in MODEL_DEFAULTS)
    assert None not in asdict(NEUTRAL).values()


def test_nothing_asked_for_is_neutral_in_every_column() -> None:
    chosen = SamplingParams().chosen
    assert chosen == NEUTRAL
    assert filters_of(chosen)[:5] == (1.0, 1.0, 0.0, 1.0, 0)
    assert penalties_of(chosen)[:3] == (1.0, 0.0, 0.0)


def test_a_model_gives_only_what_was_left_open() -> None:
    model = DrawNumbers(temperature=0.5, top_k=9, min_p=0.4)  # min_p is no model's to give
    settled = SamplingParams(top_k=3).settled(model)
    assert model_defaults(settled.chosen) == {
        **{"temperature": 0.5, "top_p": 1.0, "top_k": 3, "repetition_penalty": 1.0}
    }
    assert settled.min_p == 0.0
