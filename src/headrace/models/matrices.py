"""The weight matrices of a layer, as a list: rows, columns, what they are part of, and along which
side tensor parallelism divides them.

Parameters, weight bytes and the counted products all follow from this list. Knows no precision, no
tensor names and no machine.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from enum import StrEnum

from headrace.models.layers import (
    CompressedSpec,
    ExpertsSpec,
    HeadsSpec,
    IndexSpec,
    LatentSpec,
    LayerSpec,
    MlpSpec,
    RecurrentSpec,
)


class Part(StrEnum):
    EMBEDDING = "embedding"
    ATTENTION = "attention"  # and recurrent mixers
    MLP = "mlp"  # and shared experts
    EXPERTS = "experts"
    ROUTER = "router"
    OUTPUT = "output"


class Split(StrEnum):
    """How ranks share a matrix."""

    WHOLE = "whole"  # each rank has all of it
    ROWS = "rows"  # each has some of the outputs
    COLUMNS = "columns"  # each has some of the inputs


@dataclass(frozen=True, slots=True, kw_only=True)
class Matrix:
    name: str
    part: Part
    rows: int
    columns: int
    copies: int = 1  # one for each expert
    bias: bool = False
    split: Split = Split.WHOLE
    units: int = 1  # what is divided among ranks: heads, values of the width, ...
    unit_name: str = ""  # as an error names them
    repeats: bool = False  # fewer units than ranks: each is kept by several ranks

    @property
    def values(self) -> int:
        return self.copies * self.rows * self.columns

    @property
    def bias_values(self) -> int:
        return self.copies * self.rows if self.bias else 0


def layer_matrices(layer: LayerSpec, hidden: int) -> tuple[Matrix, ...]:
    return tuple(_layer_matrices(layer, hidden))


def layer_vectors(layer: LayerSpec, hidden: int) -> int:
    """Values of norms, scales and the like (not of biases)."""
    values = layer.norms * hidden
    match layer.mixer:
        case HeadsSpec() as heads:
            values += heads.norm_values + (heads.heads if heads.sinks else 0)
            values += _index_vectors(heads.index)
        case LatentSpec() as latent:
            values += latent.kv_rank + (latent.q_rank or 0) + _index_vectors(latent.index)
        case CompressedSpec() as compressed:
            values += compressed.q_rank + compressed.head_dim + compressed.heads
            if compressed.ratio:  # a position bias and a norm of the compressor, and of the index
                width = compressed.overlap * compressed.head_dim
                values += compressed.ratio * width + compressed.head_dim
            if compressed.index:
                width = compressed.overlap * compressed.index.dim
                values += compressed.ratio * width + compressed.index.dim
        case RecurrentSpec() as recurrent:
            kernel = recurrent.conv_kernel + (1 if recurrent.conv_bias else 0)
            values += recurrent.conv_channels * kernel + recurrent.vector_values
    if layer.experts is not None:
        values += layer.experts.vector_values
    if layer.streams > 1:
        values += 2 * (_stream_weights(layer.streams) + 3)
    return values


def _stream_weights(streams: int) -> int:
    """What joins residual streams: a weight into and out of each, and one for each pair."""
    return (2 + streams) * streams


def _index_vectors(index: IndexSpec | None) -> int:
    return 0 if index is None or not index.makes_keys else index.norm_values


def _layer_matrices(layer: LayerSpec, hidden: int) -> Iterator[Matrix]:
    match layer.mixer:
        case HeadsSpec() as heads:
            yield from _heads(heads, hidden)
        case LatentSpec() as latent:
            yield from _latent(latent, hidden)
        case CompressedSpec() as compressed:
            yield from _compressed(compressed, hidden)
        case RecurrentSpec() as recurrent:
            yield from _recurrent(recurrent, hidden)
    if layer.mlp is not None:
        yield from _mlp(layer.mlp, hidden)
    if layer.experts is not None:
        yield from _experts(layer.experts, hidden)
    if layer.streams > 1:
        rows, columns = _stream_weights(layer.streams), layer.streams * hidden
        yield Matrix(name="mixer_streams", part=Part.ROUTER, rows=rows, columns=columns)
        yield Matrix(name="mlp_streams", part=Part.ROUTER, rows=rows, columns=columns)


def _mixer(
    name: str, rows: int, columns: int, split: Split = Split.WHOLE, heads: int = 1,
    *, bias: bool = False,
) -> Matrix:  # fmt: skip
    """A matrix that is divided by attention heads, if at all."""
    return Matrix(
        name=name, part=Part.ATTENTION, rows=rows, columns=columns, bias=bias, split=split,
        units=heads, unit_name="attention heads",
    )  # fmt: skip


def _heads(mixer: HeadsSpec, hidden: int) -> Iterator[Matrix]:
    yield _mixer("q", mixer.q_width, hidden, Split.ROWS, mixer.heads, bias=mixer.bias)
    if mixer.gate_rows:
        yield _mixer("gate", mixer.gate_rows, hidden, Split.ROWS, mixer.heads)
    if mixer.own_kv:
        kept = [("k", mixer.k_width)]
        if not mixer.keys_are_values:
            kept.append(("v", mixer.v_width))
        for name, rows in kept:
            yield Matrix(
                name=name, part=Part.ATTENTION, rows=rows, columns=hidden, bias=mixer.bias,
                split=Split.ROWS, units=mixer.kv_heads, unit_name="key/value heads", repeats=True,
            )  # fmt: skip
    yield _mixer(
        "attn_out", hidden, mixer.out_width, Split.COLUMNS, mixer.heads, bias=mixer.out_bias
    )
    yield from _index(mixer.index, hidden)


def _latent(mixer: LatentSpec, hidden: int) -> Iterator[Matrix]:
    q_width = mixer.heads * mixer.key_dim
    if mixer.q_rank is None:
        yield _mixer("q", q_width, hidden, Split.ROWS, mixer.heads)
    else:
        yield _mixer("q_down", mixer.q_rank, hidden, bias=mixer.bias)
        yield _mixer("q_up", q_width, mixer.q_rank, Split.ROWS, mixer.heads)
    if mixer.gate_rows:
        yield _mixer("gate", mixer.gate_rows, hidden, Split.ROWS, mixer.heads)
    yield _mixer("kv_down", mixer.kept_values, hidden, bias=mixer.bias)
    kv_width = mixer.heads * (mixer.nope_dim + mixer.value_dim)
    yield _mixer("kv_up", kv_width, mixer.kv_rank, Split.ROWS, mixer.heads)
    yield _mixer("attn_out", hidden, mixer.out_width, Split.COLUMNS, mixer.heads, bias=mixer.bias)
    yield from _index(mixer.index, hidden)


def _compressed(mixer: CompressedSpec, hidden: int) -> Iterator[Matrix]:
    yield _mixer("q_down", mixer.q_rank, hidden)
    yield _mixer("q_up", mixer.out_width, mixer.q_rank, Split.ROWS, mixer.heads)
    yield _mixer("kv", mixer.head_dim, hidden)
    groups = mixer.out_groups
    yield Matrix(
        name="out_down", part=Part.ATTENTION, rows=groups * mixer.out_rank,
        columns=mixer.out_width // groups, split=Split.ROWS, units=groups,
        unit_name="groups of the output projection",
    )  # fmt: skip
    yield Matrix(
        name="attn_out", part=Part.ATTENTION, rows=hidden, columns=groups * mixer.out_rank,
        split=Split.COLUMNS, units=groups, unit_name="groups of the output projection",
    )  # fmt: skip
    if mixer.ratio:
        width = mixer.overlap * mixer.head_dim
        yield _mixer("compress_kv", width, hidden)
        yield _mixer("compress_gate", width, hidden)
    if mixer.index:
        width = mixer.overlap * mixer.index.dim
        yield _mixer("index_k", width, hidden)
        yield _mixer("index_gate", width, hidden)
        yield _mixer("index_q", mixer.index.heads * mixer.index.dim, mixer.index.query_columns)
        yield _mixer("index_weights", mixer.index.heads, hidden)


def _index(index: IndexSpec | None, hidden: int) -> Iterator[Matrix]:
    if index is None or not index.makes_keys:
        return
    yield _mixer("index_q", index.heads * index.dim, index.query_columns)
    yield _mixer("index_k", index.dim, hidden)
    if index.weighted:
        yield _mixer("index_weights", index.heads, hidden)


def _recurrent(mixer: RecurrentSpec, hidden: int) -> Iterator[Matrix]:
    yield _mixer("mixer_in", mixer.in_rows, hidden, Split.ROWS, mixer.heads)
    for gate in range(mixer.low_rank_gates):
        yield _mixer(f"gate{gate}_down", mixer.low_rank, hidden)
        yield _mixer(f"gate{gate}_up", mixer.out_width, mixer.low_rank, Split.ROWS, mixer.heads)
    yield _mixer("attn_out", hidden, mixer.out_width, Split.COLUMNS, mixer.heads)


def _mlp(mlp: MlpSpec, hidden: int, name: str = "") -> Iterator[Matrix]:
    for part in ("gate", "up") if mlp.gated else ("up",):
        yield Matrix(
            name=f"{name}mlp_{part}", part=Part.MLP, rows=mlp.width, columns=hidden, bias=mlp.bias,
            split=Split.ROWS, units=mlp.width, unit_name="values of the MLP's width",
        )  # fmt: skip
    yield Matrix(
        name=f"{name}mlp_down", part=Part.MLP, rows=hidden, columns=mlp.width, bias=mlp.bias,
        split=Split.COLUMNS, units=mlp.width, unit_name="values of the MLP's width",
    )  # fmt: skip


def _experts(experts: ExpertsSpec, hidden: int) -> Iterator[Matrix]:
    yield Matrix(
        name="router", part=Part.ROUTER, rows=experts.count, columns=hidden,
        bias=experts.router_bias,
    )  # fmt: skip
    inner = hidden if experts.latent is None else experts.latent
    for part in ("gate", "up") if experts.gated else ("up",):
        yield Matrix(
            name=f"experts_{part}", part=Part.EXPERTS, rows=experts.width, columns=inner,
            copies=experts.count, bias=experts.bias, split=Split.ROWS, units=experts.width,
            unit_name="values of an expert's width",
        )  # fmt: skip
    yield Matrix(
        name="experts_down", part=Part.EXPERTS, rows=inner, columns=experts.width,
        copies=experts.count, bias=experts.bias, split=Split.COLUMNS, units=experts.width,
        unit_name="values of an expert's width",
    )  # fmt: skip
    if experts.latent is not None:
        yield Matrix(name="latent_in", part=Part.MLP, rows=inner, columns=hidden)
        yield Matrix(name="latent_out", part=Part.MLP, rows=hidden, columns=inner)
    if experts.shared_width:
        shared = MlpSpec(width=experts.shared_width, gated=experts.gated, bias=experts.bias)
        yield from _mlp(shared, hidden, "shared_")
    if experts.shared_gate:
        yield Matrix(name="shared_gate", part=Part.ROUTER, rows=1, columns=hidden)
