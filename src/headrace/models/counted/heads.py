"""Families with plain attention that the engine does not serve: experts, per-layer head counts,
output gates, sinks, block indexes, layers without attention."""

from __future__ import annotations

from dataclasses import replace

from headrace.models.counted import stack
from headrace.models.dims import MAX_CONTEXT, MAX_HEAD_DIM, MAX_HEADS, MAX_LAYERS, MAX_WIDTH
from headrace.models.fields import Fields
from headrace.models.layers import HeadsSpec, IndexSpec, LayerSpec, MlpSpec
from headrace.models.spec import ModelSpec


def mixtral(config: Fields, outer: Fields | None) -> ModelSpec:
    window = stack.window(config) if config.has("sliding_window") else None
    layer = LayerSpec(
        mixer=stack.heads(config, window=window),
        experts=stack.experts(config, count="num_local_experts", width="intermediate_size"),
    )
    return stack.stack_spec(config, "mixtral", [layer] * stack.layer_count(config), outer=outer)


def qwen_moe(config: Fields, outer: Fields | None) -> ModelSpec:
    """Qwen2-MoE (a shared expert, biases), Qwen3-MoE and the text half of Qwen3-VL-MoE."""
    kind = config.text("model_type")
    second = kind == "qwen2_moe"
    mixer = stack.heads(
        config, head_norm=not second, bias=True if second else None,
        out_bias=False if second else None,
    )  # fmt: skip
    shared = 0
    if second:
        shared = config.integer("shared_expert_intermediate_size", high=MAX_WIDTH)
    experts = stack.experts(
        config, count="num_experts", shared_width=shared, shared_gate=bool(shared)
    )
    dense = set(config.integers("mlp_only_layers")) if config.has("mlp_only_layers") else set()
    every = config.integer("decoder_sparse_step", low=0, high=MAX_LAYERS, default=1)
    layers = [
        LayerSpec(mixer=mixer, experts=experts)
        if layer not in dense and every and (layer + 1) % every == 0
        else LayerSpec(mixer=mixer, mlp=stack.mlp(config))
        for layer in range(stack.layer_count(config))
    ]
    return stack.stack_spec(config, kind.removesuffix("_text"), layers, outer=outer)


def qwen3_vl(config: Fields, outer: Fields | None) -> ModelSpec:
    layer = LayerSpec(mixer=stack.heads(config, head_norm=True), mlp=stack.mlp(config))
    tied = outer is not None and outer.flag("tie_word_embeddings", default=False)
    layers = [layer] * stack.layer_count(config)
    return stack.stack_spec(config, "qwen3_vl", layers, outer=outer, tied=tied)


def mimo(config: Fields, outer: Fields | None) -> ModelSpec:
    """MiMo 7B: Qwen2 with a layer for multi-token prediction."""
    bias = config.flag("attention_bias", default=True)
    layer = LayerSpec(mixer=stack.heads(config, bias=bias, out_bias=False), mlp=stack.mlp(config))
    return stack.stack_spec(config, "mimo", [layer] * stack.layer_count(config), outer=outer)


def gpt_oss(config: Fields, outer: Fields | None) -> ModelSpec:
    mixer = replace(stack.heads(config), sinks=True)
    experts = stack.experts(
        config, count="num_local_experts", width="intermediate_size", bias=True, router_bias=True
    )
    kinds = stack.layer_kinds(
        config, stack.layer_count(config), "full_attention", "sliding_attention"
    )
    layers = [
        LayerSpec(
            mixer=replace(mixer, window=stack.window(config)) if kind.startswith("s") else mixer,
            experts=experts,
        )
        for kind in kinds
    ]
    return stack.stack_spec(config, "gpt_oss", layers, outer=outer)


def minimax_m2(config: Fields, outer: Fields | None) -> ModelSpec:
    mixer = stack.heads(config)
    if config.flag("use_qk_norm", default=True):  # one over all query heads, one over all keys
        mixer = replace(mixer, norm_values=mixer.q_width + mixer.k_width)
    experts = stack.experts(config, count="num_local_experts", width="intermediate_size")
    layer = LayerSpec(mixer=mixer, experts=experts)
    layers = [layer] * stack.layer_count(config)
    return stack.stack_spec(config, "minimax_m2", layers, outer=outer)


def minimax_m3(config: Fields, outer: Fields | None) -> ModelSpec:
    """Layers with experts also have a block index, which chooses the keys that a query sees."""
    mixer = stack.heads(config, head_norm=config.flag("use_qk_norm", default=True))
    if config.flag("attention_output_gate", default=False):
        mixer = replace(mixer, gate_rows=mixer.q_width)
    shared = config.integer("shared_intermediate_size", low=0, high=MAX_WIDTH, default=0)
    width = "moe_intermediate_size" if config.has("moe_intermediate_size") else "intermediate_size"
    experts = stack.experts(config, count="num_local_experts", width=width, shared_width=shared)
    count = stack.layer_count(config)
    sparse = stack.sparse_layers(config, count)
    indexed, index = _block_index(config, count)
    layers = [
        LayerSpec(
            mixer=replace(mixer, index=index) if has_index else mixer,
            mlp=None if has_experts else stack.mlp(config, "dense_intermediate_size"),
            experts=experts if has_experts else None,
        )
        for has_experts, has_index in zip(sparse, indexed, strict=True)
    ]
    return stack.stack_spec(config, "minimax_m3", layers, outer=outer)


def _block_index(config: Fields, layers: int) -> tuple[list[bool], IndexSpec | None]:
    section = config.section("sparse_attention_config")
    if section is None or not section.flag("use_sparse_attention", default=True):
        return [False] * layers, None
    dim = section.integer("sparse_index_dim", high=MAX_HEAD_DIM)
    block = section.integer("sparse_block_size", high=MAX_CONTEXT)
    index = IndexSpec(
        heads=section.integer("sparse_num_index_heads", high=MAX_HEADS),
        dim=dim,
        top=section.integer("sparse_topk_blocks", high=MAX_CONTEXT) * block,
        query_columns=stack.hidden_size(config),
        weighted=False,
        norm_values=2 * dim,
    )
    freq = "sparse_attention_freq"
    flags = stack.layer_list(section.integers(freq), section, freq, layers)
    return [bool(flag) for flag in flags], index


def mimo_v2_flash(config: Fields, outer: Fields | None) -> ModelSpec:
    """Windowed layers have heads of their own numbers; values are narrower than keys."""
    count = stack.layer_count(config)
    window = config.integer("sliding_window", high=MAX_CONTEXT)
    full = stack.heads(config, out_bias=False)
    full = replace(
        full,
        value_dim=config.integer("v_head_dim", high=MAX_HEAD_DIM),
        sinks=config.flag("add_full_attention_sink_bias", default=False),
    )
    sliding = replace(
        stack.heads(config, out_bias=False, window=window, prefix="swa_"),
        value_dim=config.integer("swa_v_head_dim", high=MAX_HEAD_DIM, default=full.value_dim),
        sinks=config.flag("add_swa_attention_sink_bias", default=True),
    )
    experts = stack.experts(
        config, count="n_routed_experts", shared_width=stack.shared_experts_width(config)
    )
    pattern = stack.layer_list(
        config.integers("hybrid_layer_pattern"), config, "hybrid_layer_pattern", count
    )
    layers = [
        LayerSpec(
            mixer=sliding if windowed else full,
            mlp=None if sparse else stack.mlp(config),
            experts=experts if sparse else None,
        )
        for windowed, sparse in zip(pattern, stack.sparse_layers(config, count), strict=True)
    ]
    return stack.stack_spec(config, "mimo_v2_flash", layers, outer=outer)


def step3(config: Fields, outer: Fields | None) -> ModelSpec:
    """Step 3.5 and 3.7 Flash: each head's output has a gate; windowed layers may have more heads
    (where the file says so)."""
    count = stack.layer_count(config)
    mixer = stack.heads(config, head_norm=True)
    full = replace(mixer, gate_rows=mixer.heads)
    other = config.section("attention_other_setting")
    wide = mixer.heads
    if config.has("num_sliding_attention_heads"):
        wide = config.integer("num_sliding_attention_heads", high=MAX_HEADS)
    elif other is not None:
        wide = other.integer("num_attention_heads", high=MAX_HEADS, default=mixer.heads)
    sliding = replace(full, heads=wide, gate_rows=wide, window=stack.window(config))
    experts = stack.experts(
        config,
        count=_first(config, "num_experts", "moe_num_experts", "n_routed_experts"),
        active=_first(config, "num_experts_per_tok", "moe_top_k"),
        shared_width=config.integer(
            _first(config, "share_expert_dim", "share_expert_dims"), low=0, high=MAX_WIDTH
        ),
    )
    dense = config.integer("first_k_dense_replace", low=0, high=MAX_LAYERS, default=3)
    kinds = stack.layer_kinds(config, count, "full_attention", "sliding_attention")
    layers = [
        LayerSpec(
            mixer=sliding if kind == "sliding_attention" else full,
            mlp=stack.mlp(config) if layer < dense else None,
            experts=None if layer < dense else experts,
        )
        for layer, kind in enumerate(kinds)
    ]
    return stack.stack_spec(config, "step3p7", layers, outer=outer)


def gemma4(config: Fields, outer: Fields | None) -> ModelSpec:
    """Full layers have wider and fewer heads, and use their keys as values; with experts, each
    layer has an MLP as well."""
    # A file without the first field has Google's default of 256.
    for name, default in (("hidden_size_per_layer_input", 256), ("num_kv_shared_layers", 0)):
        if config.integer(name, low=0, default=default):
            raise config.unsupported(name, "0: Gemma 4's small models have further parts")
    sliding = stack.heads(config, window=stack.window(config), head_norm=True)
    dim = config.integer("global_head_dim", high=MAX_HEAD_DIM, default=sliding.key_dim)
    shared_keys = config.flag("attention_k_eq_v", default=False)
    kv_heads = sliding.kv_heads
    if shared_keys:
        kv_heads = config.integer("num_global_key_value_heads", high=MAX_HEADS, default=kv_heads)
    full = replace(
        sliding, window=None, key_dim=dim, value_dim=dim, kv_heads=kv_heads,
        norm_values=2 * dim, keys_are_values=shared_keys,
    )  # fmt: skip
    experts = None
    if config.flag("enable_moe_block", default=False):
        count = config.integer("num_experts")
        experts = stack.experts(
            config, count="num_experts", active="top_k_experts",
            vector_values=stack.hidden_size(config) + count,
        )  # fmt: skip
    kinds = stack.layer_kinds(
        config, stack.layer_count(config), "full_attention", "sliding_attention"
    )
    layers = [
        LayerSpec(
            mixer=sliding if kind == "sliding_attention" else full,
            mlp=stack.mlp(config),
            experts=experts,
            norms=7 if experts else 4,
        )
        for kind in kinds
    ]
    return stack.stack_spec(config, "gemma4", layers, outer=outer, tied=True)


def glm4_moe(config: Fields, outer: Fields | None) -> ModelSpec:
    """GLM 4.5 to 4.7."""
    count = stack.layer_count(config)
    mixer = stack.heads(config, head_norm=config.flag("use_qk_norm", default=False), out_bias=False)
    experts = stack.experts(
        config, count="n_routed_experts", shared_width=stack.shared_experts_width(config)
    )
    layers = [
        LayerSpec(
            mixer=mixer,
            mlp=None if sparse else stack.mlp(config),
            experts=experts if sparse else None,
        )
        for sparse in stack.sparse_layers(config, count)
    ]
    return stack.stack_spec(config, "glm4_moe", layers, outer=outer)


def nemotron_nas(config: Fields, outer: Fields | None) -> ModelSpec:
    """Llama pruned by search: each layer has its own key/value heads and width, or lacks either."""
    query_heads = config.integer("num_attention_heads", high=MAX_HEADS)
    hidden = stack.hidden_size(config)
    blocks = config.value("block_configs")
    count = stack.layer_count(config)
    if not isinstance(blocks, list) or len(blocks) != count:
        raise config.malformed("block_configs", f"an object for each of {count} layers")
    dim = stack.head_dim(config, query_heads)
    layers = []
    for number, block in enumerate(blocks):
        if not isinstance(block, dict):
            raise config.malformed("block_configs", f"an object for each of {count} layers")
        fields = Fields(block, config.where, f"block_configs[{number}].")
        attention, ffn = fields.section("attention"), fields.section("ffn")
        if attention is None or ffn is None:
            raise config.malformed("block_configs", "attention and ffn in each")
        mixer = mlp = None
        if _present(attention):
            group = attention.integer("n_heads_in_group", high=query_heads)
            mixer = HeadsSpec(
                heads=query_heads, kv_heads=query_heads // group, key_dim=dim, value_dim=dim
            )
        if _present(ffn):
            mlp = MlpSpec(width=_nas_width(ffn.number("ffn_mult", high=64.0), hidden))
        layers.append(
            LayerSpec(mixer=mixer, mlp=mlp, norms=(mixer is not None) + (mlp is not None))
        )
    return stack.stack_spec(config, "nemotron-nas", layers, outer=outer)


def _present(block: Fields) -> bool:
    if block.flag("replace_with_linear", default=False):
        raise block.unsupported("replace_with_linear", "false")
    return not block.flag("no_op", default=False)


def _nas_width(factor: float, hidden: int) -> int:
    """Two thirds of factor x hidden, rounded up to 256, as the model's own code does."""
    width = int(2 * factor * hidden / 3)
    return -(-width // 256) * 256


def _first(config: Fields, *names: str) -> str:
    """Which of a field's names the file has; the first if it has none, for the error."""
    return next((name for name in names if config.has(name)), names[0])
