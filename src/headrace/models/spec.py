"""What a decoder-only model is, in numbers: dimensions, attention, rope, and bytes that follow.

Plain values: no arrays, no files, no torch. Families fill it in; the decoder, the ledger and the
backends read it. A model that is counted but not served has `stack` in place of `attention`.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from enum import StrEnum

from headrace.models.kv import values_per_token
from headrace.models.layers import HeadsSpec, LayerSpec, MlpSpec
from headrace.models.matrices import layer_matrices, layer_vectors


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
    attention: tuple[AttentionSpec, ...]  # one per layer; none if only `stack` describes them
    activation: Activation = Activation.SILU
    embed_scale: float = 1.0
    final_softcap: float | None = None
    tied_embeddings: bool = False
    qkv_bias: bool = False
    head_norm: bool = False  # Qwen3, Gemma 3: RMS norm of each query and key head
    pre_norms: bool = True  # norms before attention and before the MLP; OLMo 2 has none
    post_norms: bool = False  # Gemma, OLMo 2: norms after attention and after the MLP
    # One of so many equal shares: heads and intermediate_size are those of the share (sharding.py).
    ranks: int = 1
    # A stage of a pipeline has some of the layers; the first has the embedding, the last the final
    # norm and the output layer (stages.py).
    has_embedding: bool = True
    has_head: bool = True

    # Layers of kinds that the engine has no kernels for: counted, planned for, never served.
    stack: tuple[LayerSpec, ...] = ()
    left_out: tuple[str, ...] = ()  # parts of the checkpoint that are not counted: vision, MTP

    @property
    def layers(self) -> int:
        return len(self.attention) or len(self.stack)

    @property
    def served(self) -> bool:
        """Whether the backends have kernels for it."""
        return not self.stack

    @property
    def layer_specs(self) -> tuple[LayerSpec, ...]:
        """Every layer in numbers, served or not."""
        if self.stack:
            return self.stack
        mlp = MlpSpec(width=self.intermediate_size)
        norms = 2 * (self.pre_norms + self.post_norms)
        return tuple(
            LayerSpec(mixer=self._mixer(attention), mlp=mlp, norms=norms)
            for attention in self.attention
        )

    @property
    def parameters(self) -> int:
        """All weights, the tied output layer counted once."""
        return self._parameters(active=False)

    @property
    def active_parameters(self) -> int:
        """The weights that one token uses: of the experts, those that it is routed to. The
        embedding table counts in full, as it does among all parameters."""
        return self._parameters(active=True)

    def kv_bytes_per_token(self, bytes_per_value: float) -> int:
        """K and V of all layers: 2 x layers x kv_heads x head_dim x bytes per value for plain
        attention; a latent vector for MLA; nothing for recurrent layers. Layers with a window count
        in full, as this engine keeps them; index keys do not (kv.py has both)."""
        return int(
            sum(values_per_token(layer.mixer) for layer in self.layer_specs) * bytes_per_value
        )

    def _parameters(self, *, active: bool) -> int:
        total = self.vocab_size * self.hidden_size * (1 if self.tied_embeddings else 2)
        for layer, times in Counter(self.layer_specs).items():
            values = layer_vectors(layer, self.hidden_size)
            for matrix in layer_matrices(layer, self.hidden_size):
                used = matrix.values + matrix.bias_values
                if active and layer.experts is not None and matrix.copies > 1:
                    used = used // matrix.copies * layer.experts.active
                values += used
            total += times * values
        streams = self.stack[-1].streams if self.stack else 1
        if streams > 1:  # joined once more before the output layer
            total += streams * streams * self.hidden_size + streams + 1
        return total + self.hidden_size

    def _mixer(self, attention: AttentionSpec) -> HeadsSpec:
        norm_values = 0
        if self.head_norm:
            joint = attention.q_width + attention.kv_width
            norm_values = joint if attention.joint_norm else 2 * attention.head_dim
        return HeadsSpec(
            heads=attention.heads,
            kv_heads=attention.kv_heads,
            key_dim=attention.head_dim,
            value_dim=attention.head_dim,
            window=attention.window,
            bias=self.qkv_bias,
            norm_values=norm_values,
        )
