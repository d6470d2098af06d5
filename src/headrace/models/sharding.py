"""One model in equal shares, for ranks that compute together: which part of each weight is whose.

Attention is divided by heads, the MLP by its intermediate values, embedding and output layer by
tokens of the vocabulary: each rank computes whole heads, and what comes out of attention, MLP and
embedding is summed over the ranks. With fewer key and value heads than ranks, several ranks have
the same ones. Norms are whole on every rank. Rules are by a weight's role; the decoder only asks
for the sums. Numbers only: no arrays, no files.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from itertools import pairwise

from headrace.models.kv import kv_heads_of_rank
from headrace.models.precision import check_tp, find_precision
from headrace.models.spec import AttentionSpec, ModelSpec

VOCAB_ROWS = 64  # shares of the vocabulary begin at a multiple of this: kernels like even sizes

Span = tuple[int, int]  # first, end


@dataclass(frozen=True, slots=True, kw_only=True)
class Cut:
    """The part of a weight that a rank has: some rows, or some columns; both None: all of it."""

    rows: tuple[Span, ...] | None = None
    columns: Span | None = None


WHOLE = Cut()


def share_of(spec: ModelSpec, ranks: int) -> ModelSpec:
    """The model as each rank computes it. Raises ConfigError if it can't be divided."""
    if ranks == 1:
        return spec
    check_tp(spec, find_precision("bf16"), ranks)
    return replace(
        spec,
        attention=tuple(
            replace(
                each, heads=each.heads // ranks, kv_heads=kv_heads_of_rank(each.kv_heads, ranks)
            )
            for each in spec.attention
        ),
        intermediate_size=spec.intermediate_size // ranks,
        ranks=ranks,
    )


def cut_of(role: str, spec: ModelSpec, layer: int, rank: int, ranks: int) -> Cut:
    """The part of a weight of the whole model `spec` that `rank` has. `role` is a field of
    DecoderWeights or LayerWeights; `layer` is not looked at for those of the former."""
    if role in ("embed", "head"):
        return Cut(rows=(vocab_spans(spec.vocab_size, ranks)[rank],))
    if role == "final_norm":
        return WHOLE
    attention, width = spec.attention[layer], spec.intermediate_size // ranks
    inner = (rank * width, (rank + 1) * width)
    queries, keys = _query_span(attention, rank, ranks), _key_span(attention, rank, ranks)
    if role == "qkv":
        q, kv = attention.q_width, attention.kv_width
        return Cut(rows=(queries, _moved(keys, q), _moved(keys, q + kv)))
    if role == "gate_up":
        return Cut(rows=(inner, _moved(inner, spec.intermediate_size)))
    if role == "attn_out":
        return Cut(columns=queries)
    if role == "down":
        return Cut(columns=inner)
    if attention.joint_norm and role in ("q_norm", "k_norm"):
        return Cut(rows=(queries if role == "q_norm" else keys,))
    return WHOLE


def vocab_spans(vocab_size: int, ranks: int) -> list[Span]:
    """Each rank's tokens of the vocabulary: none is left without any."""
    edges = [rank * vocab_size // ranks for rank in range(ranks + 1)]
    if vocab_size >= ranks * ranks * VOCAB_ROWS:
        each = -(-vocab_size // (ranks * VOCAB_ROWS)) * VOCAB_ROWS
        edges = [min(rank * each, vocab_size) for rank in range(ranks + 1)]
    return list(pairwise(edges))


def _query_span(attention: AttentionSpec, rank: int, ranks: int) -> Span:
    width = attention.q_width // ranks
    return rank * width, (rank + 1) * width


def _key_span(attention: AttentionSpec, rank: int, ranks: int) -> Span:
    """Keys' rows; values are divided in the same way."""
    heads = kv_heads_of_rank(attention.kv_heads, ranks)
    first = rank * attention.kv_heads // ranks
    return first * attention.head_dim, (first + heads) * attention.head_dim


def _moved(span: Span, by: int) -> Span:
    return span[0] + by, span[1] + by
