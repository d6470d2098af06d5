"""Hybrid families: most layers keep a state of fixed size, some keep keys and values. Qwen3-Next
and 3.5, Nemotron-H and 3, Kimi Linear and K3."""

from __future__ import annotations

from dataclasses import replace

from headrace.models.counted import stack
from headrace.models.counted.latent import latent
from headrace.models.dims import MAX_HEAD_DIM, MAX_HEADS, MAX_LAYERS, MAX_WIDTH
from headrace.models.fields import Fields
from headrace.models.layers import LayerSpec, RecurrentSpec
from headrace.models.spec import ModelSpec

_LINEAR, _FULL = "linear_attention", "full_attention"
_NEMOTRON = {"M": "mamba", "*": "attention", "-": "mlp", "E": "moe"}
# Operations on each value of a state for one token. Mamba 2: decay, add the input (2), read (2).
# Delta rule: decay, read by the key (2), add the correction (2), read by the query (2).
_MAMBA_FLOPS, _DELTA_FLOPS = 5, 7
_MAX_KERNEL = 1024


def qwen3_next(config: Fields, outer: Fields | None) -> ModelSpec:
    """Qwen3-Next, Qwen3.5 and 3.6, with and without experts: gated delta nets, and every fourth
    layer attention with an output gate."""
    mixer = stack.heads(config, head_norm=True)
    if config.flag("attn_output_gate", default=True):
        mixer = replace(mixer, gate_rows=mixer.q_width)
    delta = _gated_delta(config)
    experts = None
    if config.has("num_experts") and config.integer("num_experts", low=0):
        shared = config.integer("shared_expert_intermediate_size", low=0, high=MAX_WIDTH, default=0)
        experts = stack.experts(
            config, count="num_experts", shared_width=shared, shared_gate=bool(shared)
        )
    layers = [
        LayerSpec(
            mixer=delta if kind == _LINEAR else mixer,
            mlp=None if experts else stack.mlp(config),
            experts=experts,
        )
        for kind in _qwen_kinds(config)
    ]
    family = config.text("model_type").removesuffix("_text")
    return stack.stack_spec(config, family, layers, outer=outer)


def _qwen_kinds(config: Fields) -> list[str]:
    count = stack.layer_count(config)
    if config.has("layer_types"):
        return stack.layer_kinds(config, count, _LINEAR, _FULL)
    every = config.integer("full_attention_interval", high=MAX_LAYERS, default=4)
    return [_LINEAR if (layer + 1) % every else _FULL for layer in range(count)]


def _gated_delta(config: Fields) -> RecurrentSpec:
    key_heads = config.integer("linear_num_key_heads", high=MAX_HEADS)
    value_heads = config.integer("linear_num_value_heads", high=MAX_HEADS)
    key_dim = config.integer("linear_key_head_dim", high=MAX_HEAD_DIM)
    value_dim = config.integer("linear_value_head_dim", high=MAX_HEAD_DIM)
    keys, values = key_heads * key_dim, value_heads * value_dim
    return RecurrentSpec(
        kind="gated_delta",
        heads=key_heads,
        in_rows=2 * keys + 2 * values + 2 * value_heads,  # q, k, v, gate, decay, strength
        out_width=values,
        conv_channels=2 * keys + values,
        conv_kernel=config.integer("linear_conv_kernel_dim", high=_MAX_KERNEL),
        state_values=value_heads * key_dim * value_dim,
        state_flops=_DELTA_FLOPS,
        vector_values=2 * value_heads + value_dim,
    )


def nemotron_h(config: Fields, outer: Fields | None) -> ModelSpec:
    """A layer is one of four: Mamba 2, attention, an MLP, or experts."""
    kinds = _nemotron_kinds(config)
    by_kind: dict[str, LayerSpec] = {}
    if "mamba" in kinds:
        by_kind["mamba"] = LayerSpec(mixer=_mamba2(config), norms=1)
    if "attention" in kinds:
        if not config.has("head_dim") and config.has("attention_head_dim"):
            config = config.with_value("head_dim", config.value("attention_head_dim"))
        mixer = stack.heads(config, bias=False, out_bias=False)
        by_kind["attention"] = LayerSpec(mixer=mixer, norms=1)
    if "mlp" in kinds:
        by_kind["mlp"] = LayerSpec(mlp=stack.mlp(config, gated=False), norms=1)
    if "moe" in kinds:
        shared = config.integer(
            "moe_shared_expert_intermediate_size", low=0, high=MAX_WIDTH, default=0
        )
        latent_size = None
        if config.has("moe_latent_size"):
            latent_size = config.integer("moe_latent_size", high=MAX_WIDTH)
        experts = stack.experts(
            config, count="n_routed_experts", gated=False, shared_width=shared, latent=latent_size
        )
        by_kind["moe"] = LayerSpec(experts=experts, norms=1)
    layers = [by_kind[kind] for kind in kinds]
    return stack.stack_spec(config, "nemotron_h", layers, outer=outer)


def _nemotron_kinds(config: Fields) -> list[str]:
    """The layers in order; the list is their number where the file gives none."""
    if config.has("hybrid_override_pattern"):
        name = "hybrid_override_pattern"
        letters = list(config.text(name).replace("|", ""))
        if set(letters) - set(_NEMOTRON):
            raise config.unsupported(name, "the letters M * - E")
        kinds = [_NEMOTRON[letter] for letter in letters]
    else:
        name = "layers_block_type"
        kinds = config.texts(name)
        if set(kinds) - set(_NEMOTRON.values()):
            raise config.unsupported(name, ", ".join(_NEMOTRON.values()))
    if not kinds or len(kinds) > MAX_LAYERS:
        raise config.malformed(name, f"1 to {MAX_LAYERS} layers")
    if not config.has("num_hidden_layers"):
        return kinds
    return stack.layer_list(kinds, config, name, stack.layer_count(config))


def _mamba2(config: Fields) -> RecurrentSpec:
    heads = config.integer("mamba_num_heads", high=MAX_HEADS)
    width = heads * config.integer("mamba_head_dim", high=MAX_HEAD_DIM)
    state = config.integer("ssm_state_size", high=MAX_WIDTH)
    channels = width + 2 * config.integer("n_groups", high=MAX_HEADS) * state
    if config.flag("use_bias", default=False):
        raise config.unsupported("use_bias", "false")
    return RecurrentSpec(
        kind="mamba2",
        heads=heads,
        in_rows=width + channels + heads,
        out_width=width,
        conv_channels=channels,
        conv_kernel=config.integer("conv_kernel", high=_MAX_KERNEL),
        conv_bias=config.flag("use_conv_bias", default=True),
        state_values=width * state,
        state_flops=_MAMBA_FLOPS,
        vector_values=3 * heads + width,
    )


def kimi_linear(config: Fields, outer: Fields | None) -> ModelSpec:
    """Kimi Linear and K3: Kimi delta attention, and in some layers latent attention."""
    count = stack.layer_count(config)
    section = config.section("linear_attn_config")
    if section is None:
        raise config.malformed("linear_attn_config", "an object")
    full = set(section.integers("full_attn_layers"))  # counted from one
    if not config.has_key("q_lora_rank"):
        config = config.with_value("q_lora_rank", None)
    latent_mixer = latent(config, gated=config.flag("mla_use_output_gate", default=False))
    inner = None
    if config.has("routed_expert_hidden_size"):
        inner = config.integer("routed_expert_hidden_size", high=MAX_WIDTH)
    normed = inner is not None and config.flag("latent_moe_use_norm", default=False)
    experts = stack.experts(
        config,
        count="num_experts",
        active="num_experts_per_token",
        shared_width=stack.shared_experts_width(config, "num_shared_experts"),
        latent=inner,
        vector_values=(inner or 0) if normed else 0,
    )
    layers = [
        LayerSpec(
            mixer=latent_mixer if layer + 1 in full else _kda(section),
            mlp=None if sparse else stack.mlp(config),
            experts=experts if sparse else None,
        )
        for layer, sparse in enumerate(stack.sparse_layers(config, count))
    ]
    family = "kimi_linear" if outer is None else "kimi_k3"
    return stack.stack_spec(config, family, layers, outer=outer)


def _kda(section: Fields) -> RecurrentSpec:
    heads = section.integer("num_heads", high=MAX_HEADS)
    dim = section.integer("head_dim", high=MAX_HEAD_DIM)
    width = heads * dim
    full_gate = section.flag("use_full_rank_gate", default=False)
    return RecurrentSpec(
        kind="kda",
        heads=heads,
        in_rows=3 * width + heads + (width if full_gate else 0),  # q, k, v, strength, gate
        out_width=width,
        low_rank=dim,
        low_rank_gates=1 if full_gate else 2,  # decay, and the output gate
        conv_channels=3 * width,
        conv_kernel=section.integer("short_conv_kernel_size", high=_MAX_KERNEL),
        state_values=heads * dim * dim,
        state_flops=_DELTA_FLOPS,
        vector_values=width + heads + dim,
    )
