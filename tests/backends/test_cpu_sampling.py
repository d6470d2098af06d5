"""Native sampling and scoring against the reference's, draw for draw."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from headrace.backends.cpu import _native
from headrace.backends.cpu.ops import RecordingOps
from headrace.backends.reference.sampling import draw as reference_draw
from headrace.backends.reference.sampling import log_probability
from headrace.core.step import Draw

Floats = NDArray[np.float32]


def native(
    logits: Floats, draws: list[Draw], targets: list[int] | None = None, path: str | None = None
) -> tuple[list[int], list[float]]:
    """Row i of the logits with draws[i], or scoring targets[i] where that is not -1."""
    rows, width = logits.shape
    program = _native.Program(_native.Pool(2), None, rows, 3, 16, path)
    ops = RecordingOps()
    value = ops.input(width)
    program.finish(ops.emit(program, ops.select(value)))
    program.slot_view(ops.slots[value], rows)[:] = logits
    tokens, logprobs = np.zeros(rows, np.int32), np.zeros(rows, np.float32)
    zeros = np.zeros(rows, np.int32)
    how = [(d.temperature, d.top_p, d.min_p, float(d.top_k)) for d in draws]
    program.run(
        zeros,
        zeros,
        zeros,
        np.zeros((1, 1), np.int32),
        np.arange(rows, dtype=np.int32),
        np.array(targets or [-1] * rows, np.int32),
        np.array(how, np.float32),
        np.array([d.uniform for d in draws], np.float64),
        tokens,
        logprobs,
    )
    return tokens.tolist(), logprobs.tolist()


draws = st.builds(
    Draw,
    temperature=st.sampled_from([0.0, 0.1, 0.7, 1.0, 2.5]),
    top_p=st.sampled_from([1.0, 0.95, 0.5, 0.01]),
    top_k=st.sampled_from([0, 1, 2, 40, 5000]),
    min_p=st.sampled_from([0.0, 0.02, 0.5, 1.0]),
    uniform=st.floats(0, 1, exclude_max=True),
)


@settings(deadline=None, max_examples=300)
@given(how=draws, seed=st.integers(0, 2**32), spread=st.sampled_from([0.01, 1.0, 6.0]))
def test_the_same_token_as_the_reference(how: Draw, seed: int, spread: float) -> None:
    rng = np.random.default_rng(seed)
    logits = (rng.standard_normal((1, 1500)) * spread).astype(np.float32)
    (token,), (logprob,) = native(logits, [how])
    expected, expected_logprob = reference_draw(logits[0], how)
    if token != expected:
        # The weights are float32 there and float64 here: only a draw on the very edge may differ.
        nudged = {
            reference_draw(logits[0], replace(how, uniform=u))[0]
            for u in (max(0.0, how.uniform - 2e-5), min(1 - 1e-16, how.uniform + 2e-5))
        }
        assert token in nudged
    else:
        assert logprob == pytest.approx(expected_logprob, abs=2e-5)


@pytest.mark.parametrize("path", _native.paths())
def test_scores_and_draws_in_one_step(path: str) -> None:
    """More wanted rows than the head holds at a time, scored and drawn, on every path."""
    rng = np.random.default_rng(1)
    logits = (rng.standard_normal((8, 4099)) * 4).astype(np.float32)
    targets = [-1, 17, 4098, -1, 0, -1, 5, 5]
    how = Draw(temperature=0.8, top_p=0.9, uniform=0.37)
    tokens, logprobs = native(logits, [how] * 8, targets, path)
    for row, target in enumerate(targets):
        token = reference_draw(logits[row], how)[0] if target < 0 else target
        assert tokens[row] == token
        assert logprobs[row] == pytest.approx(log_probability(logits[row], token), abs=2e-5)


def test_ties_go_to_the_lower_id() -> None:
    logits = np.zeros((3, 300), np.float32)
    logits[:, [7, 9]] = 5
    greedy, one, two = (
        Draw(temperature=0.0),
        Draw(temperature=1.0, top_k=1, uniform=0.99),
        Draw(temperature=1.0, top_k=2, uniform=0.99),
    )
    assert native(logits, [greedy, one, two])[0] == [7, 7, 9]


def test_a_tiny_temperature_is_greedy() -> None:
    rng = np.random.default_rng(2)
    logits = rng.standard_normal((1, 1000)).astype(np.float32)
    for temperature in (1e-6, 1e-30, 1e-44):
        how = Draw(temperature=temperature, uniform=0.999)
        assert native(logits, [how])[0] == [int(np.argmax(logits))]


@pytest.mark.parametrize("bad", [np.nan, np.inf])
def test_logits_that_are_not_numbers_give_no_token(bad: float) -> None:
    logits = np.zeros((2, 100), np.float32)
    logits[0, 3] = bad
    logits[1, 4] = 1
    for how in (Draw(temperature=0.0), Draw(temperature=1.0, top_k=5, uniform=0.5)):
        tokens, _ = native(logits, [how, Draw(temperature=0.0)])
        assert tokens == [-1, 4]
