"""Llama 2 and 3, and what is built like them (SmolLM, TinyLlama, Mistral's GGUF files)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from headrace.models.decoder import DecoderWeights
from headrace.models.dims import MAX_CONTEXT, Dims, make_spec, rotary_dim, served_context
from headrace.models.families import gguf_names
from headrace.models.families.hub_names import (
    HubNames,
    hub_weights,
    read_activation,
    read_dims,
    refuse_flags,
)
from headrace.models.fields import Fields
from headrace.models.refs import WeightRef
from headrace.models.rope import (
    RopeShape,
    longest_context,
    original_context,
    partial_rotary_factor,
    rope_base,
    rope_from_config,
    rope_from_gguf,
    rope_section,
)
from headrace.models.spec import ModelSpec, RopeSpec


def from_config(
    config: Fields, names: HubNames, context_tokens: int | None
) -> tuple[ModelSpec, DecoderWeights[WeightRef]]:
    refuse_flags(config, "attention_bias", "mlp_bias")
    dims = read_dims(config)
    rope, served = read_rope(config, dims, context_tokens)
    tied = config.flag("tie_word_embeddings", default=False)
    spec = make_spec(
        "llama",
        dims,
        context_tokens=served,
        ropes=rope,
        activation=read_activation(config),
        tied_embeddings=tied,
    )
    return spec, hub_weights(dims, names, tied=tied)


def from_gguf(
    metadata: Fields,
    tensor_shapes: Mapping[str, tuple[int, ...]],
    rope_factors: Sequence[float] | None,
    context_tokens: int | None,
) -> tuple[ModelSpec, DecoderWeights[WeightRef]]:
    dims = gguf_names.read_dims(metadata, tensor_shapes)
    served = served_context(dims.context_tokens, context_tokens)
    shape = gguf_names.read_rope_shape(metadata, dims, served)
    window = None
    if metadata.has("attention.sliding_window"):
        window = metadata.integer("attention.sliding_window", low=0, high=MAX_CONTEXT) or None
    # Other makers' llama-like models may have biases on q, k and v: the file's tensors tell.
    qkv_bias = "blk.0.attn_q.bias" in tensor_shapes
    spec = make_spec(
        "llama",
        dims,
        context_tokens=served,
        ropes=rope_from_gguf(metadata, shape, rope_factors, interleaved=True),
        windows=window,
        tied_embeddings=gguf_names.is_tied(tensor_shapes),
        qkv_bias=qkv_bias,
    )
    return spec, gguf_names.gguf_weights(dims, tensor_shapes, qkv_bias=qkv_bias)


def read_rope(config: Fields, dims: Dims, context_tokens: int | None) -> tuple[RopeSpec, int]:
    """The rope that all layers share, and the context to be served: as Mistral, Qwen, Phi and
    Gemma 2 have them too."""
    section = rope_section(config)
    longest = longest_context(config, section, dims.context_tokens)
    served = served_context(longest, context_tokens)
    factor = partial_rotary_factor(config, section)
    shape = RopeShape(
        base=rope_base(config, section),
        rotary_dim=rotary_dim(config.where, dims.head_dim, factor),
        original_tokens=original_context(config, section, dims.context_tokens),
        longest_tokens=dims.context_tokens,
        served_tokens=served,
    )
    return rope_from_config(section, shape), served
