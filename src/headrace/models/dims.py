"""The dimensions that every family has, and a ModelSpec made from them.

Families read their own files into a Dims, add what is special about them, and get a ModelSpec.
Knows no field names and no tensor names.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from headrace.core.errors import ConfigError, UnsupportedModelError, WeightsError
from headrace.models.fields import Fields
from headrace.models.spec import Activation, AttentionSpec, ModelSpec, RopeSpec

# Far above any known model, far below what would exhaust the machine.
MAX_LAYERS = 1_000
MAX_HEADS = 4_096
MAX_HEAD_DIM = 4_096
MAX_WIDTH = 2**20
MAX_VOCAB = 2**22
MAX_CONTEXT = 2**30


@dataclass(frozen=True, slots=True, kw_only=True)
class Dims:
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    layers: int
    heads: int
    kv_heads: int
    head_dim: int
    context_tokens: int  # as the file says
    norm_eps: float

    @property
    def q_width(self) -> int:
        return self.heads * self.head_dim

    @property
    def kv_width(self) -> int:
        return self.kv_heads * self.head_dim


def check_heads(where: str, heads: int, kv_heads: int) -> None:
    if heads % kv_heads:
        raise WeightsError(
            f"{where}: {heads} attention heads and {kv_heads} key/value heads; expected a "
            "multiple of the key/value heads.",
            "The file is damaged or was written by a faulty converter: fetch or convert it again.",
        )


def default_head_dim(where: str, hidden_size: int, heads: int) -> int:
    """The head size if a file leaves it out."""
    if hidden_size % heads:
        raise WeightsError(
            f"{where}: no head size, and {heads} heads do not divide the hidden size "
            f"{hidden_size}; expected a head size or a multiple.",
            "The file is damaged or was written by a faulty converter: fetch or convert it again.",
        )
    return hidden_size // heads


def rotary_dim(where: str, head_dim: int, factor: float = 1.0) -> int:
    """How many of a head's values rotate."""
    dim = int(head_dim * factor)
    if dim < 2 or dim % 2 or dim > head_dim:
        raise UnsupportedModelError(
            f"{where}: {dim} of a head's {head_dim} values would be rotated; supported: an even "
            f"number from 2 to {head_dim}.",
            "Choose another model.",
        )
    return dim


def served_context(made_for: int, wanted: int | None) -> int:
    """The longest sequence to serve: `wanted`, if the model supports it."""
    if wanted is None:
        return made_for
    if not 1 <= wanted <= made_for:
        raise ConfigError(
            f"context_tokens is {wanted}; the model supports 1 to {made_for}.",
            f"Set context_tokens to {made_for} or less, or leave it out.",
            param="context_tokens",
        )
    return wanted


def layer_windows(config: Fields, layers: int, window: int | None) -> list[int | None] | None:
    """Each layer's window by `layer_types`, or None if the file has no such field."""
    if not config.has("layer_types"):
        return None
    kinds = config.texts("layer_types")
    if len(kinds) != layers:
        raise config.malformed("layer_types", f"one for each of {layers} layers")
    if set(kinds) - {"full_attention", "sliding_attention"}:
        raise config.unsupported("layer_types", "full_attention, sliding_attention")
    if window is None and "sliding_attention" in kinds:
        raise config.malformed("sliding_window", "an integer, as layer_types has sliding layers")
    return [window if kind == "sliding_attention" else None for kind in kinds]


def make_spec(
    family: str,
    dims: Dims,
    *,
    context_tokens: int,
    ropes: RopeSpec | Sequence[RopeSpec],
    windows: int | Sequence[int | None] | None = None,
    scale: float | None = None,
    attention_softcap: float | None = None,
    activation: Activation = Activation.SILU,
    embed_scale: float = 1.0,
    final_softcap: float | None = None,
    tied_embeddings: bool = False,
    qkv_bias: bool = False,
    head_norm: bool = False,
    post_norms: bool = False,
) -> ModelSpec:
    """A ModelSpec; `ropes` and `windows` are one for all layers or one per layer."""
    each_rope = [ropes] * dims.layers if isinstance(ropes, RopeSpec) else ropes
    each_window = windows if isinstance(windows, Sequence) else [windows] * dims.layers
    attention = tuple(
        AttentionSpec(
            layer=layer,
            heads=dims.heads,
            kv_heads=dims.kv_heads,
            head_dim=dims.head_dim,
            scale=dims.head_dim**-0.5 if scale is None else scale,
            rope=rope,
            window=window,
            softcap=attention_softcap,
            norm_eps=dims.norm_eps,
        )
        for layer, (rope, window) in enumerate(zip(each_rope, each_window, strict=True))
    )
    return ModelSpec(
        family=family,
        vocab_size=dims.vocab_size,
        hidden_size=dims.hidden_size,
        intermediate_size=dims.intermediate_size,
        context_tokens=context_tokens,
        norm_eps=dims.norm_eps,
        attention=attention,
        activation=activation,
        embed_scale=embed_scale,
        final_softcap=final_softcap,
        tied_embeddings=tied_embeddings,
        qkv_bias=qkv_bias,
        head_norm=head_norm,
        post_norms=post_norms,
    )
