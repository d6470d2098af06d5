"""One layer of a decoder in numbers, for models that are counted but perhaps not served: attention
with heads, latent and compressed attention, recurrent mixers, MLPs and experts.

Describes shapes only. What they weigh is in matrices.py, what they keep per sequence in kv.py, and
what a step of them costs in counting.py. No kernel runs these: a served model has AttentionSpecs.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class IndexSpec:
    """A small scorer beside attention that chooses which keys each query sees (DeepSeek V3.2's
    lightning indexer, MiniMax M3's block index)."""

    heads: int
    dim: int  # values of an index key: one is kept for each token (or compressed entry)
    top: int  # keys (or entries) that a query sees at most
    query_columns: int  # what index queries are made of: the query's low rank, or the hidden state
    weighted: bool = True  # a further matrix gives each index head its weight
    norm_values: int = 0
    makes_keys: bool = True  # False: this layer uses the choice of an earlier one (GLM 5.2)


@dataclass(frozen=True, slots=True, kw_only=True)
class HeadsSpec:
    """Attention with query and key/value heads: MHA, GQA or MQA."""

    heads: int
    kv_heads: int
    key_dim: int
    value_dim: int
    window: int | None = None  # a token sees itself and the window - 1 before it
    bias: bool = False  # of queries, keys and values
    out_bias: bool = False
    gate_rows: int = 0  # an output gate made from the hidden state: one row a value, or a head
    sinks: bool = False  # a learned score per head that takes part in the softmax
    norm_values: int = 0  # weights of query and key norms
    own_kv: bool = True  # False: reads the keys and values of an earlier layer (Gemma 3n)
    keys_are_values: bool = False  # values come from the key projection (Gemma 4); both are kept
    index: IndexSpec | None = None

    @property
    def q_width(self) -> int:
        return self.heads * self.key_dim

    @property
    def k_width(self) -> int:
        return self.kv_heads * self.key_dim

    @property
    def v_width(self) -> int:
        return self.kv_heads * self.value_dim

    @property
    def out_width(self) -> int:
        return self.heads * self.value_dim


@dataclass(frozen=True, slots=True, kw_only=True)
class LatentSpec:
    """Multi-head latent attention (DeepSeek V2 and later): a token keeps one compressed vector and
    one rotated key, which all heads share."""

    heads: int
    q_rank: int | None  # None: queries are made from the hidden state at once
    kv_rank: int
    rope_dim: int
    nope_dim: int
    value_dim: int
    bias: bool = False  # of the two projections to low ranks
    gate_rows: int = 0
    index: IndexSpec | None = None

    @property
    def key_dim(self) -> int:
        return self.nope_dim + self.rope_dim

    @property
    def out_width(self) -> int:
        return self.heads * self.value_dim

    @property
    def kept_values(self) -> int:
        """Per token."""
        return self.kv_rank + self.rope_dim


@dataclass(frozen=True, slots=True, kw_only=True)
class CompressedSpec:
    """DeepSeek V4: one shared key/value head; a query sees a window of tokens and, beyond it,
    entries that stand for `ratio` tokens each (all of them, or those that an index chooses)."""

    heads: int
    head_dim: int
    q_rank: int
    out_groups: int
    out_rank: int
    window: int
    ratio: int = 0  # 0: the window alone
    overlap: int = 1  # 2: an entry is made from its own tokens and those of the one before it
    index: IndexSpec | None = None

    @property
    def out_width(self) -> int:
        return self.heads * self.head_dim


@dataclass(frozen=True, slots=True, kw_only=True)
class RecurrentSpec:
    """A mixer that keeps a state of fixed size per sequence instead of keys and values: Mamba 2,
    gated delta net, Kimi delta attention."""

    kind: str  # "mamba2", "gated_delta", "kda"
    heads: int
    in_rows: int  # all projections from the hidden state
    out_width: int
    low_rank: int = 0  # gates made over a low rank: so many values between,
    low_rank_gates: int = 0  # and so many gates of out_width
    conv_channels: int
    conv_kernel: int
    conv_bias: bool = False
    state_values: int
    state_flops: int  # a token, for each value of the state
    vector_values: int = 0  # decay, time step and norm weights

    @property
    def conv_values(self) -> int:
        """Per sequence: the inputs that the convolution still needs."""
        return self.conv_channels * (self.conv_kernel - 1)


Mixer = HeadsSpec | LatentSpec | CompressedSpec | RecurrentSpec


@dataclass(frozen=True, slots=True, kw_only=True)
class MlpSpec:
    width: int
    gated: bool = True  # gate and up, or up alone (Nemotron's squared ReLU)
    bias: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class ExpertsSpec:
    """Experts of which each token uses `active`, and those that all tokens share."""

    count: int
    active: int
    width: int  # of one expert
    gated: bool = True
    bias: bool = False
    router_bias: bool = False
    shared_width: int = 0  # all shared experts together
    shared_gate: bool = False  # Qwen: a weight of the shared expert, made from the hidden state
    latent: int | None = None  # experts work at this width, between two projections (Nemotron 3)
    vector_values: int = 0  # norms and scales of their own


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerSpec:
    """What one layer does: mix tokens, then an MLP, experts, or both; any of them may be absent."""

    mixer: Mixer | None = None
    mlp: MlpSpec | None = None
    experts: ExpertsSpec | None = None
    norms: int = 2  # norms of the hidden state
    streams: int = 1  # residual streams, joined by learned weights (DeepSeek V4's are 4)
