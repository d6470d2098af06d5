"""What one sequence keeps in memory: keys and values that grow with its tokens, and recurrent state
that does not.

Formulas over a model's layers. Knows no blocks, pools or pages: how an engine rounds these up is
its own matter.
"""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING

from headrace.core.errors import ConfigError
from headrace.models.layers import CompressedSpec, HeadsSpec, LatentSpec, Mixer, RecurrentSpec

if TYPE_CHECKING:
    from headrace.models.spec import ModelSpec

# Index keys are kept as FP8 with a float32 scale for each 128, whatever the KV type is: so do vLLM
# (its DeepseekV32IndexerCache) and SGLang.
_INDEX_VALUE_BYTES = 1
_INDEX_SCALE_BYTES = 4
_INDEX_GROUP = 128

STATE_VALUE_BYTES = 4  # recurrent states are float32: Qwen's and Nemotron's configs ask for it
CONV_VALUE_BYTES = 2


def kv_bytes(
    spec: ModelSpec,
    tokens: int,
    value_bytes: float,
    *,
    keeps_windows: bool,
    tp: int = 1,
) -> int:
    """Bytes of one sequence of `tokens`, on one of `tp` ranks.

    keeps_windows: a layer with a window keeps only its window, as engines with a pool per kind of
    layer do. Otherwise it keeps every token, as this engine does. Key/value heads are divided among
    ranks, and kept by several where there are fewer heads than ranks; a latent is kept by each.
    """
    total = 0.0
    for layer, times in Counter(spec.layer_specs).items():
        values = kept_values(layer.mixer, tokens, keeps_windows=keeps_windows, tp=tp)
        total += times * (values * value_bytes + index_bytes(layer.mixer, tokens))
    return int(total)


def state_bytes(spec: ModelSpec, *, tp: int = 1) -> int:
    """Bytes of one sequence's recurrent state and convolution inputs, on one of `tp` ranks; they do
    not grow with its tokens."""
    total = 0
    for layer in spec.layer_specs:
        if isinstance(layer.mixer, RecurrentSpec):
            state = layer.mixer.state_values * STATE_VALUE_BYTES
            conv = layer.mixer.conv_values * CONV_VALUE_BYTES
            total += _share(state, tp, "state values") + _share(conv, tp, "convolution values")
    return total


def kv_layers(spec: ModelSpec) -> int:
    """How many layers keep keys and values (or a latent) at all."""
    return sum(kept_values(layer.mixer, 1, keeps_windows=True) > 0 for layer in spec.layer_specs)


def kept_values(mixer: Mixer | None, tokens: int, *, keeps_windows: bool, tp: int = 1) -> int:
    """Values that a layer keeps of one sequence of `tokens`, without index keys."""
    match mixer:
        case HeadsSpec():
            if not mixer.own_kv:
                return 0
            kept = min(tokens, mixer.window) if keeps_windows and mixer.window else tokens
            return kv_heads_of_rank(mixer.kv_heads, tp) * (mixer.key_dim + mixer.value_dim) * kept
        case LatentSpec():
            return mixer.kept_values * tokens
        case CompressedSpec():
            # The entries are what the model keeps in place of tokens: windowed in any engine.
            entries = tokens // mixer.ratio if mixer.ratio else 0
            return mixer.head_dim * (min(tokens, mixer.window) + entries)
        case _:
            return 0


def values_per_token(mixer: Mixer | None) -> float:
    """Values that each further token adds to a layer, all tokens kept; without index keys."""
    if isinstance(mixer, CompressedSpec):
        return mixer.head_dim / mixer.ratio if mixer.ratio else 0.0
    return kept_values(mixer, 1, keeps_windows=False)


def index_bytes(mixer: Mixer | None, tokens: int) -> int:
    """Bytes of a layer's index keys of one sequence, on each rank."""
    index = None if mixer is None or isinstance(mixer, RecurrentSpec) else mixer.index
    if index is None or not index.makes_keys:
        return 0
    keys = tokens // mixer.ratio if isinstance(mixer, CompressedSpec) else tokens
    scales = -(-index.dim // _INDEX_GROUP) * _INDEX_SCALE_BYTES
    return keys * (index.dim * _INDEX_VALUE_BYTES + scales)


def kv_heads_of_rank(kv_heads: int, tp: int) -> int:
    """Key/value heads that one rank keeps: a share, or one where there are fewer than ranks."""
    if kv_heads % tp and tp % kv_heads:
        works = [ranks for ranks in range(1, tp) if kv_heads % ranks == 0 or ranks % kv_heads == 0]
        raise ConfigError(
            f"Tensor parallelism over {tp} ranks does not divide {kv_heads} key/value heads.",
            f"Use {works[-1]} ranks.",
            param="tp",
        )
    return max(1, kv_heads // tp)


def _share(amount: int, tp: int, what: str) -> int:
    if amount % tp:
        raise ConfigError(
            f"Tensor parallelism over {tp} ranks does not divide {amount} {what}.",
            "Use a power of two of ranks.",
            param="tp",
        )
    return amount // tp
