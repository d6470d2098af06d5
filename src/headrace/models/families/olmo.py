"""OLMo 2: norms after attention and after the MLP instead of before them, and one norm over all
query heads together and one over all key heads. OLMo 3 has sliding windows and is refused."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

from headrace.models.decoder import DecoderWeights
from headrace.models.dims import Dims, make_spec, served_context
from headrace.models.families import gguf_names
from headrace.models.families.hub_names import (
    HubDefaults,
    HubNames,
    hub_weights,
    read_activation,
    read_dims,
    refuse_flags,
)
from headrace.models.families.llama import read_rope
from headrace.models.fields import Fields
from headrace.models.refs import TensorRef, WeightRef
from headrace.models.rope import rope_from_gguf
from headrace.models.spec import ModelSpec

_DEFAULTS = HubDefaults(vocab_size=50_304, heads=32, context_tokens=2_048, norm_eps=1e-5)


def from_config(
    config: Fields, names: HubNames, context_tokens: int | None
) -> tuple[ModelSpec, DecoderWeights[WeightRef]]:
    refuse_flags(config, "attention_bias", "mlp_bias")
    if config.has("clip_qkv"):
        raise config.unsupported("clip_qkv", "null")
    dims = read_dims(config, _DEFAULTS)
    rope, served = read_rope(config, dims, context_tokens)
    tied = config.flag("tie_word_embeddings", default=False)
    spec = make_spec(
        "olmo2",
        dims,
        context_tokens=served,
        ropes=rope,
        activation=read_activation(config),
        tied_embeddings=tied,
        head_norm=True,
        post_norms=True,
    )
    weights = hub_weights(dims, names, tied=tied, head_norm=True, post_norms=True)
    return _as_olmo(spec), _olmo_weights(weights, dims)


def from_gguf(
    metadata: Fields,
    tensor_shapes: Mapping[str, tuple[int, ...]],
    rope_factors: Sequence[float] | None,
    context_tokens: int | None,
) -> tuple[ModelSpec, DecoderWeights[WeightRef]]:
    gguf_names.refuse_window(metadata)  # OLMo 3, which calls itself olmo2 there
    dims = gguf_names.read_dims(metadata, tensor_shapes)
    served = served_context(dims.context_tokens, context_tokens)
    shape = gguf_names.read_rope_shape(metadata, dims, served)
    spec = make_spec(
        "olmo2",
        dims,
        context_tokens=served,
        ropes=rope_from_gguf(metadata, shape, rope_factors),
        tied_embeddings=gguf_names.is_tied(tensor_shapes),
        head_norm=True,
        post_norms=True,
    )
    weights = gguf_names.gguf_weights(dims, tensor_shapes, head_norm=True, post_norms=True)
    return _as_olmo(spec), _olmo_weights(weights, dims)


def _as_olmo(spec: ModelSpec) -> ModelSpec:
    attention = tuple(replace(layer, joint_norm=True) for layer in spec.attention)
    return replace(spec, attention=attention, pre_norms=False)


def _olmo_weights(weights: DecoderWeights[WeightRef], dims: Dims) -> DecoderWeights[WeightRef]:
    """Without the norms before, and with a norm's weight for all heads."""

    def widened(ref: WeightRef | None, width: int) -> WeightRef:
        assert ref is not None
        return replace(ref, parts=(TensorRef(ref.parts[0].name, (width,)),))

    layers = [
        replace(
            layer,
            attn_norm=None,
            mlp_norm=None,
            q_norm=widened(layer.q_norm, dims.q_width),
            k_norm=widened(layer.k_norm, dims.kv_width),
        )
        for layer in weights.layers
    ]
    return replace(weights, layers=layers)
