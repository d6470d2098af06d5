"""Drawing on the device against the reference, row by row, over random draws."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from tests.plans import Draw, Found, Row, plan_of, reference_draw, rows_of

from headrace.backends.cuda.draws.logits_kernels import launch_softcap
from headrace.backends.cuda.draws.sampling import Sampler
from headrace.backends.cuda.draws.wanted import Wanted
from headrace.backends.reference.sampling import log_probability, top_log_probabilities
from headrace.backends.shared.answers import NOT_NUMBERS, answer_rows
from headrace.core.errors import HeadraceError, InvalidRequestError
from headrace.core.step import PREVIOUS

Floats = NDArray[np.float32]


def _entry(number: int, how: Draw | None, top: int = 0, targets: list[int] | None = None) -> Row:
    tokens = [0] * len(targets or [0])
    return Row(
        sequence_id=number,
        token_ids=tokens,
        start=0,
        block_table=[0],
        draw=how,
        top_logprobs=top,
        targets=targets,
    )


def _run(
    logits: Floats, entries: list[Row], device: torch.device, candidates: int | None = None
) -> list[Found]:
    """What the device finds for entries that want these rows; outputs are poisoned before."""
    plan = plan_of(*entries)
    wanted = Wanted(plan)
    assert len(wanted.rows) == len(logits)
    count = len(logits)
    sampler = Sampler(count, count, len(entries), logits.shape[1], device, candidates)
    sampler.results.fill_(-(2**31))
    rows = torch.from_numpy(logits).to(device)
    with np.errstate(over="ignore"):  # the interpreter's; a draw that overflows is refused
        _draw(sampler, wanted, rows)
    tops = sampler.finish(wanted, rows)
    if device.type == "cuda":
        torch.cuda.synchronize()
    found: list[list[tuple[int, float]]] = [[] for _ in logits]
    if tops is not None:
        for number, pairs in tops.lists(wanted.tops):
            found[number] = pairs
    tokens, logprobs = sampler.tokens.tolist(), sampler.logprobs.tolist()
    return rows_of(answer_rows(plan, tokens, logprobs, found))


def _draw(sampler: Sampler, wanted: Wanted, rows: torch.Tensor, offset: int = 0) -> None:
    """All of a step but targets and alternatives; the rows' input tokens are 0."""
    before = rows.clone()
    sampler.launch(rows, offset)
    if wanted.draws_within(offset, offset + len(rows)):
        zeros = torch.zeros(len(rows), dtype=torch.int32, device=rows.device)
        is_adjusted = sampler.prepare_draws(wanted, rows, zeros, zeros, offset)
        sampler.launch_draws(rows, is_adjusted, offset)
    assert torch.equal(rows.view(torch.int32), before.view(torch.int32))  # logprobs are of these


def _logits(rng: np.random.Generator, rows: int, vocab: int) -> Floats:
    """Rounded, so that many are equal; some -0.0 beside 0.0."""
    values = np.round(rng.standard_normal((rows, vocab)) * 8).astype(np.float32) / 4
    return np.where(rng.random((rows, vocab)) < 0.05, np.float32(-0.0), values)


@pytest.mark.parametrize(("rows", "vocab"), [(1, 1), (3, 17), (2, 2048), (2, 5003)])
def test_the_likeliest_token_is_the_first_of_the_largest(
    device: torch.device, rows: int, vocab: int
) -> None:
    logits = _logits(np.random.default_rng(vocab), rows, vocab)
    entries = [_entry(i, Draw(temperature=0.0)) for i in range(rows)]
    for row, result in zip(logits, _run(logits, entries, device), strict=True):
        assert result.token_id == int(np.argmax(row))
        assert math.isclose(result.logprob, log_probability(row, int(np.argmax(row))), abs_tol=2e-5)


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_a_row_without_a_largest_number_fails_alone(device: torch.device, bad: float) -> None:
    logits = _logits(np.random.default_rng(1), 3, 40)
    logits[1] = bad if bad < 0 else logits[1]
    logits[1, 7] = bad
    entries = [_entry(i, Draw(temperature=float(i > 0), uniform=0.4)) for i in range(3)]
    first, second, third = _run(logits, entries, device)
    assert second.error is not None
    assert "not finite numbers" in second.error
    assert not second.is_own_fault
    assert second.token_id is None
    assert first.error is None
    assert third.token_id == reference_draw(logits[2], Draw(temperature=1.0, uniform=0.4))[0]


def _random_draw(rng: np.random.Generator, vocab: int) -> Draw:
    def pick(*values: float) -> float:
        return float(rng.choice(values))

    tokens = rng.choice(vocab, 5, replace=False).tolist()
    some = {t: float(rng.normal() * 3) for t in tokens[:3]} if rng.random() < 0.3 else {}
    mask = rng.integers(0, 256, -(-vocab // 8) - int(rng.random() < 0.3), np.uint8).tobytes()
    allowed = None
    if rng.random() < 0.2:
        allowed = rng.choice(vocab, vocab // 2, replace=False).tolist()
    return Draw(
        temperature=pick(0.0, 0.3, 1.0, 1.0, 2.5, 1e-3),
        top_p=pick(1.0, 1.0, 0.9, 0.3, 1e-4),
        top_k=int(pick(0, 0, 1, 5, 40, vocab, vocab + 9)),
        min_p=pick(0.0, 0.0, 0.05, 0.5),
        typical_p=pick(1.0, 1.0, 1.0, 0.5),
        repetition_penalty=pick(1.0, 1.0, 1.3, 0.7),
        presence_penalty=pick(0.0, 0.0, 0.6),
        frequency_penalty=pick(0.0, 0.0, -0.4),
        history=[0, *tokens, *tokens[2:], *tokens[3:], 0],
        prompt_tokens=int(rng.integers(0, 7)),
        bias=some,
        allowed=allowed,
        banned=tokens[3:] if rng.random() < 0.2 else (),
        mask=mask if rng.random() < 0.2 else None,
        uniform=float(rng.random()),
    )


@pytest.mark.parametrize(("vocab", "candidates"), [(64, 1024), (301, 1024), (64, 8)])
def test_draws_are_those_of_the_reference(
    device: torch.device, vocab: int, candidates: int
) -> None:
    """With few candidates most rows have to be searched whole."""
    rng = np.random.default_rng([vocab, candidates])
    rows = 40 if candidates > 8 else 12  # more than are worked on at one time
    logits = _logits(rng, rows, vocab)
    entries = [_entry(i, _random_draw(rng, vocab)) for i in range(rows)]
    for row, entry, found in zip(
        logits, entries, _run(logits, entries, device, candidates), strict=True
    ):
        assert entry.draw is not None
        token, logprob = reference_draw(row, entry.draw)
        assert found.token_id == token, entry.draw
        assert math.isclose(found.logprob, logprob, abs_tol=2e-5)


def _edges(row: Floats, how: Draw) -> set[int]:
    """What the reference draws as far to either side as float32 weights may lead."""
    moved = (max(0.0, how.uniform - 1e-5), min(how.uniform + 1e-5, 1 - 1e-16))
    return {reference_draw(row, replace(how, uniform=u))[0] for u in moved}


WAYS: dict[str, dict[str, Any]] = {
    "nothing": {},
    "top_p": {"top_p": 0.9},
    "small top_p": {"top_p": 0.02},
    "top_p, nearly 1": {"top_p": 0.9999},
    "top_k": {"top_k": 30},
    "large top_k": {"top_k": 2500},
    "top_k of nearly all": {"top_k": 5000},
    "top_k, top_p": {"top_k": 40, "top_p": 0.7},
    "large top_k, top_p": {"top_k": 3000, "top_p": 0.6},
    "min_p": {"min_p": 0.2, "top_p": 0.8},
    "hot": {"temperature": 40.0, "top_p": 0.5},
    "cold": {"temperature": 1e-3, "top_k": 9},
}


@pytest.mark.parametrize("candidates", [None, 16])
@pytest.mark.parametrize("way", WAYS)
def test_rows_of_several_blocks(way: str, candidates: int | None, device: torch.device) -> None:
    """Flat, peaked, and with many equals; few candidates, so that most cuts have to be searched."""
    vocab = 5003
    rng = np.random.default_rng([len(way), candidates or 0])
    noise = rng.standard_normal((3, vocab)).astype(np.float32)
    logits = np.stack([noise[0], noise[1] * 9, np.round(noise[2] * 2) / 2]).astype(np.float32)
    asked: dict[str, Any] = {"temperature": 0.9} | WAYS[way]
    draws = [Draw(**asked, uniform=float(rng.random())) for _ in logits]
    found = _run(logits, [_entry(i, how) for i, how in enumerate(draws)], device, candidates)
    for row, how, result in zip(logits, draws, found, strict=True):
        if result.token_id != reference_draw(row, how)[0]:
            assert result.token_id in _edges(row, how)


@pytest.mark.parametrize("rows", [65, 129])
def test_many_rows_have_fewer_programs_each(rows: int, device: torch.device) -> None:
    rng = np.random.default_rng(rows)
    logits = _logits(rng, rows, 24)
    draws = [Draw(temperature=0.8, top_p=0.8, uniform=float(rng.random())) for _ in logits]
    found = _run(logits, [_entry(i, how) for i, how in enumerate(draws)], device)
    expected = [reference_draw(row, how)[0] for row, how in zip(logits, draws, strict=True)]
    assert [result.token_id for result in found] == expected


def test_what_the_device_keeps_of_sequences_is_theirs(device: torch.device) -> None:
    """Steps of one sampler with three slots: sequences come, go on, stop and come back; masks stay,
    change and end; bias and banned tokens are of one step. Each draw is the reference's."""
    vocab, steps = 70, 12
    rng = np.random.default_rng(12)
    sampler = Sampler(3, 3, 3, vocab, device)
    said = {n: rng.integers(0, vocab, 5).tolist() for n in range(6)}
    masks = [bytes(rng.integers(1, 256, 9, np.uint8)) for _ in range(3)]
    allowed = [list(range(n, 60, 2)) for n in range(2)]
    for step in range(steps):
        logits = _logits(rng, 3, vocab)
        running = [(n + step // 4) % 6 for n in range(3)]
        entries, histories = [], []
        for n in running:
            begins = step % 4 == 0
            token = said[n][-1] if begins else int(rng.integers(0, vocab))
            unknown = not begins and n % 2 == 0
            known = list(said[n])  # a sequence that begins is known whole
            if not begins:
                said[n].append(token)
                known = list(said[n]) if not unknown else known
            how = Draw(
                temperature=0.9, top_k=0 if n % 3 else 20, uniform=float(rng.random()),
                repetition_penalty=1.4, presence_penalty=0.2 * n, frequency_penalty=0.3,
                history=known, prompt_tokens=5,
                mask=masks[step % 2] if n == 1 else None,
                allowed=allowed[0] if n in (2, 3) else None,
                bias={3: 1.5, 9: -2.0} if n == 4 else {},
                banned=[9, 11] if n == 4 and step % 2 else (),
            )  # fmt: skip
            histories.append(list(said[n]))
            tokens = list(said[n]) if begins else [PREVIOUS if unknown else token]
            start = len(said[n]) - len(tokens)
            entries.append(
                Row(sequence_id=n, token_ids=tokens, start=start, block_table=[], draw=how)
            )
        wanted = Wanted(plan_of(*entries))
        rows = torch.from_numpy(logits).to(device)
        inputs = torch.tensor([h[-1] for h in histories], dtype=torch.int32, device=device)
        places = torch.arange(3, dtype=torch.int32, device=device)
        sampler.launch(rows)
        assert sampler.prepare_draws(wanted, rows, places, inputs)
        sampler.launch_draws(rows, True)
        expected = [
            reference_draw(row, replace(entry.draw, history=history))[0]
            for row, entry, history in zip(logits, entries, histories, strict=True)
            if entry.draw is not None
        ]
        assert sampler.tokens.tolist() == expected, step


def test_a_token_outside_the_vocabulary_is_refused_and_harms_nobody(device: torch.device) -> None:
    sampler = Sampler(1, 1, 1, 30, device)
    rows = torch.from_numpy(_logits(np.random.default_rng(2), 1, 30)).to(device)
    zeros = torch.zeros(1, dtype=torch.int32, device=device)
    sampler.launch(rows)
    for bad in ({"bias": {30: 1.0}}, {"allowed": [-1]}, {"banned": [99]}):
        entry = _entry(0, Draw(temperature=0.0, **bad))
        with pytest.raises(HeadraceError, match="outside the vocabulary"):
            sampler.prepare_draws(Wanted(plan_of(entry)), rows, zeros, zeros)
    good = Wanted(plan_of(_entry(0, Draw(temperature=0.0, allowed=[7]))))
    sampler.launch_draws(rows, sampler.prepare_draws(good, rows, zeros, zeros))
    assert sampler.tokens.tolist() == [7]


def test_uniforms_at_the_ends_of_a_crossing(device: torch.device) -> None:
    """Equal weights: the sums are exact, so that u * sum can fall on one of them."""
    logits = np.zeros((8, 8), np.float32)
    entries = [_entry(i, Draw(temperature=1.0, uniform=i / 8)) for i in range(8)]
    assert [r.token_id for r in _run(logits, entries, device)] == list(range(8))
    assert [r.token_id for r in _run(logits, entries, device, 2)] == list(range(8))


def test_what_a_draw_does_to_itself_fails_it_alone(device: torch.device) -> None:
    logits = _logits(np.random.default_rng(3), 3, 24) + np.float32(9)
    draws = [
        Draw(temperature=1.0, allowed=[3], banned=[3], uniform=0.2),
        Draw(temperature=0.7, uniform=0.2),
        Draw(temperature=0.0, history=range(24), repetition_penalty=1e-45),
    ]
    results = _run(logits, [_entry(i, how) for i, how in enumerate(draws)], device)
    for failed in (0, 2):
        with pytest.raises(InvalidRequestError) as expected:
            reference_draw(logits[failed], draws[failed])
        assert results[failed].error == expected.value.cause
        assert results[failed].is_own_fault
    assert results[1].token_id == reference_draw(logits[1], draws[1])[0]


def test_targets_and_alternatives(device: torch.device) -> None:
    logits = _logits(np.random.default_rng(4), 6, 50)
    entries = [
        _entry(0, None, targets=[7, 49, 0], top=3),
        _entry(1, Draw(temperature=0.0), top=50),
        _entry(2, Draw(temperature=1.0, uniform=0.9)),
        _entry(3, Draw(temperature=0.0), top=1),
    ]
    scored, greedy, sampled, last = _run(logits, entries, device)
    expected = [log_probability(logits[i], t) for i, t in enumerate([7, 49, 0])]
    np.testing.assert_allclose(scored.target_logprobs, expected, atol=2e-5)
    for row, found in [*zip(logits, scored.target_top, strict=False), (logits[3], greedy.top)]:
        top = top_log_probabilities(row, len(found))
        assert [t for t, _ in found] == [t for t, _ in top]
        np.testing.assert_allclose([p for _, p in found], [p for _, p in top], atol=2e-5)
    assert [len(top) for top in scored.target_top] == [3, 3, 3]
    assert len(greedy.top) == 50
    assert not sampled.top
    assert sampled.token_id == reference_draw(logits[4], entries[2].draw or Draw(temperature=0))[0]
    assert [t for t, _ in last.top] == [int(np.argmax(logits[5]))]


def test_rows_in_several_pieces_are_as_rows_in_one(device: torch.device) -> None:
    """Logits that do not exist all at one time."""
    rng = np.random.default_rng(5)
    logits = _logits(rng, 11, 40)
    entries = [_entry(i, _random_draw(rng, 40), top=i % 3) for i in range(7)]
    entries.append(_entry(7, Draw(temperature=0.0), targets=[1, 2, 3], top=2))
    plan = plan_of(*entries)
    wanted = Wanted(plan)
    sampler = Sampler(3, 11, 8, 40, device)
    sampler.results.fill_(-(2**31))
    tops: list[list[tuple[int, float]]] = [[] for _ in logits]
    for at in range(0, 11, 3):
        rows = torch.from_numpy(logits[at : at + 3]).to(device)
        _draw(sampler, wanted, rows, at)
        if (found := sampler.finish(wanted, rows, at)) is not None:
            if device.type == "cuda":
                torch.cuda.synchronize()
            for number, pairs in found.lists(wanted.tops):
                tops[number] = pairs
    tokens, logprobs = sampler.tokens.tolist(), sampler.logprobs.tolist()
    assert rows_of(answer_rows(plan, tokens, logprobs, tops)) == _run(logits, entries, device)
    assert NOT_NUMBERS not in sampler.tokens.tolist()


def test_softcap(device: torch.device) -> None:
    values = np.random.default_rng(6).standard_normal((3, 1001)).astype(np.float32) * 50
    x = torch.from_numpy(values.copy()).to(device)
    launch_softcap(x, 7.0)
    np.testing.assert_allclose(x.cpu().numpy(), 7.0 * np.tanh(values / 7.0), rtol=1e-4, atol=1e-5)
