"""Drawing against transformers' processors and filters, exact fractions, torch's log_softmax."""

from __future__ import annotations

import math
from dataclasses import replace
from fractions import Fraction

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray
from tests.plans import Draw, reference_adjust, reference_draw
from transformers import (
    MinPLogitsWarper,
    RepetitionPenaltyLogitsProcessor,
    SequenceBiasLogitsProcessor,
    SuppressTokensLogitsProcessor,
    TopKLogitsWarper,
    TopPLogitsWarper,
    TypicalLogitsWarper,
)

from headrace.backends.reference.sampling import (
    log_probability,
    top_log_probabilities,
)
from headrace.core.errors import HeadraceError

Row = NDArray[np.float32]


def row(size: int = 50, seed: int = 0) -> Row:
    return np.random.default_rng(seed).normal(0, 2, size).astype(np.float32)


def reachable(logits: Row, how: Draw, steps: int = 4000) -> set[int]:
    """The tokens that some uniform number leads to."""
    return {
        reference_draw(logits, replace(how, uniform=(u + 0.5) / steps))[0] for u in range(steps)
    }


def processed(processor: object, logits: Row, seen: list[int]) -> Row:
    """A row of logits after one of transformers' processors."""
    assert callable(processor)
    found: Row = processor(torch.tensor([seen]), torch.tensor(logits)[None])[0].numpy()
    return found


def test_greedy_is_the_first_of_the_largest() -> None:
    logits = np.array([0, 3, 1, 3], np.float32)
    how = Draw(temperature=0, top_k=1, top_p=0.1, min_p=1, uniform=0.99)
    token, logprob = reference_draw(logits, how)
    assert token == 1
    assert logprob == pytest.approx(torch.tensor(logits).log_softmax(0)[1].item())


@pytest.mark.parametrize(
    ("how", "warper"),
    [
        (Draw(temperature=1, top_k=7), TopKLogitsWarper(7)),
        (Draw(temperature=1, top_p=0.8), TopPLogitsWarper(0.8)),
        (Draw(temperature=1, min_p=0.1), MinPLogitsWarper(0.1)),
        (Draw(temperature=1, typical_p=0.3), TypicalLogitsWarper(0.3)),
        (Draw(temperature=1, typical_p=0.95), TypicalLogitsWarper(0.95)),
    ],
)
def test_filters_keep_what_transformers_keeps(how: Draw, warper: object) -> None:
    for seed in range(3):
        logits = row(seed=seed) * np.float32(0.5)
        kept = processed(warper, logits, [0])
        assert reachable(logits, how) == set(np.flatnonzero(np.isfinite(kept)).tolist())


def test_typical_is_of_what_the_filters_before_it_left_at_that_temperature() -> None:
    for seed in range(3):
        logits = row(seed=seed)
        kept = processed(TopKLogitsWarper(20), logits / np.float32(1.7), [0])
        kept = processed(MinPLogitsWarper(0.02), kept, [0])
        kept = processed(TypicalLogitsWarper(0.6), kept, [0])
        kept = processed(TopPLogitsWarper(0.8), kept, [0])
        how = Draw(temperature=1.7, top_k=20, min_p=0.02, typical_p=0.6, top_p=0.8)
        assert reachable(logits, how) == set(np.flatnonzero(np.isfinite(kept)).tolist())


def test_repetition_penalty_bias_and_bans_are_transformers() -> None:
    for seed, penalty in enumerate((1.3, 0.4, 7.0)):
        logits, seen = row(seed=seed), [4, 9, 4, 30, 31, 32, 33]
        bias = {9: 5.5, 12: -100.0, 33: -0.25}
        wanted = processed(
            SequenceBiasLogitsProcessor([[[token], value] for token, value in bias.items()]),
            logits,
            seen,
        )
        wanted = processed(SuppressTokensLogitsProcessor([3, 30]), wanted, seen)
        wanted = processed(RepetitionPenaltyLogitsProcessor(penalty), wanted, seen)
        how = Draw(
            temperature=1, repetition_penalty=penalty, history=seen, bias=bias, banned=[3, 30]
        )
        np.testing.assert_array_equal(reference_adjust(logits, how), wanted)


def test_presence_and_frequency_penalties_are_openais_formula() -> None:
    """mu[j] - c[j] * frequency - (c[j] > 0) * presence, after the repetition penalty."""
    logits = row()
    prompt, output = [20, 7, 20, 30], [0, 49, 0, 7, 0] + [49] * 199
    how = Draw(
        temperature=1, presence_penalty=-0.5, frequency_penalty=0.75, repetition_penalty=2,
        history=prompt + output, prompt_tokens=len(prompt),
    )  # fmt: skip
    wanted = logits.astype(np.float64)
    for token in (0, 7, 20, 30, 49):
        wanted[token] *= 0.5 if wanted[token] > 0 else 2
    for token, count in {0: 3, 7: 1, 8: 0, 20: 0, 49: 200}.items():
        wanted[token] -= count * 0.75 + (count > 0) * -0.5
    np.testing.assert_allclose(reference_adjust(logits, how), wanted, rtol=1e-6)
    assert reference_adjust(logits, how)[8] == logits[8]


def test_only_what_is_allowed_and_not_banned_is_drawn() -> None:
    logits = row()
    how = Draw(temperature=5, allowed={3, 8, 11, 40}, banned=[8], bias={3: -100, 12: 100})
    assert reachable(logits, how) == {11, 40}  # 3 is allowed, and never comes
    likelier = max((11, 40), key=lambda token: logits[token])
    assert reference_draw(logits, replace(how, temperature=0))[0] == likelier
    token, logprob = reference_draw(logits, replace(how, allowed=[3], banned=[]))
    assert token == 3
    assert logprob == pytest.approx(torch.tensor(logits).log_softmax(0)[3].item(), rel=1e-5)


def test_a_mask_is_a_bit_a_token_and_ends_where_it_ends() -> None:
    logits = row()
    how = Draw(temperature=5, mask=bytes([0b1000_0001, 0, 0b10]))  # tokens 0, 7 and 17
    assert reachable(logits, how) == {0, 7, 17}
    assert reachable(logits, replace(how, allowed=[7, 8, 17], banned=[17])) == {7}
    everything = replace(how, mask=b"\xff" * 100)  # longer than the vocabulary
    assert reference_draw(logits, everything) == reference_draw(logits, Draw(temperature=5))
    for mask in (b"", bytes(7), bytes(100)):
        with pytest.raises(HeadraceError, match="No token is left to draw"):
            reference_draw(logits, Draw(temperature=1, mask=mask))


@pytest.mark.parametrize(("allowed", "banned"), [([2, 3], [3, 2]), ([], []), (None, range(50))])
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_nothing_left_is_an_error(
    allowed: list[int] | None, banned: list[int], temperature: float
) -> None:
    with pytest.raises(HeadraceError, match="No token is left to draw"):
        reference_draw(row(), Draw(temperature=temperature, allowed=allowed, banned=banned))


def test_a_draw_that_asks_for_nothing_leaves_the_row_alone() -> None:
    logits = row()
    how = Draw(temperature=1, history=[1])
    assert reference_adjust(logits, how) is logits
    assert reference_adjust(logits, replace(how, repetition_penalty=2)) is not logits
    np.testing.assert_array_equal(logits, row())


def test_top_log_probabilities_are_torchs() -> None:
    logits = row(1000)
    values, tokens = torch.tensor(logits).double().log_softmax(0).topk(20)
    found = top_log_probabilities(logits, 20)
    assert [token for token, _ in found] == tokens.tolist()
    assert [p for _, p in found] == pytest.approx(values.tolist(), rel=1e-12)
    ties = np.array([0, 2, 1, 2, 2, 1], np.float32)
    assert [token for token, _ in top_log_probabilities(ties, 5)] == [1, 3, 4, 2, 5]


def test_frequencies_are_the_tempered_probabilities() -> None:
    logits = row(8)
    steps = 20_000
    counts = np.zeros(8)
    for u in range(steps):
        counts[reference_draw(logits, Draw(temperature=0.7, uniform=u / steps))[0]] += 1
    wanted = torch.softmax(torch.tensor(logits).double() / 0.7, 0).numpy()
    np.testing.assert_allclose(counts / steps, wanted, atol=1.5 / steps)


def test_ties_are_in_order_of_id() -> None:
    logits = np.zeros(10, np.float32)
    assert reachable(logits, Draw(temperature=1, top_k=3)) == {0, 1, 2}
    assert reachable(logits, Draw(temperature=1, top_p=0.3)) == {0, 1, 2}
    tokens = [reference_draw(logits, Draw(temperature=1, uniform=u / 10))[0] for u in range(10)]
    assert tokens == list(range(10))


def test_noise_in_the_logits_hardly_moves_a_draw() -> None:
    """Tokens of much the same likelihood: noise changes their order by likelihood everywhere. A
    draw in that order would become another nearly always; in order of id hardly ever."""
    noise = np.random.default_rng(1)
    logits = row(2000) * np.float32(0.01)
    moved = 0
    for u in range(200):
        how = Draw(temperature=1, uniform=(u + 0.5) / 200)
        noisy = logits + noise.normal(0, 1e-4, len(logits)).astype(np.float32)
        moved += reference_draw(logits, how)[0] != reference_draw(noisy, how)[0]
    assert moved < 10


@pytest.mark.parametrize("temperature", [1e-300, 5e-324])
def test_a_tiny_temperature_is_greedy(temperature: float) -> None:
    logits = row()
    found, _ = reference_draw(logits, Draw(temperature=temperature, uniform=0.999))
    assert found == int(logits.argmax())


@given(
    logits=st.lists(st.integers(-6, 6), min_size=1, max_size=12),
    top_k=st.integers(0, 13),
    top_p=st.integers(1, 20),
    min_p=st.integers(0, 20),
    uniform=st.integers(0, 999),
)
@settings(max_examples=300, deadline=None)
def test_filters_together_by_exact_fractions(
    logits: list[int], top_k: int, top_p: int, min_p: int, uniform: int
) -> None:
    """Logits k * ln 2 have weights 2**k, so that every probability is an exact fraction."""
    scaled = np.array(logits, np.float64) * math.log(2)
    # Thresholds off the fractions' own grid, so that rounding can't decide.
    odd = Fraction(1, 1_000_003)
    p, m, u = Fraction(top_p, 20) - odd, Fraction(min_p, 20) - odd, Fraction(uniform, 1000) + odd
    order = sorted(range(len(logits)), key=lambda i: (-logits[i], i))
    order = order[:top_k] if top_k else order
    weight = {i: Fraction(2) ** logits[i] for i in order}
    order = [i for i in order if weight[i] >= m * weight[order[0]]]
    total = sum(weight[i] for i in order)
    kept: list[int] = []
    while sum(weight[i] for i in kept) < p * total:
        kept.append(order[len(kept)])
    total, running = sum(weight[i] for i in kept), Fraction(0)
    for wanted in sorted(kept):
        running += weight[wanted]
        if running > u * total:
            break
    how = Draw(
        temperature=1, top_k=top_k, top_p=float(p), min_p=max(0.0, float(m)), uniform=float(u)
    )
    assert reference_draw(scaled, how)[0] == wanted


def test_log_probability_is_torchs() -> None:
    logits = row(1000) * 10
    wanted = torch.tensor(logits).double().log_softmax(0)
    for token in (0, 17, 999):
        assert log_probability(logits, token) == pytest.approx(wanted[token].item(), rel=1e-12)
    token, logprob = reference_draw(logits, Draw(temperature=0.3, top_k=5, uniform=0.5))
    assert logprob == pytest.approx(wanted[token].item(), rel=1e-12)


@pytest.mark.parametrize("bad", [math.nan, math.inf])
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_logits_that_are_no_numbers_are_an_error(bad: float, temperature: float) -> None:
    logits = row()
    logits[3] = bad
    with pytest.raises(HeadraceError, match=r"largest logit is (nan|inf)"):
        reference_draw(logits, Draw(temperature=temperature))
