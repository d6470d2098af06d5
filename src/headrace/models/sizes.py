"""The sizes of a model's weights for counting, from its ModelSpec and a precision: for models of
which no file is at hand.
"""

from __future__ import annotations

from headrace.models.counted_layers import StackLayer, StackWeights, join
from headrace.models.counting_ops import WeightSize
from headrace.models.decoder import DecoderWeights, LayerWeights
from headrace.models.gguf_mixtures import Place
from headrace.models.layers import LayerSpec
from headrace.models.matrices import Matrix, Part, layer_matrices, layer_vectors
from headrace.models.precision import Precision, place_of, table_matrices
from headrace.models.spec import AttentionSpec, ModelSpec

_NOT_INTO_MIXER = ("attn_out", "out_down")


def size_spec(spec: ModelSpec, precision: Precision) -> DecoderWeights[WeightSize] | StackWeights:
    """Weights as count_step takes them."""
    if spec.stack:
        return _stack(spec, precision)
    embed, head = _tables(spec, precision)
    return DecoderWeights(
        embed=embed,
        layers=[
            _plain_layer(spec, precision, number, attention, layer)
            for number, (attention, layer) in enumerate(
                zip(spec.attention, spec.layer_specs, strict=True)
            )
        ],
        final_norm=_vector(spec.hidden_size, precision),
        head=head,
    )


def _tables(spec: ModelSpec, precision: Precision) -> tuple[WeightSize, WeightSize]:
    tables = [_size(matrix, precision, place_of(spec)) for matrix in table_matrices(spec)]
    return tables[0], tables[-1]


def _size(matrix: Matrix, precision: Precision, place: Place) -> WeightSize:
    form = precision.format_of(matrix, place)
    size = form.value_bytes(matrix.rows, matrix.columns)
    size += form.scale_bytes(matrix.rows, matrix.columns)
    bias = matrix.rows * precision.vector_bytes if matrix.bias else 0
    return WeightSize(matrix.rows, matrix.columns, size, bias, matrix.copies)


def _vector(values: int, precision: Precision) -> WeightSize:
    return WeightSize(1, values, values * precision.vector_bytes)


def _named(
    spec: ModelSpec, precision: Precision, number: int, layer: LayerSpec
) -> dict[str, WeightSize]:
    place = place_of(spec, number, layer)
    matrices = layer_matrices(layer, spec.hidden_size)
    return {matrix.name: _size(matrix, precision, place) for matrix in matrices}


def _plain_layer(
    spec: ModelSpec,
    precision: Precision,
    number: int,
    attention: AttentionSpec,
    layer: LayerSpec,
) -> LayerWeights[WeightSize]:
    named = _named(spec, precision, number, layer)
    norm = _vector(spec.hidden_size, precision)
    heads = (attention.heads, attention.kv_heads) if attention.joint_norm else (1, 1)
    q_norm, k_norm = (_vector(count * attention.head_dim, precision) for count in heads)
    return LayerWeights(
        attn_norm=norm if spec.pre_norms else None,
        qkv=join([named["q"], named["k"], named["v"]]),
        attn_out=named["attn_out"],
        mlp_norm=norm if spec.pre_norms else None,
        gate_up=join([named["mlp_gate"], named["mlp_up"]]),
        down=named["mlp_down"],
        q_norm=q_norm if spec.head_norm else None,
        k_norm=k_norm if spec.head_norm else None,
        attn_post_norm=norm if spec.post_norms else None,
        mlp_post_norm=norm if spec.post_norms else None,
    )


def _stack(spec: ModelSpec, precision: Precision) -> StackWeights:
    embed, head = _tables(spec, precision)
    streams = spec.stack[-1].streams
    joined = None
    if streams > 1:
        values = streams * streams * spec.hidden_size + streams + 1
        joined = WeightSize(streams, streams * spec.hidden_size, values * precision.vector_bytes)
    return StackWeights(
        embed=embed,
        layers=tuple(
            _stack_layer(spec, precision, number, layer) for number, layer in enumerate(spec.stack)
        ),
        final_norm=_vector(spec.hidden_size, precision),
        head=head,
        joined_streams=joined,
    )


def _stack_layer(
    spec: ModelSpec, precision: Precision, number: int, layer: LayerSpec
) -> StackLayer:
    named = _named(spec, precision, number, layer)
    into: dict[int, list[WeightSize]] = {}
    for matrix in layer_matrices(layer, spec.hidden_size):
        if matrix.part is Part.ATTENTION and matrix.name not in _NOT_INTO_MIXER:
            into.setdefault(matrix.columns, []).append(named[matrix.name])
    vectors = layer_vectors(layer, spec.hidden_size) * precision.vector_bytes
    return StackLayer(
        matrices=named,
        mixer_in=tuple(join(parts) for parts in into.values()),
        vector_bytes=vectors,
    )
