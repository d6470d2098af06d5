"""Steps of likeliest tokens: the short way gives what the general one gives, and refuses alike."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from tests.backends.test_cpu_runner import (
    HIDDEN,
    SPECS,
    VOCAB,
    RandomTensor,
    make_weights,
    run,
)

from headrace.backends.cpu.plain import is_plain
from headrace.backends.cpu.runner import CpuRunner
from headrace.core.step import Draw, StepEntry, StepPlan
from headrace.weights.tensor import Tensor
from headrace.weights.weight import Weight

GREEDY = Draw(temperature=0.0)


def decoding(number: int, token: int, start: int, table: list[int]) -> StepEntry:
    return StepEntry(
        sequence_id=number, token_ids=[token], start=start, block_table=table, draw=GREEDY
    )


def test_what_is_plain() -> None:
    entry = decoding(0, 5, 3, [1])
    assert is_plain(StepPlan(entries=[entry, decoding(1, 6, 20, [2, 3])]))
    assert not is_plain(StepPlan(entries=[]))
    assert not is_plain(StepPlan(entries=[entry], copies=[(1, 2)]))
    for change in (
        {"token_ids": [5, 6]},
        {"draw": None},
        {"draw": Draw(temperature=0.7)},
        {"draw": Draw(temperature=0.0, bias={3: 1.0})},
        {"targets": [4]},
        {"top_logprobs": 1},
        {"pool": True},
    ):
        assert not is_plain(StepPlan(entries=[entry, replace(entry, **change)])), change


@pytest.mark.parametrize("name", SPECS)
def test_both_ways_give_the_same(name: str, random_tensor: RandomTensor) -> None:
    spec = SPECS[name]
    tables = [[1, 2], [3], [4, 5, 6]]
    with CpuRunner(
        spec, make_weights(spec, random_tensor, "Q4_1"), total_blocks=8, threads=2
    ) as runner:
        for table, tokens in zip(tables, ([3] * 17, [9] * 5, [4] * 40), strict=True):
            run(runner, StepEntry(sequence_id=0, token_ids=tokens, start=0, block_table=table))
        entries = [
            decoding(n, 7 + n, start, table)
            for n, (start, table) in enumerate(zip((17, 5, 40), tables, strict=True))
        ]
        assert is_plain(StepPlan(entries=entries))
        plain = run(runner, *entries)
        general = run(runner, *(replace(entry, top_logprobs=1) for entry in entries))
        alone = [run(runner, entry)[0] for entry in entries]
    assert [replace(found, top=()) for found in general] == plain == alone
    assert [found.top[0] for found in general] == [(p.token_id, p.logprob) for p in plain]


def test_a_sequence_without_numbers_fails_alone(random_tensor: RandomTensor) -> None:
    spec = SPECS["plain"]
    weights = make_weights(spec, random_tensor, "F32")
    (part,) = weights.embed.parts
    assert isinstance(part, Tensor)
    table = np.frombuffer(part.data, np.float32).reshape(VOCAB, HIDDEN).copy()
    table[13] = np.nan  # of the embedding only: the output layer keeps the unspoiled table
    spoiled = Tensor(part.name, part.format, part.shape, memoryview(table.tobytes()))
    with CpuRunner(
        spec, replace(weights, embed=Weight(parts=(spoiled,))), total_blocks=4
    ) as runner:
        (good,) = run(runner, decoding(1, 5, 0, [1]))
        bad, other = run(runner, decoding(0, 13, 0, [0]), decoding(1, 5, 0, [1]))
    assert bad.token_id is None
    assert bad.error == "The model gave logits that are not numbers."
    assert other == good


def test_bad_steps_are_refused(random_tensor: RandomTensor) -> None:
    spec = SPECS["plain"]
    with CpuRunner(spec, make_weights(spec, random_tensor, "Q8_0"), total_blocks=4) as runner:
        for entry, why in (
            (decoding(0, VOCAB, 0, [0]), "outside the vocabulary"),
            (decoding(0, -2, 0, [0]), "outside the vocabulary"),
            (decoding(0, 1, 16, [0]), "beyond its block table"),
            (decoding(0, 1, -1, [0]), "beyond its block table"),
            (decoding(0, 1, 0, [4]), "outside the pool"),
            (decoding(0, 1, 0, [-1]), "outside the pool"),
        ):
            with pytest.raises(ValueError, match=why):
                runner.submit(StepPlan(entries=[decoding(1, 1, 0, [1]), entry]))
        (found,) = run(runner, decoding(0, 1, 0, [0]))
        assert found.token_id is not None
