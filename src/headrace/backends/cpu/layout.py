"""How many bytes the CPU backend will allocate, computed beforehand.

Computes the sizes of the layouts in kernels/packed.h, kernels/program.h and kernels/product.h from
tensors' formats and shapes. Reads no tensor and allocates nothing. Tests and a check at every start
make sure that it agrees with what is really allocated.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from headrace.backends.cpu.ops import Prepared, Unloaded, fuse
from headrace.backends.cpu.runner import LOGIT_ROWS
from headrace.backends.shared.recorder import Value, assign_slots, record, slot_values
from headrace.core.errors import UnsupportedModelError
from headrace.models.decoder import DecoderWeights
from headrace.models.spec import ModelSpec
from headrace.weights.dequantize import plain_format
from headrace.weights.weight import Part, Weight

FLOAT_BYTES = 4

# kernels/packed.h
_LANES = 16  # outputs in a block
_RECORD_INPUTS = 64
_SCALE_BYTES = 2
# kernels/program.cpp, kernels/product.cpp and kernels/kernels.h
_QUERIES_TOGETHER = 12
_SHARED_BYTES = 480 << 10
_TILE_ROWS = 6
_MATRIX_ROWS = 16
_GROUP_INPUTS, _GROUP_BYTES = 32, 48
_UNPACKED_GROUP_BYTES = 2 * _LANES * (_GROUP_INPUTS + 2 * FLOAT_BYTES)  # two blocks
_SAMPLER_TOKEN_BYTES = 24  # adjusted logit, row number, weight, candidate


@dataclass(frozen=True, slots=True)
class _Packing:
    """A format as packed: the bits per code, and the factors per group of values."""

    bits: int
    group: int
    factors: int  # a scale, or a scale and a minimum


_QUANTIZED = {
    "Q4_0": _Packing(4, 32, 1),
    "Q4_1": _Packing(4, 32, 2),
    "Q5_0": _Packing(8, 32, 1),
    "Q5_1": _Packing(8, 32, 2),
    "Q8_0": _Packing(8, 32, 1),
    "Q4_K": _Packing(4, 32, 2),
    "Q5_K": _Packing(8, 32, 2),
    "Q6_K": _Packing(8, 16, 1),
}
_FLOATS = {"F32": 4, "F16": 2, "BF16": 2}


def packed_bytes(format_name: str, rows: int, columns: int) -> int:
    """One packed matrix: a stream per 16 outputs, the last one padded."""
    blocks = -(-rows // _LANES)
    if format_name in _FLOATS:
        return blocks * columns * _LANES * _FLOATS[format_name]
    packing = _QUANTIZED.get(format_name)
    if packing is None:
        known = ", ".join((*_FLOATS, *_QUANTIZED))
        raise UnsupportedModelError(
            f"A weight has the format {format_name!r}; the CPU backend supports {known}.",
            "Use a copy of the model in one of these formats.",
        )
    codes = _RECORD_INPUTS * _LANES * packing.bits // 8
    factors = _RECORD_INPUTS // packing.group * _LANES * _SCALE_BYTES * packing.factors
    return blocks * -(-columns // _RECORD_INPUTS) * (codes + factors)


def matrix_bytes(parts: Iterable[Part]) -> int:
    """Tensors stacked by output. Neighbours of the same format are packed as one matrix, unless a
    block of outputs would contain rows of both."""
    runs: list[tuple[str, int, int]] = []  # format, rows, columns
    for part in parts:
        name, (rows, columns) = plain_format(part).name, part.shape
        if runs and runs[-1][0] == name and runs[-1][1] % _LANES == 0:
            runs[-1] = (name, runs[-1][1] + rows, columns)
        else:
            runs.append((name, rows, columns))
    return sum(packed_bytes(*run) for run in runs)


def weight_bytes(weights: DecoderWeights[Weight]) -> int:
    """All weights as the runner will hold them, without the embedding: it stays in the mapped file,
    whose pages the system can reclaim."""
    total = 0

    def count(role: str, weight: Weight) -> None:
        nonlocal total
        if len(weight.parts[0].shape) == 1:
            total += weight.columns * FLOAT_BYTES
        elif role != "embed":
            biases = sum(part.values for part in weight.bias)
            total += matrix_bytes(weight.parts) + biases * FLOAT_BYTES

    weights.map(count)
    return total


def activation_bytes(
    spec: ModelSpec,
    weights: DecoderWeights[Weight],
    threads: int,
    max_batch_tokens: int,
    context_tokens: int,
) -> int:
    """What a program holds for the largest step: a slot for each value that is alive at one time,
    rope tables, attention scores and a tile of rows per thread, and the samplers' lists."""
    slots = sum(
        value.width * (LOGIT_ROWS if value.head else max_batch_tokens)
        for value in _record_slots(spec, weights)
    )
    ropes = {(a.rope.inv_freq, a.rope.scale) for a in spec.attention}
    turns = sum(2 * len(inv_freq) * max_batch_tokens for inv_freq, _ in ropes)
    head_dim = spec.attention[0].head_dim
    scores = _QUERIES_TOGETHER * (head_dim + context_tokens + 2 * _LANES) * threads
    inputs = _padded(_widest_inputs(weights))
    tile = inputs // _GROUP_INPUTS * _GROUP_BYTES * _TILE_ROWS
    quantized = -(-tile // 64) * 64
    made = inputs * _MATRIX_ROWS * FLOAT_BYTES  # a tile's rows before they are quantized
    matrix_tile = inputs // _GROUP_INPUTS * _GROUP_BYTES * _MATRIX_ROWS
    shared = max(_SHARED_BYTES, matrix_tile) + _MATRIX_ROWS * _GROUP_INPUTS
    unpacked = inputs // _GROUP_INPUTS * _UNPACKED_GROUP_BYTES
    scratch = shared + (quantized + made + unpacked) * threads
    samplers = _SAMPLER_TOKEN_BYTES * spec.vocab_size * threads
    return (slots + turns + scores) * FLOAT_BYTES + scratch + samplers


def _record_slots(spec: ModelSpec, weights: DecoderWeights[Weight]) -> list[Value]:
    """Records the decoder with shapes in place of weights; returns one value of each slot."""
    shapes: DecoderWeights[Prepared] = weights.map(
        lambda _, weight: Unloaded(
            weight.rows,
            weight.columns,
            quantized=all(plain_format(part).name in _QUANTIZED for part in weight.parts),
        )
    )
    instructions, _, result = record(spec, shapes)
    return slot_values(assign_slots(fuse(instructions, result), result))


def _widest_inputs(weights: DecoderWeights[Weight]) -> int:
    widest = 0

    def look(role: str, weight: Weight) -> None:
        nonlocal widest
        if role != "embed" and len(weight.parts[0].shape) == 2:
            widest = max(widest, weight.columns)

    weights.map(look)
    return widest


def _padded(inputs: int) -> int:
    return -(-inputs // _RECORD_INPUTS) * _RECORD_INPUTS
