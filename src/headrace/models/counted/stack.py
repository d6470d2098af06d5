"""What all counted families share: sizes of the decoder, plain attention, experts, and which layers
have which.

Reads only fields that change a number. Anything about tokens, sampling or training is ignored.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TypeVar

from headrace.models.dims import (
    MAX_CONTEXT,
    MAX_HEAD_DIM,
    MAX_HEADS,
    MAX_LAYERS,
    MAX_VOCAB,
    MAX_WIDTH,
    check_heads,
    default_head_dim,
)
from headrace.models.fields import Fields
from headrace.models.layers import ExpertsSpec, HeadsSpec, LayerSpec, MlpSpec
from headrace.models.spec import ModelSpec

T = TypeVar("T")

MAX_EXPERTS = 2**16
_ENCODERS = ("vision_config", "visual", "audio_config")
_MTP = ("num_nextn_predict_layers", "num_mtp_modules", "mtp_num_hidden_layers")


def stack_spec(
    config: Fields,
    family: str,
    stack: Sequence[LayerSpec],
    *,
    outer: Fields | None = None,
    tied: bool = False,
) -> ModelSpec:
    """A ModelSpec of these layers; `outer` is the whole file where `config` is a part of it."""
    tied = config.flag("tie_word_embeddings", default=tied)
    context = "model_max_length" if config.has("model_max_length") else "max_position_embeddings"
    width = config.integer("intermediate_size", low=0, high=MAX_WIDTH, default=0)
    return ModelSpec(
        family=family,
        vocab_size=config.integer("vocab_size", high=MAX_VOCAB),
        hidden_size=hidden_size(config),
        intermediate_size=width,
        context_tokens=config.integer(context, high=MAX_CONTEXT),
        norm_eps=config.number("rms_norm_eps", high=1.0, default=1e-6),
        attention=(),
        tied_embeddings=tied,
        stack=tuple(stack),
        left_out=left_out(config, outer),
    )


def left_out(config: Fields, outer: Fields | None) -> tuple[str, ...]:
    """What the checkpoint holds beside the decoder, and is not counted."""
    files = [config] if outer is None else [outer, config]
    found = []
    if outer is not None or any(config.has(name) for name in _ENCODERS):
        found.append("vision or audio encoder")
    if any(file.has(name) and file.integer(name, low=0) for file in files for name in _MTP):
        found.append("multi-token prediction layers")
    return tuple(found)


def hidden_size(config: Fields) -> int:
    return config.integer("hidden_size", high=MAX_WIDTH)


def layer_count(config: Fields) -> int:
    return config.integer("num_hidden_layers", high=MAX_LAYERS)


def mlp(config: Fields, name: str = "intermediate_size", *, gated: bool = True) -> MlpSpec:
    bias = config.flag("mlp_bias", default=False)
    return MlpSpec(width=config.integer(name, high=MAX_WIDTH), gated=gated, bias=bias)


def heads(
    config: Fields,
    *,
    window: int | None = None,
    bias: bool | None = None,
    out_bias: bool | None = None,
    head_norm: bool = False,
    prefix: str = "",
) -> HeadsSpec:
    """Attention by the usual fields. `attention_bias` is a bias of all four projections, unless a
    family says otherwise."""
    query_heads = config.integer(f"{prefix}num_attention_heads", high=MAX_HEADS)
    kv_heads = config.integer(f"{prefix}num_key_value_heads", high=MAX_HEADS, default=query_heads)
    check_heads(config.where, query_heads, kv_heads)
    dim = head_dim(config, query_heads, f"{prefix}head_dim")
    all_biased = config.flag("attention_bias", default=False)
    return HeadsSpec(
        heads=query_heads,
        kv_heads=kv_heads,
        key_dim=dim,
        value_dim=dim,
        window=window,
        bias=all_biased if bias is None else bias,
        out_bias=all_biased if out_bias is None else out_bias,
        norm_values=2 * dim if head_norm else 0,
    )


def head_dim(config: Fields, query_heads: int, name: str = "head_dim") -> int:
    if config.has(name):
        return config.integer(name, high=MAX_HEAD_DIM)
    return default_head_dim(config.where, hidden_size(config), query_heads)


def experts(
    config: Fields,
    *,
    count: str,
    width: str = "moe_intermediate_size",
    active: str = "num_experts_per_tok",
    shared_width: int = 0,
    gated: bool = True,
    bias: bool = False,
    router_bias: bool = False,
    shared_gate: bool = False,
    latent: int | None = None,
    vector_values: int = 0,
) -> ExpertsSpec:
    """Experts; `count`, `width` and `active` are the names of their fields."""
    number = config.integer(count, high=MAX_EXPERTS)
    return ExpertsSpec(
        count=number,
        active=config.integer(active, high=number),
        width=config.integer(width, high=MAX_WIDTH),
        gated=gated,
        bias=bias,
        router_bias=router_bias,
        shared_width=shared_width,
        shared_gate=shared_gate,
        latent=latent,
        vector_values=vector_values,
    )


def shared_experts_width(config: Fields, count: str = "n_shared_experts") -> int:
    """Shared experts as wide as the routed ones, side by side."""
    number = config.integer(count, low=0, high=MAX_EXPERTS, default=0)
    return number * config.integer("moe_intermediate_size", high=MAX_WIDTH) if number else 0


def sparse_layers(config: Fields, layers: int) -> list[bool]:
    """Which layers have experts: all after the first dense ones, by a period, or as listed."""
    if config.has("mlp_layer_types"):
        kinds = layer_list(config.texts("mlp_layer_types"), config, "mlp_layer_types", layers)
        return [kind != "dense" for kind in kinds]
    dense = config.integer("first_k_dense_replace", low=0, high=MAX_LAYERS, default=0)
    if not config.has("moe_layer_freq") or type(config.value("moe_layer_freq")) is int:
        every = config.integer("moe_layer_freq", high=MAX_LAYERS, default=1)
        return [layer >= dense and layer % every == 0 for layer in range(layers)]
    flags = layer_list(config.integers("moe_layer_freq"), config, "moe_layer_freq", layers)
    return [bool(flag) for flag in flags]


def layer_list(values: list[T], config: Fields, name: str, layers: int) -> list[T]:
    """One value per layer; what some files have beyond that is for multi-token prediction."""
    if len(values) < layers:
        raise config.malformed(name, f"one for each of {layers} layers")
    return values[:layers]


def layer_kinds(config: Fields, layers: int, *known: str) -> list[str]:
    kinds = layer_list(config.texts("layer_types"), config, "layer_types", layers)
    if set(kinds) - set(known):
        raise config.unsupported("layer_types", ", ".join(known))
    return kinds


def window(config: Fields) -> int:
    return config.integer("sliding_window", high=MAX_CONTEXT)
