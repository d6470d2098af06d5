"""A model's weights as shapes, made from its ModelSpec alone: for a ledger without a file.

The parts have names and shapes and no values. Only for models that the backends have kernels for.
"""

from __future__ import annotations

from headrace.models.decoder import DecoderWeights, LayerWeights
from headrace.models.spec import AttentionSpec, ModelSpec
from headrace.weights.dummy import DummyTensor
from headrace.weights.weight import Weight


def shaped_weights(spec: ModelSpec) -> DecoderWeights[Weight]:
    """Layers that are alike are the same objects but for the last one, which some quantized formats
    treat apart."""
    embed = _weight("embed", spec.vocab_size, spec.hidden_size)
    head = embed if spec.tied_embeddings else _weight("head", spec.vocab_size, spec.hidden_size)
    made: dict[tuple[int, int, bool], LayerWeights[Weight]] = {}
    layers = []
    for attention in spec.attention:
        key = (attention.q_width, attention.kv_width, attention.layer == spec.layers - 1)
        if key not in made:
            made[key] = _layer(spec, attention)
        layers.append(made[key])
    return DecoderWeights(
        embed=embed, layers=layers, final_norm=_weight("final_norm", spec.hidden_size), head=head
    )


def _layer(spec: ModelSpec, attention: AttentionSpec) -> LayerWeights[Weight]:
    hidden, width = spec.hidden_size, spec.intermediate_size
    bias = (DummyTensor("qkv.bias", (attention.qkv_width,), 0),) if spec.qkv_bias else ()
    layer = LayerWeights(
        qkv=_weight("qkv", attention.qkv_width, hidden, bias=bias),
        attn_out=_weight("attn_out", hidden, attention.q_width),
        gate_up=_weight("gate_up", 2 * width, hidden),
        down=_weight("down", hidden, width),
    )
    if spec.pre_norms:
        layer.attn_norm = layer.mlp_norm = _weight("norm", hidden)
    if spec.post_norms:
        layer.attn_post_norm = layer.mlp_post_norm = _weight("norm", hidden)
    if spec.head_norm:
        joint = attention.joint_norm
        layer.q_norm = _weight("q_norm", attention.q_width if joint else attention.head_dim)
        layer.k_norm = _weight("k_norm", attention.kv_width if joint else attention.head_dim)
    return layer


def _weight(name: str, *shape: int, bias: tuple[DummyTensor, ...] = ()) -> Weight:
    return Weight(parts=(DummyTensor(name, shape, 0),), bias=bias)
