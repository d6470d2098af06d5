"""The CUDA runner against the reference runner; without a GPU, through Triton's interpreter."""

from __future__ import annotations

import importlib.util
import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from tests.plans import Draw, Row, plan_of, rows_of

from headrace.backends.cuda.products.choice import Choices, KernelChoice
from headrace.backends.cuda.products.matrix import Matrix
from headrace.backends.cuda.runner import CudaRunner, has_dependent_launches
from headrace.backends.reference.runner import ReferenceRunner
from headrace.core.errors import HeadraceError
from headrace.core.step import PREVIOUS, Runner, StepResult
from headrace.weights.describe import describe_file
from headrace.weights.load import find_weights, open_weights

_FOUND = importlib.util.spec_from_file_location("tiny", Path(__file__).with_name("tiny.py"))
assert _FOUND is not None
assert _FOUND.loader is not None
tiny: Any = importlib.util.module_from_spec(_FOUND)
_FOUND.loader.exec_module(tiny)

GREEDY = Draw(temperature=0.0)


class LibraryChoices(Choices):
    """Products by torch: other kernels have tests of their own, and the interpreter is slow."""

    def launch(self, matrix: Matrix, rows: int) -> KernelChoice:
        return KernelChoice(kernel="library")


def make(
    name: str, device: torch.device, seed: int = 0, **settings: Any
) -> tuple[CudaRunner, ReferenceRunner]:
    """Both over the same weights; everything in float32 unless it is asked otherwise."""
    spec = tiny.SPECS[name]
    weights = tiny.make_weights(spec, seed)
    chosen: dict[str, Any] = {
        "kv_dtype": "f32",
        "dtype": torch.float32,
        "choices": LibraryChoices(),
    } | settings
    limits: dict[str, Any] = {"total_blocks": 16, "max_batch_tokens": 40, "max_sequences": 5}
    reference = ReferenceRunner(
        spec, weights, **limits, steps_in_flight=2 if settings.get("overlap", True) else 1
    )
    return CudaRunner(spec, weights, **limits, device=device, **chosen), reference


def entry(number: int, tokens: list[int], start: int, table: list[int], **values: Any) -> Row:
    return Row(sequence_id=number, token_ids=tokens, start=start, block_table=table, **values)


def run(runner: Runner, *entries: Row, **plan: Any) -> StepResult:
    runner.submit(plan_of(*entries, **plan))
    return runner.collect()


# A GPU's matrix units take float32 as tf32, with a tenth of the precision.
TOLERANCE = 2e-2 if torch.cuda.is_available() else 2e-4


def assert_alike(found: StepResult, expected: StepResult, tolerance: float = TOLERANCE) -> None:
    assert len(rows_of(found)) == len(rows_of(expected))
    for mine, other in zip(rows_of(found), rows_of(expected), strict=True):
        assert (mine.error, mine.is_own_fault) == (other.error, other.is_own_fault)
        assert mine.token_id == other.token_id
        assert math.isclose(mine.logprob, other.logprob, abs_tol=tolerance)
        assert [t for t, _ in mine.top] == [t for t, _ in other.top]
        np.testing.assert_allclose(
            mine.target_logprobs, other.target_logprobs, atol=tolerance, rtol=0
        )
        assert [len(top) for top in mine.target_top] == [len(top) for top in other.target_top]
        assert (mine.pooled is None) == (other.pooled is None)
        if mine.pooled is not None and other.pooled is not None:
            np.testing.assert_allclose(mine.pooled, other.pooled, atol=10 * tolerance)


@pytest.mark.parametrize("name", list(tiny.SPECS))
def test_every_family_as_the_reference(name: str, device: torch.device) -> None:
    """A prompt that is scored, in two chunks, beside another sequence; then both decode."""
    rng = np.random.default_rng(1)
    long, short = rng.integers(0, tiny.VOCAB, 37).tolist(), [5, 9, 60]
    first, second = [3, 7, 1], [4]
    cuda, reference = make(name, device)
    steps = [
        [
            entry(1, long[:21], 0, first, targets=long[1:22], top_logprobs=3),
            entry(2, short, 0, second, draw=GREEDY, top_logprobs=2),
        ],
        [
            entry(2, [PREVIOUS], 3, second, draw=GREEDY),
            entry(1, long[21:], 21, first, draw=GREEDY, pool=True),
        ],
        [
            entry(2, [PREVIOUS], 4, second, draw=Draw(temperature=0.8, top_p=0.9, uniform=0.3)),
            entry(1, [PREVIOUS], 37, first, draw=GREEDY),
        ],
    ]
    with cuda:
        for entries in steps:
            assert_alike(run(cuda, *entries), run(reference, *entries))


@pytest.mark.parametrize("kv_dtype", ["bf16", "f16", "fp8"])
def test_in_bf16_logprobs_are_near(kv_dtype: str, device: torch.device) -> None:
    cuda, reference = make("llama", device, dtype=torch.bfloat16, kv_dtype=kv_dtype)
    tokens = np.random.default_rng(2).integers(0, tiny.VOCAB, 18).tolist()
    step = entry(1, tokens, 0, [2, 5], targets=[*tokens[1:], 0])
    with cuda:
        found = np.array(rows_of(run(cuda, step))[0].target_logprobs)
    expected = np.array(rows_of(run(reference, step))[0].target_logprobs)
    assert np.abs(found - expected).mean() < (0.45 if kv_dtype == "fp8" else 0.06)


def test_two_steps_are_in_flight_and_the_second_continues_the_first(device: torch.device) -> None:
    cuda, reference = make("llama", device)
    table = [6, 2]
    plans = [plan_of(entry(9, [1, 2, 3], 0, table, draw=GREEDY))]
    plans += [plan_of(entry(9, [PREVIOUS], at, table, draw=GREEDY)) for at in range(3, 9)]
    drawn: list[list[int | None]] = []
    for runner in (cuda, reference):
        assert runner.limits.steps_in_flight == 2
        drawn.append([])
        runner.submit(plans[0])
        for plan in plans[1:]:
            runner.submit(plan)
            drawn[-1].append(rows_of(runner.collect())[0].token_id)
        drawn[-1].append(rows_of(runner.collect())[0].token_id)
    assert drawn[0] == drawn[1]
    assert None not in drawn[0]
    cuda.close()


def test_a_failed_draw_fails_what_continues_it_and_nothing_else(device: torch.device) -> None:
    cuda, reference = make("llama", device)
    none = Draw(temperature=0.0, allowed=[4], banned=[4])
    tables = [[0], [1]]
    steps = [
        [entry(1, [3], 0, tables[0], draw=none), entry(2, [8], 0, tables[1], draw=GREEDY)],
        [entry(i, [PREVIOUS], 1, tables[i - 1], draw=GREEDY) for i in (1, 2)],
    ]
    results = []
    for runner in (cuda, reference):
        for entries in steps:
            runner.submit(plan_of(*entries))
        results.append([runner.collect(), runner.collect()])
    for found, expected in zip(*results, strict=True):
        assert_alike(found, expected)
    assert rows_of(results[0][1])[0].error is not None
    cuda.close()


def test_penalties_count_tokens_that_nobody_knows_yet(device: torch.device) -> None:
    """Two steps in flight: the second draw is penalized for what the first drew. Sequences come
    and go, more of them than there are slots, and one begins again further on."""
    cuda, reference = make("llama", device)
    how = Draw(
        temperature=0.7, top_p=0.95, repetition_penalty=1.5, presence_penalty=0.4,
        frequency_penalty=0.9, uniform=0.35,
    )  # fmt: skip
    rng = np.random.default_rng(8)
    drawn: list[list[list[int | None]]] = []
    prompts = [rng.integers(0, tiny.VOCAB, 6).tolist() for _ in range(7)]
    for runner in (cuda, reference):
        known = [list(prompt) for prompt in prompts]
        found: list[list[int | None]] = []
        for first in (0, 3, 4, 0):  # of three sequences that run together
            for step in range(5):
                entries = []
                for n in range(first, first + 3):
                    tokens = known[n] if step == 0 else [PREVIOUS]
                    start = 0 if step == 0 else len(known[n])
                    asked = replace(how, history=known[n], prompt_tokens=6)
                    entries.append(entry(n, tokens, start, [2 * n, 2 * n + 1], draw=asked))
                runner.submit(plan_of(*entries))
                if step:
                    result = runner.collect()
                    for n, one in zip(range(first, first + 3), rows_of(result), strict=True):
                        assert one.token_id is not None
                        known[n].append(one.token_id)
                    found.append([one.token_id for one in rows_of(result)])
            result = runner.collect()
            for n, one in zip(range(first, first + 3), rows_of(result), strict=True):
                assert one.token_id is not None
                known[n].append(one.token_id)
        drawn.append([*found, *known])
    assert drawn[0] == drawn[1]
    cuda.close()


def test_blocks_are_copied_before_the_step(device: torch.device) -> None:
    cuda, reference = make("qwen2", device)
    with cuda:
        for runner in (cuda, reference):
            run(runner, entry(1, list(range(20)), 0, [3, 4]))
        step = entry(2, [50], 20, [9, 8], draw=GREEDY, top_logprobs=4)
        copies = [(3, 7), (4, 8), (7, 9)]
        found = run(cuda, step, copies=copies)
        assert_alike(found, run(reference, step, copies=copies))
        assert rows_of(run(cuda, copies=[(8, 2)])) == []


def test_tables_that_change_are_seen(device: torch.device) -> None:
    """Another list, another block in place, a sequence that starts again, and more sequences than
    there are rows of tables, one after the other."""
    rng = np.random.default_rng(3)
    cuda, reference = make("gguf", device)
    tokens = rng.integers(0, tiny.VOCAB, 40).tolist()
    table = [1, 2]
    steps: list[tuple[Row, list[tuple[int, int]]]] = [
        (entry(1, tokens[:20], 0, table), []),
        (entry(1, tokens[20:21], 20, [1, 2], draw=GREEDY), []),
        (entry(1, tokens[:18], 0, [5, 6]), []),
        (entry(1, tokens[18:19], 18, [5, 2], draw=GREEDY), [(6, 2)]),
    ]
    steps += [(entry(n, tokens[n : n + 2], 0, [n, 8], draw=GREEDY), []) for n in range(2, 8)]
    with cuda:
        for step, copies in steps:
            assert_alike(run(cuda, step, copies=copies), run(reference, step, copies=copies))
        run(cuda, entry(40, tokens[:16], 0, growing := [7]))
        run(reference, entry(40, tokens[:16], 0, growing))
        growing[:] = [7, 9]
        step = entry(40, tokens[16:17], 16, growing, draw=GREEDY)
        assert_alike(run(cuda, step), run(reference, step))
        growing[1] = 3  # as a copied block takes another's place
        step = entry(40, tokens[17:18], 17, growing, draw=GREEDY)
        copies = [(9, 3)]
        assert_alike(run(cuda, step, copies=copies), run(reference, step, copies=copies))


def test_more_rows_are_scored_than_logits_exist(device: torch.device) -> None:
    """Five at a time; some with alternatives, and a draw among them."""
    cuda, reference = make("gguf", device)
    tokens = np.random.default_rng(4).integers(0, tiny.VOCAB, 23).tolist()
    step = [
        entry(1, tokens, 0, [0, 1], targets=[*tokens[1:], 7], draw=GREEDY, top_logprobs=2),
        entry(2, [4, 4], 0, [2], draw=Draw(temperature=1.0, uniform=0.7)),
    ]
    with cuda:
        found, expected = run(cuda, *step), run(reference, *step)
    assert_alike(found, expected)
    for mine, other in zip(
        rows_of(found)[0].target_top, rows_of(expected)[0].target_top, strict=True
    ):
        assert [t for t, _ in mine] == [t for t, _ in other]


@pytest.mark.parametrize(
    ("mistake", "cause"),
    [
        (entry(1, [1], 0, [99], draw=GREEDY), "block that is not in the pool"),
        (entry(1, [1], 20, [0], draw=GREEDY), "1 blocks of 16 tokens; expected enough for 21"),
        (entry(1, [tiny.VOCAB], 0, [0]), "outside the vocabulary"),
        (entry(1, [-2], 0, [0]), "outside the vocabulary"),
        (entry(1, [1] * 41, 0, [0, 1, 2]), "41 tokens"),
        (entry(1, [1], 96, [0] * 7), "positions 96 to 96; expected positions within the context"),
        (entry(1, [PREVIOUS], 0, [0]), "PREVIOUS for sequence 1"),
        (entry(1, [1, PREVIOUS], 0, [0]), "PREVIOUS among 2 tokens"),
        (entry(1, [], 0, [0]), "0 tokens for counts of"),
    ],
)
def test_a_mistaken_plan_is_refused_and_harms_nobody(
    mistake: Row, cause: str, device: torch.device
) -> None:
    cuda, reference = make("gguf", device)
    table = [4]
    good = [entry(2, [5, 6, 7], 0, table), entry(2, [8], 3, table, draw=GREEDY, top_logprobs=3)]
    with cuda:
        run(cuda, good[0])
        with pytest.raises(HeadraceError, match=cause):
            cuda.submit(plan_of(mistake))
        run(reference, good[0])
        assert_alike(run(cuda, good[1]), run(reference, good[1]))


def test_the_kernels_that_are_chosen_for_few_rows(device: torch.device) -> None:
    cuda, reference = make("qwen2", device, choices=None)
    table = [2]
    with cuda:
        for tokens, start in (([1, 2, 3], 0), ([4], 3)):
            step = entry(1, tokens, start, table, draw=GREEDY, top_logprobs=3)
            assert_alike(run(cuda, step), run(reference, step))


@pytest.mark.parametrize("name", ["llama", "gemma"])
def test_batch_invariant_rows_have_the_same_bits_in_any_step(
    name: str, device: torch.device
) -> None:
    """A prompt in chunks of its own or in one, alone and beside others; then decoding."""
    rng = np.random.default_rng(5)
    prompt = rng.integers(0, tiny.VOCAB, 22).tolist()
    beside = [rng.integers(0, tiny.VOCAB, n).tolist() for n in (1, 9)]
    ways = [([22], 0), ([9, 13], 1), ([1, 20, 1], 2)]
    found = []
    for chunks, others in ways:
        cuda, _ = make(name, device, dtype=torch.bfloat16, kv_dtype="bf16", batch_invariant=True)
        table, at = [3, 7, 1], 0
        scores: list[float] = []
        steps = [*chunks, 1, 1]
        tokens = [*prompt, 5, 6]
        with cuda:
            for count in steps:
                mine = entry(
                    1, tokens[at : at + count], at, table, targets=[*tokens, 0][at + 1 :][:count]
                )
                more = [
                    entry(9 + n, beside[n], 0, [8 + n], draw=Draw(temperature=1.0, uniform=0.5))
                    for n in range(others)
                ]
                result = run(cuda, *more, mine)
                scores += rows_of(result)[-1].target_logprobs
                at += count
        found.append(scores)
    assert found[0] == found[1] == found[2]


@pytest.mark.parametrize(("capability", "has"), [((8, 0), False), ((8, 9), False), ((9, 0), True)])
def test_only_newer_gpus_begin_a_launch_before_the_last_has_ended(
    capability: tuple[int, int], has: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability)
    assert has_dependent_launches(torch.device("cuda")) is has
    assert not has_dependent_launches(torch.device("cpu"))


def test_limits_of_flight(device: torch.device) -> None:
    cuda, _ = make("llama", device, overlap=False)
    step = plan_of(entry(1, [1], 0, [0]))
    with pytest.raises(HeadraceError, match="no plan submitted"):
        cuda.collect()
    before = cuda.progress
    cuda.submit(step)
    with pytest.raises(HeadraceError, match="1 in flight"):
        cuda.submit(step)
    cuda.collect()
    assert cuda.progress > before
    cuda.close()
    cuda.close()
    with pytest.raises(HeadraceError, match="closed"):
        cuda.submit(step)


def test_the_default_model(default_model_path: Path, device: torch.device) -> None:
    """All of it on a GPU; some layers where every program is interpreted."""
    file = open_weights(default_model_path)
    spec, refs = describe_file(file, 128)
    weights = find_weights(refs, file)
    exact = device.type == "cpu"
    if exact:
        spec = replace(spec, attention=spec.attention[:3])
        weights.layers = weights.layers[:3]
    limits: dict[str, Any] = {"total_blocks": 4, "max_batch_tokens": 8, "max_sequences": 2}
    cuda = CudaRunner(
        spec,
        weights,
        **limits,
        device=device,
        dtype=torch.float32 if exact else torch.bfloat16,
        kv_dtype="f32" if exact else "bf16",
        choices=LibraryChoices() if exact else None,
    )
    reference = ReferenceRunner(spec, weights, **limits)
    table = [2]
    with cuda:
        for tokens, start in (([504, 3575, 282], 0), ([4649], 3)):
            targets = {0: [3575, 282, 4649], 3: [314]}[start]  # as the text goes on
            step = entry(1, tokens, start, table, targets=targets, draw=GREEDY)
            assert_alike(run(cuda, step), run(reference, step), 5e-4 if exact else 0.25)
    file.close()
