"""The CPU runner as a whole: against the reference runner, and against itself under other loads."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from itertools import pairwise

import numpy as np
import pytest

from headrace.backends.cpu import _native, layout
from headrace.backends.cpu.runner import CpuRunner
from headrace.backends.reference.runner import ReferenceRunner
from headrace.core.step import Draw, EntryResult, Runner, StepEntry, StepPlan
from headrace.models.decoder import DecoderWeights, LayerWeights
from headrace.models.spec import Activation, AttentionSpec, ModelSpec, RopeSpec
from headrace.weights.tensor import Tensor
from headrace.weights.weight import Weight

RandomTensor = Callable[..., Tensor]

VOCAB, HIDDEN, MLP, LAYERS = 300, 256, 512, 2


def make_spec(
    *,
    heads: int = 8,
    kv_heads: int = 2,
    head_dim: int = 32,
    windows: tuple[int | None, int | None] = (None, None),
    interleaved: bool = False,
    softcap: float | None = None,
) -> ModelSpec:
    half = head_dim // 2
    rope = RopeSpec(
        inv_freq=tuple(500.0 ** (-i / half) for i in range(half)), interleaved=interleaved
    )
    attention = AttentionSpec(
        layer=0,
        heads=heads,
        kv_heads=kv_heads,
        head_dim=head_dim,
        scale=head_dim**-0.5,
        rope=rope,
        softcap=softcap,
    )
    return ModelSpec(
        family="test",
        vocab_size=VOCAB,
        hidden_size=HIDDEN,
        intermediate_size=MLP,
        context_tokens=256,
        norm_eps=1e-5,
        attention=tuple(replace(attention, layer=i, window=w) for i, w in enumerate(windows)),
    )


SPECS = {
    "plain": make_spec(),
    "mha interleaved": make_spec(heads=4, kv_heads=4, head_dim=64, interleaved=True),
    "window bias": replace(make_spec(windows=(10, 10)), qkv_bias=True),
    "gemma-like": replace(
        make_spec(windows=(6, None), softcap=20.0),
        post_norms=True,
        head_norm=True,
        activation=Activation.GELU_TANH,
        embed_scale=16.0,
        final_softcap=15.0,
    ),
}


def make_weights(
    spec: ModelSpec, random_tensor: RandomTensor, kinds: str | list[str]
) -> DecoderWeights[Weight]:
    """Random weights; `kinds` is one format, or those of q, k and v with the last for the rest."""
    rng = np.random.default_rng(7)
    formats = [kinds] * 3 if isinstance(kinds, str) else kinds

    def matrix(rows: int, columns: int, kind: str = formats[-1]) -> Tensor:
        return random_tensor(rng, kind, rows, columns, columns**-0.5)

    def vector(width: int) -> Weight:
        tensor = random_tensor(rng, "F32", 1, width, 0.3)
        return Weight(parts=(Tensor("v", tensor.format, (width,), tensor.data),), offset=1.0)

    layers = []
    for a in spec.attention:
        qkv = tuple(
            matrix(n, HIDDEN, kind)
            for n, kind in zip((a.q_width, a.kv_width, a.kv_width), formats, strict=True)
        )
        bias = tuple(vector(part.shape[0]).parts[0] for part in qkv) if spec.qkv_bias else ()
        layers.append(
            LayerWeights(
                attn_norm=vector(HIDDEN),
                qkv=Weight(parts=qkv, bias=bias),
                attn_out=Weight(parts=(matrix(HIDDEN, a.q_width),)),
                mlp_norm=vector(HIDDEN),
                gate_up=Weight(parts=(matrix(MLP, HIDDEN), matrix(MLP, HIDDEN))),
                down=Weight(parts=(matrix(HIDDEN, MLP),)),
                q_norm=vector(a.head_dim) if spec.head_norm else None,
                k_norm=vector(a.head_dim) if spec.head_norm else None,
                attn_post_norm=vector(HIDDEN) if spec.post_norms else None,
                mlp_post_norm=vector(HIDDEN) if spec.post_norms else None,
            )
        )
    embed = Weight(parts=(matrix(VOCAB, HIDDEN),))
    return DecoderWeights(embed=embed, layers=layers, final_norm=vector(HIDDEN), head=embed)


def run(runner: Runner, *entries: StepEntry) -> list[EntryResult]:
    runner.submit(StepPlan(entries=list(entries)))
    return runner.collect().entries


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
        assert layout.kv_bytes_per_token(spec, "f16") * 5 * 16 == runner.kv_bytes
        predicted = layout.activation_bytes(spec, weights, threads, batch, context)
        assert predicted == runner.activation_bytes


def scored(tokens: list[int], number: int, table: list[int], start: int = 0) -> StepEntry:
    """All of the tokens from `start` on, each scored against its successor, and one drawn."""
    return StepEntry(
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
    runner = CpuRunner(spec, weights, total_blocks=10, threads=2, kv_type="f32", path=path)
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


def test_a_sequence_is_the_same_bit_for_bit_under_any_load(random_tensor: RandomTensor) -> None:
    """Alone, in chunks, among others, in other blocks and with other numbers of threads."""
    spec = SPECS["gemma-like"]
    weights = make_weights(spec, random_tensor, "Q4_1")
    rng = np.random.default_rng(3)
    tokens = rng.integers(0, VOCAB, 70).tolist()
    table = [11, 4, 8, 1, 6]
    alone = CpuRunner(spec, weights, total_blocks=12, threads=1)
    (expected,) = run(alone, scored(tokens, 0, table))

    for threads, chunks in ((2, [0, 70]), (3, [0, 1, 2, 40, 70]), (2, [0, 16, 33, 69, 70])):
        runner = CpuRunner(spec, weights, total_blocks=20, threads=threads)
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
        presence_penalty=0.3, frequency_penalty=0.2, seen=tokens, counts={tokens[0]: 3},
        bias={5: 1.0}, allowed=range(1, VOCAB, 2), banned=[7], uniform=0.6,
    )  # fmt: skip
    runner = CpuRunner(spec, weights, total_blocks=10, threads=2, kv_type="f32")
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


def test_results_come_in_the_order_of_plans(random_tensor: RandomTensor) -> None:
    spec = SPECS["plain"]
    runner = CpuRunner(spec, make_weights(spec, random_tensor, "Q4_0"), total_blocks=4)
    greedy = Draw(temperature=0.0)
    plans = [
        StepPlan(
            entries=[StepEntry(sequence_id=i, token_ids=[i], start=0, block_table=[i], draw=greedy)]
        )
        for i in (2, 1)
    ]
    for plan in plans:
        runner.submit(plan)
    assert [runner.collect().entries[0].sequence_id for _ in plans] == [2, 1]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"token_ids": [VOCAB]}, "outside the vocabulary"),
        ({"token_ids": [-1]}, "outside the vocabulary"),
        ({"block_table": [4]}, "outside the pool"),
        ({"start": 16}, "beyond its block table"),
        ({"token_ids": [0] * 600, "block_table": [0] * 40}, "more than its buffers"),
    ],
)
def test_a_mistaken_plan_is_refused_and_harms_nothing(
    random_tensor: RandomTensor, change: dict[str, object], message: str
) -> None:
    spec = SPECS["plain"]
    runner = CpuRunner(spec, make_weights(spec, random_tensor, "Q4_0"), total_blocks=4)
    good = StepEntry(
        sequence_id=0, token_ids=[5], start=0, block_table=[1], draw=Draw(temperature=0.0)
    )
    before = run(runner, good)
    with pytest.raises(ValueError, match=message):
        run(runner, replace(good, **change))  # type: ignore[arg-type]
    assert run(runner, good) == before
