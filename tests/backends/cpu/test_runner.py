"""The CPU runner as a whole: against the reference runner, and against itself under other loads."""

from __future__ import annotations

import subprocess
import sys
import threading
from collections.abc import Iterator
from dataclasses import replace
from itertools import pairwise

import numpy as np
import pytest
from tests.backends.random_models import (
    SPECS,
    VOCAB,
    RandomTensor,
    make_weights,
    run,
    spoil_embedding,
)
from tests.plans import Draw, Row, plan_of, rows_of

from headrace.backends.cpu import _native, layout
from headrace.backends.cpu.kv import KV_DTYPES, kv_bytes_per_token
from headrace.backends.cpu.runner import CpuRunner
from headrace.backends.reference.runner import ReferenceRunner
from headrace.core.errors import ConfigError, HeadraceError
from headrace.core.step import PREVIOUS, Runner


@pytest.mark.parametrize("name", SPECS)
@pytest.mark.parametrize("kinds", ["Q4_1", ["Q4_K", "Q4_K", "Q6_K"], "BF16"])
def test_bytes_are_known_before_they_are_taken(
    name: str, kinds: str | list[str], random_tensor: RandomTensor
) -> None:
    spec = SPECS[name]
    weights = make_weights(spec, random_tensor, kinds)
    for threads, batch, context in ((1, 16, 100), (3, 128, 256)):
        runner = CpuRunner(
            spec,
            weights,
            total_blocks=5,
            max_batch_tokens=batch,
            context_tokens=context,
            threads=threads,
        )
        assert layout.weight_bytes(weights) == runner.weight_bytes
        assert kv_bytes_per_token(spec, "f16") * 5 * 16 == runner.kv_bytes
        predicted = layout.activation_bytes(spec, weights, threads, batch, context)
        assert predicted == runner.activation_bytes


def scored(tokens: list[int], number: int, table: list[int], start: int = 0) -> Row:
    """All of the tokens from `start` on, each scored against its successor, and one drawn."""
    return Row(
        sequence_id=number,
        token_ids=tokens[start:],
        start=start,
        block_table=table,
        targets=[*tokens[start + 1 :], 0],
        draw=Draw(temperature=0.7, top_p=0.9, uniform=0.4),
    )


@pytest.mark.parametrize("path", _native.paths())
@pytest.mark.parametrize("name", list(SPECS))
def test_float_weights_give_the_reference_distribution(
    random_tensor: RandomTensor, name: str, path: str
) -> None:
    spec = SPECS[name]
    weights = make_weights(spec, random_tensor, "F32")
    rng = np.random.default_rng(1)
    a, b = (rng.integers(0, VOCAB, n).tolist() for n in (50, 21))
    entries = scored(a, 0, [9, 2, 5, 0]), scored(b, 1, [7, 3])
    runner = CpuRunner(spec, weights, total_blocks=10, threads=2, kv_dtype="f32", path=path)
    reference = ReferenceRunner(spec, weights, total_blocks=10)
    for got, expected in zip(run(runner, *entries), run(reference, *entries), strict=True):
        np.testing.assert_allclose(
            got.target_logprobs, expected.target_logprobs, rtol=2e-4, atol=2e-4
        )
        assert got.token_id == expected.token_id
        assert got.logprob == pytest.approx(expected.logprob, abs=2e-4)


@pytest.mark.parametrize("kinds", ["Q4_1", ["Q4_K", "Q4_K", "Q6_K"], "Q8_0"], ids=str)
def test_quantized_weights_stay_near_the_reference(
    random_tensor: RandomTensor, kinds: str | list[str]
) -> None:
    spec = SPECS["plain"]
    weights = make_weights(spec, random_tensor, kinds)
    tokens = np.random.default_rng(2).integers(0, VOCAB, 60).tolist()
    entry = scored(tokens, 0, [3, 1, 0, 2])
    (got,) = run(CpuRunner(spec, weights, total_blocks=4, threads=2), entry)
    (expected,) = run(ReferenceRunner(spec, weights, total_blocks=4), entry)
    difference = np.subtract(got.target_logprobs, expected.target_logprobs)
    # Two layers of int8 activations and a half-precision cache against neither.
    assert np.sqrt(np.mean(difference**2)) < 0.05 * np.std(expected.target_logprobs)


@pytest.mark.parametrize("kv_dtype", KV_DTYPES)
def test_a_sequence_is_the_same_bit_for_bit_under_any_load(
    random_tensor: RandomTensor, kv_dtype: str
) -> None:
    """Alone, in chunks, among others, in other blocks and with other numbers of threads."""
    spec = SPECS["gemma-like"]
    weights = make_weights(spec, random_tensor, "Q4_1")
    rng = np.random.default_rng(3)
    tokens = rng.integers(0, VOCAB, 70).tolist()
    table = [11, 4, 8, 1, 6]
    alone = CpuRunner(spec, weights, total_blocks=12, threads=1, kv_dtype=kv_dtype)
    (expected,) = run(alone, scored(tokens, 0, table))

    for threads, chunks in ((2, [0, 70]), (3, [0, 1, 2, 40, 70]), (2, [0, 16, 33, 69, 70])):
        runner = CpuRunner(spec, weights, total_blocks=20, threads=threads, kv_dtype=kv_dtype)
        shuffled = rng.permutation(20).tolist()
        found: list[float] = []
        for step, (start, end) in enumerate(pairwise(chunks)):
            mine = scored(tokens[: end + 1], 0, shuffled[:5], start)
            mine.token_ids, mine.targets = tokens[start:end], [*tokens[start + 1 : end + 1]]
            mine.targets += [0] * (end - start - len(mine.targets))
            other = scored(rng.integers(0, VOCAB, 5 + step).tolist(), 1, shuffled[5:6])
            more = scored(rng.integers(0, VOCAB, 30).tolist(), 2, shuffled[6:9])
            result = run(runner, other, mine, more)[1]
            found += result.target_logprobs
        assert found == expected.target_logprobs
        assert (result.token_id, result.logprob) == (expected.token_id, expected.logprob)


def test_a_whole_draw_is_the_references(random_tensor: RandomTensor) -> None:
    """Every field of a draw through the runner, and a draw that fails beside one that does not."""
    spec = SPECS["plain"]
    weights = make_weights(spec, random_tensor, "F32")
    rng = np.random.default_rng(4)
    tokens = rng.integers(0, VOCAB, 40).tolist()
    draw = Draw(
        temperature=0.9, top_p=0.9, top_k=60, min_p=0.01, typical_p=0.8, repetition_penalty=1.4,
        presence_penalty=0.3, frequency_penalty=0.2, history=[*tokens, tokens[0]], prompt_tokens=3,
        bias={5: 1.0}, allowed=range(1, VOCAB, 2), banned=[7], uniform=0.6,
    )  # fmt: skip
    runner = CpuRunner(spec, weights, total_blocks=10, threads=2, kv_dtype="f32")
    reference = ReferenceRunner(spec, weights, total_blocks=10)
    for change in range(12):
        how = replace(draw, uniform=change / 12, temperature=0.2 * change)
        mine = replace(scored(tokens, 0, [9, 2, 5]), draw=how, top_logprobs=4)
        none = replace(scored(tokens[:9], 1, [1]), draw=replace(how, allowed=[7]), top_logprobs=1)
        (got, failed), (expected, alike) = run(runner, mine, none), run(reference, mine, none)
        assert got.token_id == expected.token_id
        assert (failed.token_id, failed.error) == (None, alike.error)
        assert failed.target_logprobs == pytest.approx(alike.target_logprobs, abs=2e-4)
        for top, wanted in zip(
            [*got.target_top, got.top], [*expected.target_top, expected.top], strict=True
        ):
            assert [p for _, p in top] == pytest.approx([p for _, p in wanted], abs=2e-4)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"token_ids": [VOCAB]}, "outside the vocabulary"),
        ({"token_ids": [-2]}, "outside the vocabulary"),
        ({"block_table": [4]}, "outside the pool"),
        ({"start": 16}, "beyond its block table"),
        ({"token_ids": [0] * 600, "block_table": [0] * 40}, "600 tokens; expected at most 512"),
    ],
)
def test_a_mistaken_plan_is_refused_and_harms_nothing(
    random_tensor: RandomTensor, change: dict[str, object], message: str
) -> None:
    spec = SPECS["plain"]
    runner = CpuRunner(spec, make_weights(spec, random_tensor, "Q4_0"), total_blocks=4)
    good = Row(sequence_id=0, token_ids=[5], start=0, block_table=[1], draw=Draw(temperature=0.0))
    before = run(runner, good)
    with pytest.raises((ValueError, HeadraceError), match=message):
        run(runner, replace(good, **change))  # type: ignore[arg-type]
    assert run(runner, good) == before


GREEDY = Draw(temperature=0.0)


def decoded(tokens: list[int], number: int, start: int, table: list[int]) -> Row:
    return Row(sequence_id=number, token_ids=tokens, start=start, block_table=table, draw=GREEDY)


@pytest.mark.parametrize("kv_dtype", KV_DTYPES)
def test_a_pool_of_the_predicted_size(random_tensor: RandomTensor, kv_dtype: str) -> None:
    spec = SPECS["plain"]
    weights = make_weights(spec, random_tensor, "Q4_0")
    runner = CpuRunner(spec, weights, total_blocks=7, kv_dtype=kv_dtype)
    assert runner.kv_bytes == 7 * 16 * kv_bytes_per_token(spec, kv_dtype)


@pytest.mark.parametrize("kv_dtype", ["fp8", "int4", ""])
def test_a_kv_dtype_that_the_backend_lacks(random_tensor: RandomTensor, kv_dtype: str) -> None:
    spec = SPECS["plain"]
    weights = make_weights(spec, random_tensor, "Q4_0")
    with pytest.raises(ConfigError, match="CPU backend supports f32, f16, bf16, int8") as caught:
        CpuRunner(spec, weights, total_blocks=1, kv_dtype=kv_dtype)
    assert caught.value.param == "kv_dtype"
    with pytest.raises(ConfigError, match="supports f32"):
        kv_bytes_per_token(spec, kv_dtype)


@pytest.mark.parametrize("kv_dtype", KV_DTYPES)
def test_a_sequence_goes_on_over_copied_blocks(random_tensor: RandomTensor, kv_dtype: str) -> None:
    """Copies come before the step's own writes, in order, and with no entries at all too."""
    spec = SPECS["plain"]
    weights = make_weights(spec, random_tensor, "Q4_0")
    tokens = np.random.default_rng(5).integers(0, VOCAB, 40).tolist()

    def prefilled() -> CpuRunner:
        runner = CpuRunner(spec, weights, total_blocks=8, kv_dtype=kv_dtype)
        run(runner, scored(tokens[:20], 0, [3, 5]))
        return runner

    (expected,) = run(prefilled(), scored(tokens, 0, [3, 5, 6], start=20))
    runner = prefilled()
    # Sequence 1 branches off in a copy of the last block, by way of block 2, while sequence 0
    # writes other tokens to the block itself in the same step.
    other = scored([*tokens[:20], 1, 2, 3], 0, [3, 5], start=20)
    branch = scored(tokens, 1, [3, 7, 6], start=20)
    runner.submit(plan_of(other, branch, copies=[(5, 2), (2, 7)]))
    found = rows_of(runner.collect())[1]
    assert found.target_logprobs == expected.target_logprobs
    assert (found.token_id, found.logprob) == (expected.token_id, expected.logprob)

    runner = prefilled()
    runner.submit(plan_of(copies=[(3, 0), (5, 1)]))
    assert rows_of(runner.collect()) == []
    (found,) = run(runner, scored(tokens, 2, [0, 1, 6], start=20))
    assert found.target_logprobs == expected.target_logprobs
    runner.submit(plan_of())
    assert rows_of(runner.collect()) == []


@pytest.fixture(params=["cpu", "reference"])
def in_flight(request: pytest.FixtureRequest, random_tensor: RandomTensor) -> Iterator[Runner]:
    """A runner with two steps in flight."""
    spec = SPECS["plain"]
    weights = make_weights(spec, random_tensor, "F32")
    if request.param == "reference":
        yield ReferenceRunner(spec, weights, total_blocks=8, steps_in_flight=2)
        return
    with CpuRunner(spec, weights, total_blocks=8, threads=2, kv_dtype="f32", overlap=True) as cpu:
        yield cpu


def step_by_step(random_tensor: RandomTensor, prompts: list[list[int]], steps: int) -> list[object]:
    """Each step's drawn tokens, one step after the other, on the reference."""
    spec = SPECS["plain"]
    runner = ReferenceRunner(spec, make_weights(spec, random_tensor, "F32"), total_blocks=8)
    results = run(runner, *(decoded(p, i, 0, [2 * i, 2 * i + 1]) for i, p in enumerate(prompts)))
    found: list[object] = [[r.token_id for r in results]]
    for step in range(steps):
        entries = [
            decoded([r.token_id or 0], i, len(prompts[i]) + step, [2 * i, 2 * i + 1])
            for i, r in enumerate(results)
        ]
        results = run(runner, *entries)
        found.append([r.token_id for r in results])
    return found


PROMPTS = [[7, 8, 9], [100, 20, 3, 4, 5], [50]]


def test_tokens_come_from_the_step_before_while_it_is_in_flight(
    in_flight: Runner, random_tensor: RandomTensor
) -> None:
    """Two plans are always in flight; none of them but the first knows its tokens. The block
    tables are taken away as soon as a plan is submitted: it must have been read by then."""
    assert in_flight.limits.steps_in_flight == 2
    expected = step_by_step(random_tensor, PROMPTS, 12)
    found, orders = [], []
    lengths = [len(p) for p in PROMPTS]
    for step in range(13):
        entries = [
            decoded(p if step == 0 else [PREVIOUS], i, 0 if step == 0 else lengths[i] + step - 1,
                    [2 * i, 2 * i + 1])
            for i, p in enumerate(PROMPTS)
        ]  # fmt: skip
        order = [2, 1, 0] if step % 2 else [0, 1, 2]
        in_flight.submit(plan_of(*[entries[i] for i in order]))
        orders.append(order)
        for entry in entries:
            entry.block_table.clear()
        if step > 0:
            found.append(rows_of(in_flight.collect()))
    found.append(rows_of(in_flight.collect()))
    by_number = [
        {i: result.token_id for i, result in zip(order, results, strict=True)}
        for order, results in zip(orders, found, strict=True)
    ]
    assert [[step[i] for i in range(3)] for step in by_number] == expected


def test_a_third_plan_has_to_wait(in_flight: Runner) -> None:
    for count in (2, 1):
        in_flight.submit(plan_of(*[decoded([n], n, 0, [n]) for n in range(count)]))
    with pytest.raises(HeadraceError, match="2 in flight; expected fewer than 2"):
        in_flight.submit(plan_of(decoded([3], 3, 0, [3])))
    assert [len(rows_of(in_flight.collect())) for _ in range(2)] == [2, 1]
    with pytest.raises(HeadraceError, match="no plan submitted"):
        in_flight.collect()


def test_previous_that_nobody_drew_is_refused_and_the_next_plans_work(in_flight: Runner) -> None:
    drawn = decoded([5], 0, 0, [0])
    silent = replace(decoded([5, 6], 1, 0, [1]), draw=None)
    unknown = decoded([PREVIOUS], 1, 2, [1])
    in_flight.submit(plan_of(drawn, silent))
    with pytest.raises(HeadraceError, match="PREVIOUS for sequence 1; expected a token id"):
        in_flight.submit(plan_of(unknown))
    in_flight.submit(plan_of(drawn))
    expected = rows_of(in_flight.collect())[0].token_id
    assert rows_of(in_flight.collect())[0].token_id == expected
    with pytest.raises(HeadraceError, match="PREVIOUS among 2 tokens"):
        in_flight.submit(plan_of(decoded([5, PREVIOUS], 0, 1, [0])))


def test_previous_needs_steps_in_flight(random_tensor: RandomTensor) -> None:
    spec = SPECS["plain"]
    weights = make_weights(spec, random_tensor, "Q4_0")
    runners: list[Runner] = [
        CpuRunner(spec, weights, total_blocks=4),
        ReferenceRunner(spec, weights, total_blocks=4),
    ]
    for runner in runners:
        assert runner.limits.steps_in_flight == 1
        run(runner, decoded([5], 0, 0, [0]))
        with pytest.raises(HeadraceError, match=r"PREVIOUS for sequence 0; .*only one step"):
            run(runner, decoded([PREVIOUS], 0, 1, [0]))
        runner.submit(plan_of(decoded([5], 0, 0, [0])))
        with pytest.raises(HeadraceError, match="1 in flight; expected fewer than 1"):
            runner.submit(plan_of(decoded([5], 0, 0, [0])))


def test_what_a_step_raises_comes_with_its_own_result(random_tensor: RandomTensor) -> None:
    """On the thread: the plan before and the one after are whole, and who would have gone on from
    the failed step fails alone."""
    spec = SPECS["plain"]
    weights = make_weights(spec, random_tensor, "Q4_0")
    good = decoded([5], 0, 0, [0])
    with CpuRunner(spec, weights, total_blocks=4, overlap=True) as runner:
        runner.submit(plan_of(good))
        runner.submit(plan_of(decoded([6], 1, 0, [99])))  # outside the pool
        expected = rows_of(runner.collect())
        follower = decoded([PREVIOUS], 1, 1, [1])
        runner.submit(plan_of(follower, good))
        with pytest.raises(ValueError, match="outside the pool"):
            runner.collect()
        runner.submit(plan_of(good, replace(follower, start=2)))
        failed, whole = rows_of(runner.collect())
        assert failed.token_id is None
        assert failed.error == "the previous step, which this one continues, failed"
        assert [whole] == expected
        whole, failed = rows_of(runner.collect())  # and it stays failed
        assert failed.error is not None
        assert [whole] == expected
        with pytest.raises(HeadraceError, match=r"a copy of blocks \(0, 4\); expected 0 to 3"):
            runner.submit(plan_of(good, copies=[(0, 4)]))
        assert run(runner, good) == expected


def test_a_sequence_without_numbers_fails_alone_in_flight(random_tensor: RandomTensor) -> None:
    spec = SPECS["plain"]
    weights = make_weights(spec, random_tensor, "F32")
    weights = spoil_embedding(weights, 13)
    plain = decoded([5], 1, 0, [1])
    with CpuRunner(spec, weights, total_blocks=4, overlap=True) as runner:
        (before,) = run(runner, plain)
        runner.submit(plan_of(decoded([13], 0, 0, [0]), plain))
        runner.submit(plan_of(decoded([PREVIOUS], 0, 1, [0]), plain))
        first, second = rows_of(runner.collect()), rows_of(runner.collect())
    assert first[0].error is not None
    assert "not finite numbers" in first[0].error
    assert second[0].error is not None
    assert "previous step" in second[0].error
    assert first[1] == second[1] == before


def step_threads() -> list[threading.Thread]:
    return [t for t in threading.enumerate() if t.name.startswith("headrace-steps")]


def test_the_thread_ends_with_the_runner(random_tensor: RandomTensor) -> None:
    spec = SPECS["plain"]
    weights = make_weights(spec, random_tensor, "Q4_0")
    good = plan_of(decoded([5], 0, 0, [0]))
    before = step_threads()
    with CpuRunner(spec, weights, total_blocks=4, overlap=True) as runner:
        runner.submit(good)
        runner.submit(good)  # closed with plans in flight
        (mine,) = set(step_threads()) - set(before)
    assert not mine.is_alive()
    with pytest.raises(HeadraceError, match="closed"):
        runner.submit(good)
    runner.close()

    forgotten = CpuRunner(spec, weights, total_blocks=4, overlap=True)
    forgotten.submit(good)
    (mine,) = set(step_threads()) - set(before)
    del forgotten
    mine.join(timeout=60)
    assert not mine.is_alive()


def test_an_interpreter_that_exits_with_plans_in_flight_exits_cleanly() -> None:
    """No close(), a step that is being computed and one that waits, while modules are torn down."""
    program = """
import time
from headrace.backends.cpu.worker import Worker

class Owner:
    pass

def slow():
    time.sleep(0.2)
    print("computed", flush=True)

owner = Owner()
worker = Worker(owner)
worker.submit(slow)
worker.submit(slow)
"""
    done = subprocess.run(
        [sys.executable, "-W", "error", "-c", program], capture_output=True, text=True, timeout=60
    )
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout == "computed\n" * 2
