"""The benchmark of the client itself, small: its stand-in is asked in all four ways."""

from __future__ import annotations

import pytest

from bench_client import measure


@pytest.mark.parametrize("kind", ["open", "spread", "waves"])
def test_every_answer_of_the_stand_in_is_whole(kind: str) -> None:
    found = measure(streams=4, rate_s=400.0, seconds=0.5, tokens=5, kind=kind)
    assert found.good
    assert not found.failures
    assert {one.tokens for one in found.good} == {5}


def test_answers_of_steps_have_lengths_of_their_own() -> None:
    found = measure(streams=4, rate_s=400.0, seconds=0.5, tokens=8, kind="steps")
    assert not found.failures
    assert all(4 <= one.tokens == one.ask.output_tokens <= 12 for one in found.good)
