"""Families with latent attention: DeepSeek V2 to V4, Kimi K2, GLM 5."""

from __future__ import annotations

from headrace.models.counted import stack
from headrace.models.dims import MAX_CONTEXT, MAX_HEAD_DIM, MAX_HEADS, MAX_WIDTH
from headrace.models.fields import Fields
from headrace.models.layers import CompressedSpec, IndexSpec, LatentSpec, LayerSpec
from headrace.models.spec import ModelSpec

_Q_RANK = 1536  # where a file has no such field: as transformers' DeepSeek V2 and V3 have it
_FULL_INDEX = ("full", "shared")
_SPARSE_RATIO = 4  # entries of 4 tokens are chosen by an index and made from two spans
_RATIOS = (0, _SPARSE_RATIO, 128)


def deepseek(config: Fields, outer: Fields | None) -> ModelSpec:
    """V2, V3 (and R1), Kimi K2; with an index V3.2 and GLM 5."""
    count = stack.layer_count(config)
    experts = stack.experts(
        config, count="n_routed_experts", shared_width=stack.shared_experts_width(config)
    )
    mixers = [latent(config, index) for index in _indexes(config, count)]
    layers = [
        LayerSpec(
            mixer=mixer,
            mlp=None if sparse else stack.mlp(config),
            experts=experts if sparse else None,
        )
        for mixer, sparse in zip(mixers, stack.sparse_layers(config, count), strict=True)
    ]
    return stack.stack_spec(config, config.text("model_type"), layers, outer=outer)


def latent(config: Fields, index: IndexSpec | None = None, *, gated: bool = False) -> LatentSpec:
    heads = config.integer("num_attention_heads", high=MAX_HEADS)
    value_dim = config.integer("v_head_dim", high=MAX_HEAD_DIM)
    direct = config.has_key("q_lora_rank") and not config.has("q_lora_rank")  # null, and not absent
    return LatentSpec(
        heads=heads,
        q_rank=None if direct else _q_rank(config),
        kv_rank=config.integer("kv_lora_rank", high=MAX_WIDTH),
        rope_dim=config.integer("qk_rope_head_dim", high=MAX_HEAD_DIM),
        nope_dim=config.integer("qk_nope_head_dim", high=MAX_HEAD_DIM),
        value_dim=value_dim,
        bias=config.flag("attention_bias", default=False),
        gate_rows=heads * value_dim if gated else 0,
        index=index,
    )


def _q_rank(config: Fields) -> int:
    return config.integer("q_lora_rank", high=MAX_WIDTH, default=_Q_RANK)


def _indexes(config: Fields, layers: int) -> list[IndexSpec | None]:
    """Each layer's index; GLM 5.2 uses that of an earlier layer in most of them."""
    if not config.has("index_topk"):
        return [None] * layers
    kinds = ["full"] * layers
    if config.has("indexer_types"):
        kinds = stack.layer_list(config.texts("indexer_types"), config, "indexer_types", layers)
        if set(kinds) - set(_FULL_INDEX):
            raise config.unsupported("indexer_types", ", ".join(_FULL_INDEX))
    return [_index(config, makes_keys=kind == "full") for kind in kinds]


def _index(config: Fields, *, makes_keys: bool = True) -> IndexSpec:
    dim = config.integer("index_head_dim", high=MAX_HEAD_DIM)
    return IndexSpec(
        heads=config.integer("index_n_heads", high=MAX_HEADS),
        dim=dim,
        top=config.integer("index_topk", high=MAX_CONTEXT),
        query_columns=_q_rank(config),
        norm_values=2 * dim,  # a layer norm: weight and bias
        makes_keys=makes_keys,
    )


def deepseek_v4(config: Fields, outer: Fields | None) -> ModelSpec:
    count = stack.layer_count(config)
    ratios = stack.layer_list(config.integers("compress_ratios"), config, "compress_ratios", count)
    if set(ratios) - set(_RATIOS):
        raise config.unsupported("compress_ratios", ", ".join(map(str, _RATIOS)))
    experts = stack.experts(
        config, count="n_routed_experts", shared_width=stack.shared_experts_width(config)
    )
    streams = config.integer("hc_mult", high=64, default=1)
    layers = [
        LayerSpec(mixer=_compressed(config, ratio), experts=experts, streams=streams)
        for ratio in ratios
    ]
    return stack.stack_spec(config, "deepseek_v4", layers, outer=outer)


def _compressed(config: Fields, ratio: int) -> CompressedSpec:
    heads = config.integer("num_attention_heads", high=MAX_HEADS)
    groups = config.integer("o_groups", high=MAX_HEADS)
    if heads % groups:
        raise config.malformed("o_groups", f"a divisor of {heads} attention heads")
    sparse = ratio == _SPARSE_RATIO
    return CompressedSpec(
        heads=heads,
        head_dim=config.integer("head_dim", high=MAX_HEAD_DIM),
        q_rank=config.integer("q_lora_rank", high=MAX_WIDTH),
        out_groups=groups,
        out_rank=config.integer("o_lora_rank", high=MAX_WIDTH),
        window=stack.window(config),
        ratio=ratio,
        overlap=2 if sparse else 1,
        index=_index(config) if sparse else None,
    )
