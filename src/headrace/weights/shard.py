"""A rank's share of a model's weights: parts cut by rows without a copy, by columns with one.

Which part is whose is decided by models/sharding.py. A bias of a product whose inputs are divided
is added by the first rank alone, since the ranks' products are summed. A quantized matrix is cut
between its groups; one whose groups would be cut through is refused.
"""

from __future__ import annotations

import zlib
from collections.abc import Iterator
from dataclasses import replace

import numpy as np

from headrace.core.errors import UnsupportedModelError
from headrace.models.decoder import DecoderWeights, LayerWeights
from headrace.models.sharding import Cut, Span, cut_of
from headrace.models.spec import ModelSpec
from headrace.models.stages import Stage
from headrace.weights.dummy import DummyTensor
from headrace.weights.files.mapped import shown
from headrace.weights.methods.quantized import QuantizedMatrix, QuantizedTensor
from headrace.weights.tensor import Tensor
from headrace.weights.weight import Part, Weight


def stage_weights(weights: DecoderWeights[Weight], stage: Stage) -> DecoderWeights[Weight]:
    """What a stage of a pipeline has of the whole model's weights."""
    return DecoderWeights(
        embed=weights.embed if stage.is_first else None,
        layers=weights.layers[stage.first : stage.end],
        final_norm=weights.final_norm if stage.is_last else None,
        head=weights.head if stage.is_last else None,
    )


def share_weights(
    spec: ModelSpec, weights: DecoderWeights[Weight], rank: int, ranks: int
) -> DecoderWeights[Weight]:
    """`spec` is the whole model's, or a stage's."""
    if ranks == 1:
        return weights

    def cut(role: str, weight: Weight, layer: int = 0) -> Weight:
        return cut_weight(weight, cut_of(role, spec, layer, rank, ranks), is_first=rank == 0)

    def cut_layer(number: int, layer: LayerWeights[Weight]) -> LayerWeights[Weight]:
        return layer.map(lambda role, weight: cut(role, weight, number))

    embed = None if weights.embed is None else cut("embed", weights.embed)
    head = embed
    if weights.head is not weights.embed:
        head = None if weights.head is None else cut("head", weights.head)
    return DecoderWeights(
        embed=embed,
        layers=[cut_layer(number, layer) for number, layer in enumerate(weights.layers)],
        final_norm=weights.final_norm,
        head=head,
    )


def cut_weight(weight: Weight, cut: Cut, *, is_first: bool) -> Weight:
    if cut.rows is not None:
        return replace(
            weight,
            parts=tuple(_cut_rows(weight.parts, cut.rows)),
            bias=tuple(_cut_rows(weight.bias, cut.rows)),
        )
    if cut.columns is not None:
        span = cut.columns
        return replace(
            weight,
            parts=tuple(_columns(part, span) for part in weight.parts),
            bias=weight.bias if is_first else (),
        )
    return weight


def _cut_rows(parts: tuple[Part, ...], spans: tuple[Span, ...]) -> Iterator[Part]:
    """The rows of each span, counted over all parts, which are stacked."""
    for first, end in spans:
        start = 0
        for part in parts:
            rows = part.shape[0]
            low, high = max(first - start, 0), min(end - start, rows)
            if low < high:
                yield _rows(part, (low, high))
            start += rows


def _rows(part: Part, span: Span) -> Part:
    first, end = span
    if span == (0, part.shape[0]):
        return part
    shape = (end - first, *part.shape[1:])
    if isinstance(part, Tensor):
        row_bytes = len(part.data) // part.shape[0]
        return replace(part, shape=shape, data=part.data[first * row_bytes : end * row_bytes])
    if isinstance(part, DummyTensor):
        return replace(part, shape=shape, seed=_seed(part, first))
    return _quantized(part, rows=span)


def _columns(part: Part, span: Span) -> Part:
    first, end = span
    rows, columns = part.shape
    if span == (0, columns):
        return part
    if isinstance(part, DummyTensor):
        return replace(part, shape=(rows, end - first), seed=_seed(part, first))
    if isinstance(part, QuantizedTensor):
        return _quantized(part, columns=span)
    size = part.format.block_values
    if first % size or end % size:
        raise _cut_through(part.name, end - first, size)
    stored = np.frombuffer(part.data, np.uint8).reshape(rows, columns // size, -1)
    copy = stored[:, first // size : end // size].tobytes()
    return replace(part, shape=(rows, end - first), data=memoryview(copy))


def _seed(part: DummyTensor, first: int) -> int:
    return zlib.crc32(str(first).encode(), part.seed)


def _quantized(
    part: QuantizedTensor, *, rows: Span | None = None, columns: Span | None = None
) -> QuantizedTensor:
    outs, ins = rows or (0, part.shape[0]), columns or (0, part.shape[1])
    # One scale for a whole row, or for all rows: any part of it has the same.
    row_group = part.group_rows if part.group_rows < part.shape[0] else 1
    column_group = part.group_columns if part.group_columns < part.shape[1] else 1
    for span, group in ((outs, row_group), (ins, column_group)):
        if span[0] % group or span[1] % group:
            raise _cut_through(part.name, span[1] - span[0], group)
    if columns is not None and part.look().permutation is not None:
        raise UnsupportedModelError(
            f"{shown(part.name)}: its inputs are reordered (act-order); such a matrix can't be "
            "divided by its inputs.",
            "Use a copy of the model without act-order (desc_act), or leave --tensor-parallel out.",
        )
    group_rows = part.group_rows if part.group_rows < part.shape[0] else outs[1] - outs[0]
    group_columns = part.group_columns if part.group_columns < part.shape[1] else ins[1] - ins[0]

    def decode() -> QuantizedMatrix:
        whole = part.unpack()
        groups = (_groups(outs, part.group_rows), _groups(ins, part.group_columns))

        codes = whole.codes[outs[0] : outs[1], ins[0] : ins[1]]
        return replace(
            whole,
            codes=codes.copy(order="C"),
            scales=whole.scales[groups].copy(order="C"),
            zeros=None if whole.zeros is None else whole.zeros[groups].copy(order="C"),
            group_rows=group_rows,
            group_columns=group_columns,
        )

    return replace(
        part,
        shape=(outs[1] - outs[0], ins[1] - ins[0]),
        group_rows=group_rows,
        group_columns=group_columns,
        decode=decode,
    )


def _groups(span: Span, size: int) -> slice:
    return slice(span[0] // size, -(-span[1] // size))


def _cut_through(name: str, share: int, group: int) -> UnsupportedModelError:
    return UnsupportedModelError(
        f"{shown(name)}: a rank would have {share} of its values, in groups of {group} that share "
        "a scale; expected whole groups.",
        "Set --tensor-parallel to a smaller number, or use a copy in BF16.",
    )
