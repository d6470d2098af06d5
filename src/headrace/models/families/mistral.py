"""Mistral: Llama with a sliding window. Its GGUF files call themselves llama; see there."""

from __future__ import annotations

from headrace.models.decoder import DecoderWeights
from headrace.models.dims import layer_windows, make_spec
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
from headrace.models.spec import ModelSpec

_WINDOW = 4096  # where config.json has no sliding_window; a null there means none


def from_config(
    config: Fields, names: HubNames, context_tokens: int | None
) -> tuple[ModelSpec, DecoderWeights[WeightRef]]:
    refuse_flags(config, "attention_bias", "mlp_bias")
    dims = read_dims(config, HubDefaults(kv_heads=8))
    rope, served = read_rope(config, dims, context_tokens)
    window = read_window(config, _WINDOW)
    tied = config.flag("tie_word_embeddings", default=False)
    spec = make_spec(
        "mistral",
        dims,
        context_tokens=served,
        ropes=rope,
        windows=layer_windows(config, dims.layers, window) or window,
        activation=read_activation(config),
        tied_embeddings=tied,
    )
    return spec, hub_weights(dims, names, tied=tied)
