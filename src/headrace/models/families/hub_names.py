"""The field and tensor names that hub checkpoints (config.json + safetensors) share.

Families differ in a few switches, and know what these mean.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass

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
from headrace.models.spec import Activation

# Where the decoder sits: alone, inside a multimodal model (transformers 5, then 4).
_PREFIXES = ("model.", "model.language_model.", "language_model.model.")
_HEADS = ("lm_head.weight", "language_model.lm_head.weight")
_ACTIVATIONS = {
    "silu": Activation.SILU,
    "swish": Activation.SILU,
    "gelu_pytorch_tanh": Activation.GELU_TANH,
}
# Buffers in old checkpoints that can be computed from the config.
_DERIVED = ("rotary_emb.inv_freq",)


@dataclass(frozen=True, slots=True)
class HubNames:
    """Where a checkpoint keeps its decoder."""

    prefix: str
    head: str


def find_names(tensor_names: Collection[str]) -> HubNames:
    """The prefix of this checkpoint's decoder; the plain one if none is found, so that the loader's
    error names a tensor."""
    prefix = next((p for p in _PREFIXES if f"{p}embed_tokens.weight" in tensor_names), _PREFIXES[0])
    head = next((name for name in _HEADS if name in tensor_names), _HEADS[0])
    return HubNames(prefix, head)


@dataclass(frozen=True, slots=True, kw_only=True)
class HubDefaults:
    """Defaults for fields that a family's configs may leave out, as in its transformers class."""

    vocab_size: int | None = None
    heads: int | None = None
    kv_heads: int | None = None  # None: as many as heads
    head_dim: int | None = None  # None: hidden size over heads
    context_tokens: int | None = None
    norm_eps: float = 1e-6


def read_dims(config: Fields, defaults: HubDefaults | None = None) -> Dims:
    defaults = defaults or HubDefaults()
    hidden = config.integer("hidden_size", high=MAX_WIDTH)
    heads = config.integer("num_attention_heads", high=MAX_HEADS, default=defaults.heads)
    kv_heads = config.integer(
        "num_key_value_heads", high=MAX_HEADS, default=defaults.kv_heads or heads
    )
    check_heads(config.where, heads, kv_heads)
    if config.has("head_dim") or defaults.head_dim is not None:
        head_dim = config.integer("head_dim", high=MAX_HEAD_DIM, default=defaults.head_dim)
    else:
        head_dim = default_head_dim(config.where, hidden, heads)
    return Dims(
        vocab_size=config.integer("vocab_size", high=MAX_VOCAB, default=defaults.vocab_size),
        hidden_size=hidden,
        intermediate_size=config.integer("intermediate_size", high=MAX_WIDTH),
        layers=config.integer("num_hidden_layers", high=MAX_LAYERS),
        heads=heads,
        kv_heads=kv_heads,
        head_dim=head_dim,
        context_tokens=config.integer(
            "max_position_embeddings", high=MAX_CONTEXT, default=defaults.context_tokens
        ),
        norm_eps=config.number("rms_norm_eps", high=1, default=defaults.norm_eps),
    )


def read_activation(config: Fields, name: str = "hidden_act", default: str = "silu") -> Activation:
    found = config.text(name, default=default)
    if found not in _ACTIVATIONS:
        raise config.unsupported(name, ", ".join(_ACTIVATIONS))
    return _ACTIVATIONS[found]


def read_window(config: Fields, default: int | None = None) -> int | None:
    """`sliding_window`; null means none, absent means the family's default."""
    if not config.has("sliding_window"):
        return None if config.has_key("sliding_window") else default
    return config.integer("sliding_window", high=MAX_CONTEXT)


def refuse_flags(config: Fields, *names: str) -> None:
    """Refuse a model that sets one of these: Headrace would compute something else."""
    for name in names:
        if config.has(name) and config.flag(name, default=False):
            raise config.unsupported(name, "false")


def hub_weights(
    dims: Dims,
    names: HubNames,
    *,
    tied: bool,
    qkv_bias: bool = False,
    head_norm: bool = False,
    post_norms: bool = False,
    fused: bool = False,
    norm_offset: float = 0.0,
) -> DecoderWeights[WeightRef]:
    """References to a standard decoder's tensors.

    `fused`: one qkv_proj and one gate_up_proj (Phi-3). `post_norms`: Gemma's four norms per layer,
    where `post_attention_layernorm` is what its name says and not the MLP's norm.
    """

    def norm(name: str, size: int = dims.hidden_size) -> WeightRef:
        return norm_ref(name, size, norm_offset)

    def layer(index: int) -> LayerWeights[WeightRef]:
        at = f"{names.prefix}layers.{index}."
        attn, mlp = f"{at}self_attn.", f"{at}mlp."
        if fused:
            width = dims.q_width + 2 * dims.kv_width
            qkv = matrix_ref(dims.hidden_size, (f"{attn}qkv_proj", width), bias=qkv_bias)
            up = matrix_ref(dims.hidden_size, (f"{mlp}gate_up_proj", 2 * dims.intermediate_size))
        else:
            widths = {"q_proj": dims.q_width, "k_proj": dims.kv_width, "v_proj": dims.kv_width}
            qkv = matrix_ref(
                dims.hidden_size, *((attn + name, w) for name, w in widths.items()), bias=qkv_bias
            )
            both = (f"{mlp}gate_proj", f"{mlp}up_proj")
            up = matrix_ref(dims.hidden_size, *((name, dims.intermediate_size) for name in both))
        mlp_norm = "pre_feedforward_layernorm" if post_norms else "post_attention_layernorm"
        return LayerWeights(
            attn_norm=norm(f"{at}input_layernorm"),
            qkv=qkv,
            attn_out=matrix_ref(dims.q_width, (f"{attn}o_proj", dims.hidden_size)),
            mlp_norm=norm(at + mlp_norm),
            gate_up=up,
            down=matrix_ref(dims.intermediate_size, (f"{mlp}down_proj", dims.hidden_size)),
            q_norm=norm(f"{attn}q_norm", dims.head_dim) if head_norm else None,
            k_norm=norm(f"{attn}k_norm", dims.head_dim) if head_norm else None,
            attn_post_norm=norm(f"{at}post_attention_layernorm") if post_norms else None,
            mlp_post_norm=norm(f"{at}post_feedforward_layernorm") if post_norms else None,
        )

    embed = matrix_ref(dims.hidden_size, (f"{names.prefix}embed_tokens", dims.vocab_size))
    head = matrix_ref(dims.hidden_size, (names.head.removesuffix(".weight"), dims.vocab_size))
    return DecoderWeights(
        embed=embed,
        layers=[layer(index) for index in range(dims.layers)],
        final_norm=norm(f"{names.prefix}norm"),
        head=embed if tied else head,
    )


def refuse_unread(
    weights: DecoderWeights[WeightRef], names: HubNames, tensor_names: Collection[str]
) -> None:
    """Refuse a checkpoint whose decoder layers hold tensors that would not be used: a bias, an
    adapter, experts or a quantization that the config did not mention."""
    read = referenced(weights)
    for name in sorted(tensor_names):
        ours = name.startswith(f"{names.prefix}layers.") and not name.endswith(_DERIVED)
        if ours and name not in read:
            raise unread(name)
