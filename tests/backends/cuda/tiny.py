"""Decoders of a few thousand random weights, one for each thing that families differ in."""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from headrace.models.decoder import DecoderWeights, LayerWeights
from headrace.models.spec import Activation, AttentionSpec, ModelSpec, RopeSpec
from headrace.weights.tensor import FORMATS, Tensor
from headrace.weights.weight import Weight

VOCAB, HIDDEN, MLP = 97, 32, 48

_LLAMA = AttentionSpec(
    layer=0,
    heads=4,
    kv_heads=2,
    head_dim=16,
    scale=0.25,
    rope=RopeSpec(inv_freq=tuple(30.0 ** (-i / 8) for i in range(8))),
)


def _spec(*layers: AttentionSpec, **values: object) -> ModelSpec:
    fields: dict[str, object] = {
        "family": "test",
        "vocab_size": VOCAB,
        "hidden_size": HIDDEN,
        "intermediate_size": MLP,
        "context_tokens": 96,
        "norm_eps": 1e-5,
        "attention": tuple(replace(a, layer=i) for i, a in enumerate(layers)),
    }
    return ModelSpec(**(fields | values))  # type: ignore[arg-type]


SPECS = {
    "llama": _spec(_LLAMA, _LLAMA),
    "gguf": _spec(
        replace(_LLAMA, kv_heads=4, rope=replace(_LLAMA.rope, interleaved=True)),
        tied_embeddings=True,
    ),
    "phi": _spec(
        replace(_LLAMA, heads=3, kv_heads=1, rope=RopeSpec(inv_freq=(1.0, 0.2), scale=1.2))
    ),
    "qwen2": _spec(_LLAMA, replace(_LLAMA, window=8), qkv_bias=True),
    "qwen3": _spec(replace(_LLAMA, head_dim=24, norm_eps=1e-6), head_norm=True),
    "smollm3": _spec(_LLAMA, replace(_LLAMA, rope=RopeSpec(inv_freq=(0.0,) * 8))),
    "olmo2": _spec(
        replace(_LLAMA, joint_norm=True), head_norm=True, pre_norms=False, post_norms=True
    ),
    "gemma": _spec(
        replace(_LLAMA, window=8, softcap=5.0),
        replace(_LLAMA, softcap=5.0),
        activation=Activation.GELU_TANH,
        embed_scale=HIDDEN**0.5,
        final_softcap=4.0,
        tied_embeddings=True,
        post_norms=True,
        head_norm=True,
    ),
}


def make_weights(
    spec: ModelSpec, seed: int = 0, format_name: str = "F32"
) -> DecoderWeights[Weight]:
    rng = np.random.default_rng(seed)
    offset = 1.0 if spec.post_norms else 0.0  # as Gemma's norms

    def tensor(*shape: int) -> Tensor:
        values = rng.standard_normal(shape).astype(np.float32)
        if len(shape) == 2:
            values *= np.float32(1.5 * shape[1] ** -0.5)
        if format_name == "BF16":
            data = (values.view(np.uint32) >> 16).astype(np.uint16).tobytes()
        else:
            data = values.tobytes()
        return Tensor("w", FORMATS[format_name], shape, memoryview(data))

    def norm(width: int) -> Weight:
        values = (rng.standard_normal(width) * 0.3 + 1 - offset).astype(np.float32)
        parts = (Tensor("n", FORMATS["F32"], (width,), memoryview(values.tobytes())),)
        return Weight(parts=parts, offset=offset)

    def matrix(*rows: int, columns: int, bias: bool = False) -> Weight:
        return Weight(
            parts=tuple(tensor(count, columns) for count in rows),
            bias=tuple(tensor(count) for count in rows) if bias else (),
        )

    hidden = spec.hidden_size
    layers = [
        LayerWeights(
            attn_norm=norm(hidden) if spec.pre_norms else None,
            qkv=matrix(a.q_width, a.kv_width, a.kv_width, columns=hidden, bias=spec.qkv_bias),
            attn_out=matrix(hidden, columns=a.q_width),
            mlp_norm=norm(hidden) if spec.pre_norms else None,
            gate_up=matrix(spec.intermediate_size, spec.intermediate_size, columns=hidden),
            down=matrix(hidden, columns=spec.intermediate_size),
            q_norm=norm(a.q_width if a.joint_norm else a.head_dim) if spec.head_norm else None,
            k_norm=norm(a.kv_width if a.joint_norm else a.head_dim) if spec.head_norm else None,
            attn_post_norm=norm(hidden) if spec.post_norms else None,
            mlp_post_norm=norm(hidden) if spec.post_norms else None,
        )
        for a in spec.attention
    ]
    embed = matrix(spec.vocab_size, columns=hidden)
    head = embed if spec.tied_embeddings else matrix(spec.vocab_size, columns=hidden)
    return DecoderWeights(embed=embed, layers=layers, final_norm=norm(hidden), head=head)


def resized(spec: ModelSpec, *, hidden: int, mlp: int) -> ModelSpec:
    return replace(spec, hidden_size=hidden, intermediate_size=mlp)
