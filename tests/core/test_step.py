"""A step's result says the same in few words and in many."""

from __future__ import annotations

import pytest

from headrace.core.step import Drawn, EntryResult, StepResult


def test_drawn_tokens_as_entries() -> None:
    result = StepResult(drawn=Drawn([7, 3], [11, 12], [-0.5, -1.5]), compute_s=2.0, sample_s=0.5)
    assert result.entries == [
        EntryResult(sequence_id=7, token_id=11, logprob=-0.5),
        EntryResult(sequence_id=3, token_id=12, logprob=-1.5),
    ]
    assert result.entries is result.entries  # whoever changes one finds it changed
    assert (result.compute_s, result.sample_s) == (2.0, 0.5)


def test_entries_as_they_were_given() -> None:
    entries = [EntryResult(sequence_id=1, error="failed")]
    result = StepResult(entries=entries)
    assert result.entries is entries
    assert result.drawn is None


def test_one_way_or_the_other() -> None:
    with pytest.raises(AssertionError):
        StepResult()
    with pytest.raises(AssertionError):
        StepResult(entries=[], drawn=Drawn([], [], []))
