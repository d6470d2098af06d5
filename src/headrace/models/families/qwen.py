"""Qwen2 and 2.5 (biases on q, k, v) and Qwen3 (norms on q and k heads)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from headrace.models.decoder import DecoderWeights
from headrace.models.dims import layer_windows, make_spec, served_context
from headrace.models.families import gguf_names
from headrace.models.families.hub_names import (
    HubDefaults,
    HubNames,
    hub_weights,
    read_activation,
    read_dims,
    read_window,
    refuse_flags,
)
from headrace.models.families.llama import read_rope
from headrace.models.fields import Fields
from headrace.models.refs import WeightRef
from headrace.models.rope import rope_from_gguf
from headrace.models.spec import ModelSpec

_DEFAULTS = {"qwen2": HubDefaults(), "qwen3": HubDefaults(head_dim=128)}


def from_config(
    config: Fields, names: HubNames, context_tokens: int | None
) -> tuple[ModelSpec, DecoderWeights[WeightRef]]:
    refuse_flags(config, "attention_bias", "mlp_bias")
    family = config.text("model_type")
    third = family == "qwen3"
    dims = read_dims(config, _DEFAULTS[family])
    rope, served = read_rope(config, dims, context_tokens)
    tied = config.flag("tie_word_embeddings", default=False)
    spec = make_spec(
        family,
        dims,
        context_tokens=served,
        ropes=rope,
        windows=_windows(config, dims.layers),
        activation=read_activation(config),
        tied_embeddings=tied,
        qkv_bias=not third,
        head_norm=third,
    )
    return spec, hub_weights(dims, names, tied=tied, qkv_bias=not third, head_norm=third)


def from_gguf(
    metadata: Fields,
    tensor_shapes: Mapping[str, tuple[int, ...]],
    rope_factors: Sequence[float] | None,
    context_tokens: int | None,
) -> tuple[ModelSpec, DecoderWeights[WeightRef]]:
    family = metadata.prefix.removesuffix(".")
    third = family == "qwen3"
    dims = gguf_names.read_dims(metadata, tensor_shapes)
    served = served_context(dims.context_tokens, context_tokens)
    shape = gguf_names.read_rope_shape(metadata, dims, served)
    spec = make_spec(
        family,
        dims,
        context_tokens=served,
        ropes=rope_from_gguf(metadata, shape, rope_factors),
        tied_embeddings=gguf_names.is_tied(tensor_shapes),
        qkv_bias=not third,
        head_norm=third,
    )
    weights = gguf_names.gguf_weights(dims, tensor_shapes, qkv_bias=not third, head_norm=third)
    return spec, weights


def _windows(config: Fields, layers: int) -> list[int | None]:
    """Most configs have a window, but nearly all of them turn it off."""
    if not config.flag("use_sliding_window", default=False):
        return [None] * layers
    window = read_window(config, 4096)
    by_type = layer_windows(config, layers, window)
    first = config.integer("max_window_layers", low=0, default=28)
    return by_type or [window if layer >= first else None for layer in range(layers)]
