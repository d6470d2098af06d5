"""The metadata keys and tensor names that GGUF files share.

Knows how llama.cpp's converter changes weights: Gemma's norms have one added, llama's query and key
rows are reordered for interleaved rotation, tied heads are left out.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping

from headrace.core.errors import WeightsError
from headrace.models.decoder import DecoderWeights, LayerWeights
from headrace.models.dims import (
    MAX_CONTEXT,
    MAX_HEAD_DIM,
    MAX_HEADS,
    MAX_LAYERS,
    MAX_VOCAB,
    MAX_WIDTH,
    Dims,
    check_heads,
    default_head_dim,
)
from headrace.models.fields import Fields
from headrace.models.refs import WeightRef, matrix_ref, norm_ref, referenced, unread
from headrace.models.rope import RopeShape

ROPE_FREQS = "rope_freqs.weight"
ROPE_FACTORS_LONG = "rope_factors_long.weight"
ROPE_FACTORS_SHORT = "rope_factors_short.weight"

# One number, or one per layer; we support models whose layers have the same.
_PER_LAYER = ("attention.head_count", "attention.head_count_kv", "feed_forward_length")


def gguf_fields(metadata: Mapping[str, object], architecture: str) -> Fields:
    """The architecture's own metadata, keys without its name."""
    prefix = f"{architecture}."
    own = {k.removeprefix(prefix): v for k, v in metadata.items() if k.startswith(prefix)}
    for name in _PER_LAYER:
        values = own.get(name)
        if isinstance(values, (list, tuple)):
            if len(set(values)) != 1:
                raise Fields(own, "GGUF metadata", prefix).unsupported(
                    name, "the same number in every layer"
                )
            own[name] = values[0]
    return Fields(own, "GGUF metadata", prefix)


def read_dims(metadata: Fields, tensor_shapes: Mapping[str, tuple[int, ...]]) -> Dims:
    for name in ("expert_count", "attention.key_length_mla"):
        if metadata.has(name) and metadata.integer(name, low=0) > 0:
            raise metadata.unsupported(name, "dense models")
    hidden = metadata.integer("embedding_length", high=MAX_WIDTH)
    heads = metadata.integer("attention.head_count", high=MAX_HEADS)
    kv_heads = metadata.integer("attention.head_count_kv", high=MAX_HEADS, default=heads)
    check_heads(metadata.where, heads, kv_heads)
    if metadata.has("attention.key_length"):
        head_dim = metadata.integer("attention.key_length", high=MAX_HEAD_DIM)
    else:
        head_dim = default_head_dim(metadata.where, hidden, heads)
    value_dim = metadata.integer("attention.value_length", high=MAX_HEAD_DIM, default=head_dim)
    if value_dim != head_dim:
        raise metadata.unsupported("attention.value_length", f"as attention.key_length, {head_dim}")
    return Dims(
        vocab_size=_vocab_size(metadata, tensor_shapes),
        hidden_size=hidden,
        intermediate_size=metadata.integer("feed_forward_length", high=MAX_WIDTH),
        layers=metadata.integer("block_count", high=MAX_LAYERS),
        heads=heads,
        kv_heads=kv_heads,
        head_dim=head_dim,
        context_tokens=metadata.integer("context_length", high=MAX_CONTEXT),
        norm_eps=metadata.number("attention.layer_norm_rms_epsilon", high=1),
    )


def read_rope_shape(metadata: Fields, dims: Dims, served: int) -> RopeShape:
    rotary = metadata.integer("rope.dimension_count", high=dims.head_dim, default=dims.head_dim)
    if rotary < 2 or rotary % 2:
        raise metadata.unsupported("rope.dimension_count", "an even number")
    original = metadata.integer(
        "rope.scaling.original_context_length", high=MAX_CONTEXT, default=dims.context_tokens
    )
    return RopeShape(
        base=metadata.number("rope.freq_base", low=1, default=10_000),
        rotary_dim=rotary,
        original_tokens=original,
        longest_tokens=dims.context_tokens,
        served_tokens=served,
    )


def refuse_window(metadata: Fields) -> None:
    """For architectures whose models have none: the file is of another model, or a newer one."""
    name = "attention.sliding_window"
    if metadata.has(name) and metadata.integer(name, low=0) > 0:
        raise metadata.unsupported(name, "no sliding window in this architecture")


def is_tied(tensor_shapes: Mapping[str, tuple[int, ...]]) -> bool:
    return "output.weight" not in tensor_shapes


def gguf_weights(
    dims: Dims,
    tensor_shapes: Mapping[str, tuple[int, ...]],
    *,
    qkv_bias: bool = False,
    head_norm: bool = False,
    post_norms: bool = False,
    fused: bool = False,
) -> DecoderWeights[WeightRef]:
    """References to a standard decoder's tensors; `fused` is Phi-3's."""

    def norm(name: str, size: int = dims.hidden_size) -> WeightRef:
        return norm_ref(name, size)

    def layer(index: int) -> LayerWeights[WeightRef]:
        at = f"blk.{index}."
        if fused:
            width = dims.q_width + 2 * dims.kv_width
            qkv = matrix_ref(dims.hidden_size, (f"{at}attn_qkv", width), bias=qkv_bias)
            up = matrix_ref(dims.hidden_size, (f"{at}ffn_up", 2 * dims.intermediate_size))
        else:
            widths = {"attn_q": dims.q_width, "attn_k": dims.kv_width, "attn_v": dims.kv_width}
            qkv = matrix_ref(
                dims.hidden_size, *((at + name, w) for name, w in widths.items()), bias=qkv_bias
            )
            both = (f"{at}ffn_gate", f"{at}ffn_up")
            up = matrix_ref(dims.hidden_size, *((name, dims.intermediate_size) for name in both))
        return LayerWeights(
            attn_norm=norm(f"{at}attn_norm"),
            qkv=qkv,
            attn_out=matrix_ref(dims.q_width, (f"{at}attn_output", dims.hidden_size)),
            mlp_norm=norm(f"{at}ffn_norm"),
            gate_up=up,
            down=matrix_ref(dims.intermediate_size, (f"{at}ffn_down", dims.hidden_size)),
            q_norm=norm(f"{at}attn_q_norm", dims.head_dim) if head_norm else None,
            k_norm=norm(f"{at}attn_k_norm", dims.head_dim) if head_norm else None,
            attn_post_norm=norm(f"{at}post_attention_norm") if post_norms else None,
            mlp_post_norm=norm(f"{at}post_ffw_norm") if post_norms else None,
        )

    embed = matrix_ref(dims.hidden_size, ("token_embd", dims.vocab_size))
    head = matrix_ref(dims.hidden_size, ("output", dims.vocab_size))
    return DecoderWeights(
        embed=embed,
        layers=[layer(index) for index in range(dims.layers)],
        final_norm=norm("output_norm"),
        head=embed if is_tied(tensor_shapes) else head,
    )


def refuse_unread(weights: DecoderWeights[WeightRef], tensor_names: Collection[str]) -> None:
    """Refuse a file with tensors that would not be used."""
    read = referenced(weights) | {ROPE_FREQS, ROPE_FACTORS_LONG, ROPE_FACTORS_SHORT}
    # Some old converters repeat the rotary factors in every layer.
    spare = (".rope_freqs.weight", ".attn_rot_embd.weight")
    for name in sorted(tensor_names):
        if name not in read and not name.endswith(spare):
            raise unread(name)


def _vocab_size(metadata: Fields, tensor_shapes: Mapping[str, tuple[int, ...]]) -> int:
    """From the embedding itself: the metadata often leaves it out."""
    shape = tensor_shapes.get("token_embd.weight", ())
    if len(shape) == 2 and 1 <= shape[0] <= MAX_VOCAB:
        return shape[0]
    if not shape and metadata.has("vocab_size"):  # the loader will report what is wrong with it
        return metadata.integer("vocab_size", high=MAX_VOCAB)
    raise WeightsError(
        f"GGUF: the tensor token_embd.weight is {f'of shape {shape}' if shape else 'missing'}; "
        f"expected (vocabulary up to {MAX_VOCAB}, hidden size).",
        "The file is damaged or was written by a faulty converter: fetch or convert it again.",
    )
