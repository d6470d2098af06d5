"""Blocks taken out of one runner and put into another are as if that one had computed them: the
next tokens and logprobs have the same bits. tests/backends/cuda has its own."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from tests.backends.random_models import SPECS, VOCAB, RandomTensor, make_weights
from tests.plans import Draw, Row, plan_of

from headrace.backends.cpu.kv import KV_DTYPES, kv_bytes_per_token
from headrace.backends.cpu.runner import CpuRunner
from headrace.backends.reference.runner import ReferenceRunner
from headrace.core.step import MovesBlocks, Runner, StepResult

PROMPT = [(7 * at + 3) % VOCAB for at in range(40)]


def compute(runner: Runner, table: list[int], start: int) -> StepResult:
    row = Row(
        sequence_id=0,
        token_ids=PROMPT[start:],
        start=start,
        block_table=table,
        draw=Draw(temperature=0.0),
    )
    runner.submit(plan_of(row))
    return runner.collect()


def check_moves(make: Callable[[], Runner]) -> None:
    first, second = make(), make()
    assert isinstance(first, MovesBlocks)
    assert isinstance(second, MovesBlocks)
    assert first.block_layout == second.block_layout
    expected = compute(first, [5, 1, 2], 0)
    copies = first.read_blocks([5, 1])
    assert [len(copy) for copy in copies] == [first.block_bytes] * 2
    assert copies[0] != copies[1]
    kept = [bytes(copy) for copy in copies]
    compute(first, [1, 5, 3], 0)  # overwrites both: what was read is a copy
    second.write_blocks([3, 0], kept)
    found = compute(second, [3, 0, 6], 32)
    assert (found.tokens, found.logprobs) == (expected.tokens, expected.logprobs)
    assert [bytes(copy) for copy in second.read_blocks([3, 0])] == kept
    with pytest.raises(ValueError, match=r"bytes|size"):
        second.write_blocks([3], [kept[0][:-4]])
    first.close()
    second.close()


@pytest.mark.parametrize("steps_in_flight", [1, 2])
def test_reference(random_tensor: RandomTensor, steps_in_flight: int) -> None:
    spec = SPECS["plain"]
    weights = make_weights(spec, random_tensor, "F32")
    check_moves(
        lambda: ReferenceRunner(
            spec, weights, total_blocks=8, block_tokens=16, steps_in_flight=steps_in_flight
        )
    )


@pytest.mark.parametrize("overlap", [False, True])
@pytest.mark.parametrize("kv_dtype", KV_DTYPES)
@pytest.mark.parametrize("name", ["plain", "gemma-like"])
def test_cpu(random_tensor: RandomTensor, name: str, kv_dtype: str, overlap: bool) -> None:
    spec = SPECS[name]
    weights = make_weights(spec, random_tensor, "Q8_0")

    def make() -> Runner:
        return CpuRunner(spec, weights, total_blocks=8, kv_dtype=kv_dtype, overlap=overlap)

    check_moves(make)
    runner = make()
    assert isinstance(runner, MovesBlocks)
    assert runner.block_bytes == 16 * kv_bytes_per_token(spec, kv_dtype)
    assert kv_dtype in runner.block_layout
    with pytest.raises(ValueError, match="outside the pool"):
        runner.read_blocks([8])
    runner.close()
