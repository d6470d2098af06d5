"""A model small enough to be run hundreds of times, with random weights."""

from __future__ import annotations

import numpy as np
import pytest

from headrace.models.decoder import DecoderWeights, LayerWeights
from headrace.models.spec import AttentionSpec, ModelSpec, RopeSpec
from headrace.weights.tensor import FORMATS, Tensor
from headrace.weights.weight import Weight

TinyModel = tuple[ModelSpec, DecoderWeights[Weight]]

VOCAB, HIDDEN, MLP, LAYERS, HEADS, KV_HEADS, HEAD_DIM = 200, 64, 128, 2, 4, 2, 16


def _spec() -> ModelSpec:
    rope = RopeSpec(inv_freq=tuple(300.0 ** (-i / (HEAD_DIM // 2)) for i in range(HEAD_DIM // 2)))
    return ModelSpec(
        family="test",
        vocab_size=VOCAB,
        hidden_size=HIDDEN,
        intermediate_size=MLP,
        context_tokens=128,
        norm_eps=1e-5,
        attention=tuple(
            AttentionSpec(
                layer=layer,
                heads=HEADS,
                kv_heads=KV_HEADS,
                head_dim=HEAD_DIM,
                scale=HEAD_DIM**-0.5,
                rope=rope,
            )
            for layer in range(LAYERS)
        ),
    )


def _weights(spec: ModelSpec) -> DecoderWeights[Weight]:
    rng = np.random.default_rng(11)

    def matrix(rows: int, columns: int) -> Tensor:
        """Q8_0: blocks of a half-precision factor and 32 codes."""
        blocks = rows * columns // 32
        raw = rng.integers(0, 256, (blocks, 34), np.uint8)
        factors = rng.uniform(0.01, 0.03, blocks) * columns**-0.5
        raw[:, :2] = factors.astype(np.float16).view(np.uint8).reshape(-1, 2)
        return Tensor("w", FORMATS["Q8_0"], (rows, columns), memoryview(raw.tobytes()))

    def vector(width: int) -> Weight:
        data = memoryview(rng.uniform(0.7, 1.3, width).astype(np.float32).tobytes())
        return Weight(parts=(Tensor("v", FORMATS["F32"], (width,), data),))

    layers = [
        LayerWeights(
            attn_norm=vector(HIDDEN),
            qkv=Weight(parts=tuple(matrix(n, HIDDEN) for n in (a.q_width, a.kv_width, a.kv_width))),
            attn_out=Weight(parts=(matrix(HIDDEN, a.q_width),)),
            mlp_norm=vector(HIDDEN),
            gate_up=Weight(parts=(matrix(MLP, HIDDEN), matrix(MLP, HIDDEN))),
            down=Weight(parts=(matrix(HIDDEN, MLP),)),
        )
        for a in spec.attention
    ]
    return DecoderWeights(
        embed=Weight(parts=(matrix(VOCAB, HIDDEN),)),
        layers=layers,
        final_norm=vector(HIDDEN),
        head=Weight(parts=(matrix(VOCAB, HIDDEN),)),
    )


@pytest.fixture(scope="session")
def tiny_model() -> TinyModel:
    spec = _spec()
    return spec, _weights(spec)
