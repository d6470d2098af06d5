"""Phi-3 (and 3.5, 4-mini): fused projections, LongRoPE, only a part of each head is rotated."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from headrace.models.decoder import DecoderWeights
from headrace.models.dims import MAX_CONTEXT, make_spec, rotary_dim, served_context
from headrace.models.families import gguf_names
from headrace.models.families.hub_names import (
    HubNames,
    hub_weights,
    read_activation,
    read_dims,
    read_window,
    refuse_flags,
)
from headrace.models.fields import Fields
from headrace.models.refs import WeightRef
from headrace.models.rope import (
    RopeShape,
    original_context,
    partial_rotary_factor,
    rope_base,
    rope_from_config,
    rope_from_gguf,
    rope_section,
    rope_type,
)
from headrace.models.spec import ModelSpec

_ORIGINAL_TOKENS = 4096  # where neither config.json nor its rope section says


def from_config(
    config: Fields, names: HubNames, context_tokens: int | None
) -> tuple[ModelSpec, DecoderWeights[WeightRef]]:
    refuse_flags(config, "attention_bias", "mlp_bias")
    dims = read_dims(config)
    section = _rope_section(config)
    served = served_context(dims.context_tokens, context_tokens)
    shape = RopeShape(
        base=rope_base(config, section),
        rotary_dim=rotary_dim(config.where, dims.head_dim, partial_rotary_factor(config, section)),
        original_tokens=original_context(config, section, _ORIGINAL_TOKENS),
        longest_tokens=dims.context_tokens,
        served_tokens=served,
    )
    tied = config.flag("tie_word_embeddings", default=False)
    spec = make_spec(
        "phi3",
        dims,
        context_tokens=served,
        ropes=rope_from_config(section, shape),
        windows=read_window(config),
        activation=read_activation(config),
        tied_embeddings=tied,
    )
    return spec, hub_weights(dims, names, tied=tied, fused=True)


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
    spec = make_spec(
        "phi3",
        dims,
        context_tokens=served,
        ropes=rope_from_gguf(metadata, shape, rope_factors),
        windows=window,
        tied_embeddings=gguf_names.is_tied(tensor_shapes),
    )
    return spec, gguf_names.gguf_weights(dims, tensor_shapes, fused=True)


def _rope_section(config: Fields) -> Fields:
    """The first Phi-3 files called LongRoPE "yarn" before it was "su" and then "longrope"."""
    section = rope_section(config)
    if rope_type(section) == "yarn":
        return section.with_value("rope_type", "longrope")
    return section
