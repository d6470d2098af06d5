"""What a decoder-only model is, in numbers: dimensions, attention, rope, and bytes that follow.

Plain values: no arrays, no files, no torch. Families fill it in; the decoder, the ledger and the
backends read it.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum


class Activation(StrEnum):
    SILU = "silu"
    GELU_TANH = "gelu_tanh"


@dataclass(frozen=True, slots=True, kw_only=True)
class RopeSpec:
    """Rotary embedding with every scaling already applied to the frequencies.

    angle = float32(position) * float32(inv_freq[i]); cos and sin are multiplied by `scale`.
    Pairs are (i, i + dim/2), or (2i, 2i + 1) when interleaved (as GGUF's llama weights are).
    Only the first 2 * len(inv_freq) values of a head rotate.
    """

    inv_freq: tuple[float, ...]
    scale: float = 1.0
    interleaved: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class AttentionSpec:
    """One layer's attention."""

    layer: int
    heads: int
    kv_heads: int
    head_dim: int
    scale: float  # multiplies q.k
    rope: RopeSpec
    window: int | None = None  # a token sees itself and the window - 1 before it
    softcap: float | None = None  # of the scores
    norm_eps: float = 1e-6  # of head_norm
    joint_norm: bool = False  # OLMo 2: head_norm is over all heads together, not over each

    @property
    def q_width(self) -> int:
        return self.heads * self.head_dim

    @property
    def kv_width(self) -> int:
        return self.kv_heads * self.head_dim

    @property
    def qkv_width(self) -> int:
        return self.q_width + 2 * self.kv_width


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelSpec:
    """A whole decoder."""

    family: str  # "llama", "qwen3", ... : what a user would call it
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    context_tokens: int  # the longest sequence: what it was made for, or less if asked
    norm_eps: float
    attention: tuple[AttentionSpec, ...]  # one per layer
    activation: Activation = Activation.SILU
    embed_scale: float = 1.0
    final_softcap: float | None = None
    tied_embeddings: bool = False
    qkv_bias: bool = False
    head_norm: bool = False  # Qwen3, Gemma 3: RMS norm of each query and key head
    pre_norms: bool = True  # norms before attention and before the MLP; OLMo 2 has none
    post_norms: bool = False  # Gemma, OLMo 2: norms after attention and after the MLP

    @property
    def layers(self) -> int:
        return len(self.attention)

    @property
    def parameters(self) -> int:
        """All weights, the tied output layer counted once."""
        total = self.vocab_size * self.hidden_size * (1 if self.tied_embeddings else 2)
        for attention in self.attention:
            total += attention.qkv_width * (self.hidden_size + (1 if self.qkv_bias else 0))
            total += attention.q_width * self.hidden_size
            total += 3 * self.hidden_size * self.intermediate_size
            total += self.hidden_size * 2 * (self.pre_norms + self.post_norms)
            if self.head_norm and attention.joint_norm:
                total += attention.q_width + attention.kv_width
            elif self.head_norm:
                total += 2 * attention.head_dim
        return total + self.hidden_size

    def kv_bytes_per_token(self, bytes_per_value: float) -> int:
        """2 (K and V) x layers x kv_heads x head_dim x bytes per value."""
        return int(sum(2 * a.kv_width for a in self.attention) * bytes_per_value)
