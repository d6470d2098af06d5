"""SmolLM3: Llama, except that some layers do not rotate queries and keys (each fourth one, unless
the config says otherwise). SmolLM and SmolLM2 call themselves llama; see there."""

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
from headrace.models.spec import ModelSpec, RopeSpec

# What a config may leave out.
_DEFAULTS = HubDefaults(vocab_size=128_256, heads=16, kv_heads=4, context_tokens=32_768)
_BASE = 2_000_000.0
_INTERVAL = 4  # the last layer of each so many does not rotate; GGUF files do not say it


def from_config(
    config: Fields, names: HubNames, context_tokens: int | None
) -> tuple[ModelSpec, DecoderWeights[WeightRef]]:
    refuse_flags(config, "attention_bias", "mlp_bias")
    dims = read_dims(config, _DEFAULTS)
    if not config.has("rope_theta"):
        config = config.with_value("rope_theta", _BASE)
    rope, served = read_rope(config, dims, context_tokens)
    rotating = _rotating_layers(config, dims.layers)
    tied = config.flag("tie_word_embeddings", default=True)
    spec = make_spec(
        "smollm3",
        dims,
        context_tokens=served,
        ropes=_each_rope(rope, rotating),
        windows=_windows(config, rotating),
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
    gguf_names.refuse_window(metadata)
    dims = gguf_names.read_dims(metadata, tensor_shapes)
    served = served_context(dims.context_tokens, context_tokens)
    shape = gguf_names.read_rope_shape(metadata, dims, served)
    rope = rope_from_gguf(metadata, shape, rope_factors, interleaved=True)
    spec = make_spec(
        "smollm3",
        dims,
        context_tokens=served,
        ropes=_each_rope(rope, _periodic(dims.layers, _INTERVAL)),
        tied_embeddings=gguf_names.is_tied(tensor_shapes),
    )
    return spec, gguf_names.gguf_weights(dims, tensor_shapes)


def _periodic(layers: int, interval: int) -> list[bool]:
    return [(layer + 1) % interval != 0 for layer in range(layers)]


def _rotating_layers(config: Fields, layers: int) -> list[bool]:
    """Which layers rotate: despite its name, `no_rope_layers` has a 1 for each that does."""
    if not config.has("no_rope_layers"):
        return _periodic(layers, config.integer("no_rope_layer_interval", default=_INTERVAL))
    rotates = config.integers("no_rope_layers")
    if len(rotates) < layers or set(rotates) - {0, 1}:
        raise config.malformed("no_rope_layers", f"a 0 or a 1 for each of {layers} layers")
    return [bool(one) for one in rotates[:layers]]


def _each_rope(rope: RopeSpec, rotating: Sequence[bool]) -> list[RopeSpec]:
    """A rotation by an angle of zero leaves every value as it was, to the bit: layers that do not
    rotate need no kernels of their own."""
    still = RopeSpec(inv_freq=(0.0,) * len(rope.inv_freq), interleaved=rope.interleaved)
    return [rope if rotates else still for rotates in rotating]


def _windows(config: Fields, rotating: Sequence[bool]) -> list[int | None]:
    """Where they are on, the windows belong to the layers that do not rotate."""
    if not config.flag("use_sliding_window", default=False):
        return [None] * len(rotating)
    window = read_window(config)
    by_type = layer_windows(config, len(rotating), window)
    return by_type or [None if rotates else window for rotates in rotating]
