"""Gemma 2 (soft caps, every second layer windowed) and Gemma 3 text (head norms, five windowed
layers to one full, two rotary bases). Both have norms before and after attention and MLP, whose
weights are stored minus one."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

from headrace.models.decoder import DecoderWeights
from headrace.models.dims import (
    MAX_CONTEXT,
    Dims,
    layer_windows,
    make_spec,
    rotary_dim,
    served_context,
)
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
from headrace.models.rope import (
    RopeShape,
    original_context,
    rope_base,
    rope_from_config,
    rope_from_gguf,
    rope_section,
)
from headrace.models.spec import Activation, ModelSpec, RopeSpec

# Defaults: Gemma's files leave these out.
_GEMMA2 = HubDefaults(vocab_size=256_000, heads=8, kv_heads=4, head_dim=256, context_tokens=8_192)
_GEMMA3 = HubDefaults(vocab_size=262_208, heads=8, kv_heads=4, head_dim=256, context_tokens=131_072)
_WINDOW = 4096
_PATTERN = 6  # Gemma 3: each sixth layer sees everything
_LOCAL_BASE = 10_000.0
_GLOBAL_BASE = 1_000_000.0
# Layer counts of the 27B models, whose scores are scaled by hidden size / heads instead of head
# size. GGUF files do not say so; llama.cpp also goes by the number of layers.
_LAYERS_27B = {"gemma2": 46, "gemma3": 62}


def from_config(
    config: Fields, names: HubNames, context_tokens: int | None
) -> tuple[ModelSpec, DecoderWeights[WeightRef]]:
    refuse_flags(config, "attention_bias", "use_bidirectional_attention")
    third = config.text("model_type") == "gemma3_text"
    dims = read_dims(config, _GEMMA3 if third else _GEMMA2)
    window = read_window(config, _WINDOW)
    windows = _windows(config, dims.layers, window, third)
    if third:
        ropes, served = _two_ropes(config, dims, windows, context_tokens)
    else:
        rope, served = read_rope(config, dims, context_tokens)
        ropes = [rope] * dims.layers
    tied = config.flag("tie_word_embeddings", default=True)
    scalar = config.number("query_pre_attn_scalar", default=256)
    spec = make_spec(
        "gemma3" if third else "gemma2",
        dims,
        context_tokens=served,
        ropes=ropes,
        windows=windows,
        scale=scalar**-0.5,
        attention_softcap=_softcap(config, "attn_logit_softcapping", None if third else 50),
        activation=read_activation(config, "hidden_activation", "gelu_pytorch_tanh"),
        embed_scale=math.sqrt(dims.hidden_size),
        final_softcap=_softcap(config, "final_logit_softcapping", None if third else 30),
        tied_embeddings=tied,
        head_norm=third,
        post_norms=True,
    )
    weights = hub_weights(dims, names, tied=tied, head_norm=third, post_norms=True, norm_offset=1.0)
    return spec, weights


def from_gguf(
    metadata: Fields,
    tensor_shapes: Mapping[str, tuple[int, ...]],
    rope_factors: Sequence[float] | None,
    context_tokens: int | None,
) -> tuple[ModelSpec, DecoderWeights[WeightRef]]:
    family = metadata.prefix.removesuffix(".")
    third = family == "gemma3"
    dims = gguf_names.read_dims(metadata, tensor_shapes)
    served = served_context(dims.context_tokens, context_tokens)
    shape = gguf_names.read_rope_shape(metadata, dims, served)
    window = metadata.integer("attention.sliding_window", high=MAX_CONTEXT, default=_WINDOW)
    period = 2
    if third:
        period = metadata.integer("attention.sliding_window_pattern", default=_PATTERN)
    windows = _periodic(dims.layers, window, period)
    everywhere = rope_from_gguf(metadata, shape, rope_factors)
    if third:
        base = metadata.number("rope.freq_base_swa", low=1, default=_LOCAL_BASE)
        ropes = _by_window(windows, _plain(base, shape.rotary_dim), everywhere)
    else:
        ropes = [everywhere] * dims.layers
    wide = dims.layers == _LAYERS_27B[family]
    scalar = dims.hidden_size / dims.heads if wide else dims.head_dim
    spec = make_spec(
        family,
        dims,
        context_tokens=served,
        ropes=ropes,
        windows=windows,
        scale=metadata.number("attention.scale", default=scalar**-0.5),
        attention_softcap=_softcap(metadata, "attn_logit_softcapping", None if third else 50),
        activation=Activation.GELU_TANH,
        embed_scale=math.sqrt(dims.hidden_size),
        final_softcap=_softcap(metadata, "final_logit_softcapping", None if third else 30),
        tied_embeddings=gguf_names.is_tied(tensor_shapes),
        head_norm=third,
        post_norms=True,
    )
    return spec, gguf_names.gguf_weights(dims, tensor_shapes, head_norm=third, post_norms=True)


def _windows(config: Fields, layers: int, window: int | None, third: bool) -> list[int | None]:
    by_type = layer_windows(config, layers, window)
    if by_type is not None:
        return by_type
    period = config.integer("sliding_window_pattern", default=_PATTERN) if third else 2
    return _periodic(layers, window, period)


def _periodic(layers: int, window: int | None, period: int) -> list[int | None]:
    """The last layer of each period is full."""
    return [window if (layer + 1) % period else None for layer in range(layers)]


def _softcap(fields: Fields, name: str, default: float | None) -> float | None:
    """null means no cap, absent means the family's default; GGUF writes 0 for no cap."""
    if not fields.has(name):
        return None if fields.has_key(name) else default
    return fields.number(name, low=-1e-9) or None


def _two_ropes(
    config: Fields, dims: Dims, windows: Sequence[int | None], context_tokens: int | None
) -> tuple[list[RopeSpec], int]:
    """Windowed layers have their own, unscaled base; full layers use the scaled one."""
    served = served_context(dims.context_tokens, context_tokens)
    both = rope_section(config)
    local, everywhere = both.section("sliding_attention"), both.section("full_attention")
    if local is None and everywhere is None:  # transformers 4: the section is the full layers'
        everywhere = both
    empty = Fields({}, config.where, both.prefix)
    local, everywhere = local or empty, everywhere or empty
    width = rotary_dim(config.where, dims.head_dim)
    local_base = config.number("rope_local_base_freq", low=1, default=_LOCAL_BASE)

    def shape(section: Fields, base: float) -> RopeShape:
        return RopeShape(
            base=base,
            rotary_dim=width,
            original_tokens=original_context(config, section, dims.context_tokens),
            longest_tokens=dims.context_tokens,
            served_tokens=served,
        )

    near = shape(local, local.number("rope_theta", low=1, default=local_base))
    far = shape(everywhere, rope_base(config, everywhere, _GLOBAL_BASE))
    ropes = _by_window(windows, rope_from_config(local, near), rope_from_config(everywhere, far))
    return ropes, served


def _plain(base: float, width: int) -> RopeSpec:
    return RopeSpec(inv_freq=tuple(base ** (-i / width) for i in range(0, width, 2)))


def _by_window(
    windows: Sequence[int | None], local: RopeSpec, everywhere: RopeSpec
) -> list[RopeSpec]:
    return [everywhere if window is None else local for window in windows]
