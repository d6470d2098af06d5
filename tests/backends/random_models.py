"""Small decoders of several kinds with random weights, for tests of runners."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import numpy as np
from tests.plans import Found, Row, plan_of, rows_of

from headrace.backends.cpu import _native
from headrace.backends.cpu.adjustments import adjustments_of
from headrace.backends.shared.answers import answer_rows
from headrace.core.step import Runner, StepPlan, StepResult
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


def _still_second(spec: ModelSpec) -> ModelSpec:
    """The second layer does not rotate."""
    first, second = spec.attention
    still = replace(second.rope, inv_freq=(0.0,) * len(second.rope.inv_freq))
    return replace(spec, attention=(first, replace(second, rope=still)))


def _joint_norms(spec: ModelSpec) -> ModelSpec:
    return replace(spec, attention=tuple(replace(a, joint_norm=True) for a in spec.attention))


SPECS = {
    "plain": make_spec(),
    "mha interleaved": make_spec(heads=4, kv_heads=4, head_dim=64, interleaved=True),
    "window bias": replace(make_spec(windows=(10, 10)), qkv_bias=True),
    "smollm3-like": _still_second(make_spec()),
    "olmo2-like": replace(
        _joint_norms(make_spec()), head_norm=True, pre_norms=False, post_norms=True
    ),
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
                attn_norm=vector(HIDDEN) if spec.pre_norms else None,
                qkv=Weight(parts=qkv, bias=bias),
                attn_out=Weight(parts=(matrix(HIDDEN, a.q_width),)),
                mlp_norm=vector(HIDDEN) if spec.pre_norms else None,
                gate_up=Weight(parts=(matrix(MLP, HIDDEN), matrix(MLP, HIDDEN))),
                down=Weight(parts=(matrix(HIDDEN, MLP),)),
                q_norm=vector(a.q_width if a.joint_norm else a.head_dim)
                if spec.head_norm
                else None,
                k_norm=vector(a.kv_width if a.joint_norm else a.head_dim)
                if spec.head_norm
                else None,
                attn_post_norm=vector(HIDDEN) if spec.post_norms else None,
                mlp_post_norm=vector(HIDDEN) if spec.post_norms else None,
            )
        )
    embed = Weight(parts=(matrix(VOCAB, HIDDEN),))
    return DecoderWeights(embed=embed, layers=layers, final_norm=vector(HIDDEN), head=embed)


def spoil_embedding(weights: DecoderWeights[Weight], token: int) -> DecoderWeights[Weight]:
    """A sequence that meets this token has no numbers; the output layer keeps the old table."""
    assert weights.embed is not None
    (part,) = weights.embed.parts
    assert isinstance(part, Tensor)
    table = np.frombuffer(part.data, np.float32).reshape(VOCAB, HIDDEN).copy()
    table[token] = np.nan
    spoiled = Tensor(part.name, part.format, part.shape, memoryview(table.tobytes()))
    return replace(weights, embed=Weight(parts=(spoiled,)))


def run(runner: Runner, *entries: Row) -> list[Found]:
    runner.submit(plan_of(*entries))
    return rows_of(runner.collect())


def run_draws(program: _native.Program, plan: StepPlan) -> StepResult:
    """Of a program whose rows of logits lie there already."""
    asked = [(row, extra.targets or [], extra.top_logprobs) for row, extra in plan.extras.items()]
    found = program.run(
        plan.token_ids,
        plan.counts,
        plan.starts,
        plan.tables,
        [None if draw is None else draw.filters for draw in plan.draws],
        plan.uniforms,
        asked,
        adjustments_of(plan),
    )
    return answer_rows(plan, *found)
