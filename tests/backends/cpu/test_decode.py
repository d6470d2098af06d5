"""Steps of one token a sequence: alone, together and with more asked of them; and refusals."""

from __future__ import annotations

from dataclasses import replace

import pytest
from tests.backends.random_models import (
    SPECS,
    VOCAB,
    RandomTensor,
    make_weights,
    run,
    spoil_embedding,
)
from tests.plans import Draw, Row, plan_of

from headrace.backends.cpu.runner import CpuRunner
from headrace.core.errors import HeadraceError

GREEDY = Draw(temperature=0.0)
SAMPLED = Draw(temperature=0.9, top_p=0.8, min_p=0.01, typical_p=0.95, top_k=40, uniform=0.7)
# Of three sequences: likeliest tokens, drawn ones, both; filters of a likeliest token mean nothing.
DRAWS = {
    "greedy": (GREEDY, GREEDY, GREEDY),
    "sampled": (SAMPLED, replace(SAMPLED, uniform=0.2), Draw(temperature=2.0, uniform=0.999)),
    "mixed": (GREEDY, SAMPLED, Draw(temperature=0.0, top_p=0.1, top_k=3)),
}


def decoding(number: int, token: int, start: int, table: list[int]) -> Row:
    return Row(sequence_id=number, token_ids=[token], start=start, block_table=table, draw=GREEDY)


@pytest.mark.parametrize("draws", DRAWS)
@pytest.mark.parametrize("name", SPECS)
def test_the_same_alone_and_with_more_asked(
    name: str, draws: str, random_tensor: RandomTensor
) -> None:
    spec = SPECS[name]
    tables = [[1, 2], [3], [4, 5, 6]]
    with CpuRunner(
        spec, make_weights(spec, random_tensor, "Q4_1"), total_blocks=8, threads=2
    ) as runner:
        for table, tokens in zip(tables, ([3] * 17, [9] * 5, [4] * 40), strict=True):
            run(runner, Row(sequence_id=0, token_ids=tokens, start=0, block_table=table))
        entries = [
            replace(decoding(n, 7 + n, start, table), draw=draw)
            for n, (start, table, draw) in enumerate(
                zip((17, 5, 40), tables, DRAWS[draws], strict=True)
            )
        ]
        plain = run(runner, *entries)
        general = run(runner, *(replace(entry, top_logprobs=1) for entry in entries))
        alone = [run(runner, entry)[0] for entry in entries]
    assert [replace(found, top=()) for found in general] == plain == alone
    if draws == "greedy":
        assert [found.top[0] for found in general] == [(p.token_id, p.logprob) for p in plain]


def test_a_sequence_without_numbers_fails_alone(random_tensor: RandomTensor) -> None:
    spec = SPECS["plain"]
    weights = spoil_embedding(make_weights(spec, random_tensor, "F32"), 13)
    with CpuRunner(spec, weights, total_blocks=4) as runner:
        (good,) = run(runner, decoding(1, 5, 0, [1]))
        bad, other = run(runner, decoding(0, 13, 0, [0]), decoding(1, 5, 0, [1]))
    assert bad.token_id is None
    assert bad.error == "The model's logits are not finite numbers."
    assert other == good


def test_bad_steps_are_refused(random_tensor: RandomTensor) -> None:
    spec = SPECS["plain"]
    with CpuRunner(spec, make_weights(spec, random_tensor, "Q8_0"), total_blocks=4) as runner:
        for entry, why in (
            (decoding(0, VOCAB, 0, [0]), "outside the vocabulary"),
            (decoding(0, -2, 0, [0]), "outside the vocabulary"),
            (decoding(0, 1, 16, [0]), "beyond its block table"),
            (decoding(0, 1, -1, [0]), "positions -1 to"),
            (decoding(0, 1, 0, [4]), "outside the pool"),
            (decoding(0, 1, 0, [-1]), "outside the pool"),
        ):
            with pytest.raises((ValueError, HeadraceError), match=why):
                runner.submit(plan_of(decoding(1, 1, 0, [1]), entry))
        (found,) = run(runner, decoding(0, 1, 0, [0]))
        assert found.token_id is not None
