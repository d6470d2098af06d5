"""Tensors as float32 arrays: the meaning of every format, written plainly in numpy.

The reference backend computes with these values and every kernel is tested against them. Speed is
not the aim; memory is bounded by processing a tensor piece by piece.

`b` are blocks as bytes, [n, block_bytes]; each decoder returns [n, block_values]. Scales are
multiplied in the order in which the format defines them, in float32, so results are exact.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
from numpy.typing import NDArray

from headrace.core.errors import UnsupportedModelError
from headrace.weights.dummy import DummyTensor, dummy_values
from headrace.weights.files.mapped import shown
from headrace.weights.methods.quantized import QuantizedTensor, value_rows
from headrace.weights.tensor import FORMATS, Tensor, TensorFormat
from headrace.weights.weight import Part

Bytes = NDArray[np.uint8]
Floats = NDArray[np.float32]

_PIECE_VALUES = 1 << 20


def dequantize(part: Part) -> Floats:
    """All values, in the part's shape."""
    if isinstance(part, QuantizedTensor):
        return _dequantize_matrix(part)
    if isinstance(part, DummyTensor):
        return dummy_values(part)
    return dequantize_plain(part)


def dequantize_plain(tensor: Tensor) -> Floats:
    """All values of a tensor that is not part of a quantized matrix."""
    return _decode(tensor, _blocks(tensor)).reshape(tensor.shape)


def plain_format(part: Part) -> TensorFormat:
    """The format of what `plain_tensor` returns."""
    return FORMATS["F16"] if isinstance(part, QuantizedTensor) else part.format


def plain_tensor(part: Part) -> Tensor:
    """The part as one tensor, for a backend that supports nothing else: a quantized matrix in F16,
    the precision of its method and scales; a dummy one in BF16."""
    if isinstance(part, Tensor):
        return part
    values = dequantize(part)
    if isinstance(part, DummyTensor):
        raw = (values.view(np.uint32) >> 16).astype("<u2")
    else:
        with np.errstate(over="ignore"):
            raw = values.astype("<f2")
        if not np.isfinite(raw).all():
            raise UnsupportedModelError(
                f"tensor {shown(part.name)}: found a value of {np.abs(values).max():g}; the CPU "
                f"backend converts {part.format.name} to F16, which holds up to 65504.",
                "Use a copy of the model in BF16 or F32, or --device reference.",
            )
    data = raw.reshape(-1).view(np.uint8).data.toreadonly()
    return Tensor(part.name, plain_format(part), part.shape, data)


def _dequantize_matrix(tensor: QuantizedTensor) -> Floats:
    matrix = tensor.unpack()
    outputs, inputs = tensor.shape
    out = np.empty((outputs, inputs), np.float32)
    step = max(1, _PIECE_VALUES // inputs)
    with np.errstate(invalid="ignore", over="ignore"):
        for first in range(0, outputs, step):
            end = min(first + step, outputs)
            out[first:end] = value_rows(matrix, first, end)
    return out


def dequantize_rows(tensor: Tensor, rows: Sequence[int] | NDArray[np.integer]) -> Floats:
    """Some rows of the first axis, in the given order: [len(rows), *shape[1:]]"""
    by_row = _blocks(tensor).reshape(tensor.shape[0], -1, tensor.format.block_bytes)
    chosen = by_row[np.asarray(rows, dtype=np.intp)].reshape(-1, tensor.format.block_bytes)
    return _decode(tensor, chosen).reshape(len(rows), *tensor.shape[1:])


def _blocks(tensor: Tensor) -> Bytes:
    return np.frombuffer(tensor.data, np.uint8).reshape(-1, tensor.format.block_bytes)


def _decode(tensor: Tensor, blocks: Bytes) -> Floats:
    decode = _DECODERS[tensor.format.name]
    out = np.empty((len(blocks), tensor.format.block_values), np.float32)
    step = _PIECE_VALUES // tensor.format.block_values
    # A file may hold infinities: no warnings for those.
    with np.errstate(invalid="ignore", over="ignore"):
        for start in range(0, len(blocks), step):
            out[start : start + step] = decode(blocks[start : start + step])
    return out


def _halves(b: Bytes) -> Floats:
    """Pairs of bytes as float16: [n, 2k] -> [n, k]"""
    return np.ascontiguousarray(b).view("<f2").astype(np.float32)


def _nibbles(b: Bytes) -> Bytes:
    """Low halves, then high halves: [..., k] -> [..., 2k]"""
    return np.concatenate([b & 15, b >> 4], axis=-1)


def _f32(b: Bytes) -> Floats:
    return np.ascontiguousarray(b).view("<f4")


def _bf16(b: Bytes) -> Floats:
    upper = np.ascontiguousarray(b).view("<u2").astype(np.uint32)
    return (upper << 16).view(np.float32)


def _q8_0(b: Bytes) -> Floats:
    """scale | 32 signed bytes"""
    return b[:, 2:].view(np.int8) * _halves(b[:, :2])


def _q4_0(b: Bytes) -> Floats:
    """scale | 16 bytes of nibbles, 8 is zero"""
    return (_nibbles(b[:, 2:]).astype(np.float32) - 8) * _halves(b[:, :2])


def _q4_1(b: Bytes) -> Floats:
    """scale, minimum | 16 bytes of nibbles"""
    head = _halves(b[:, :4])
    return _nibbles(b[:, 4:]) * head[:, :1] + head[:, 1:]


def _fives(high: Bytes, low: Bytes) -> Bytes:
    """Four bytes with a fifth bit for each of 16 bytes of nibbles -> [n, 32] of 0..31"""
    bits: Bytes = np.unpackbits(high, axis=-1, bitorder="little")
    return _nibbles(low) | bits << np.uint8(4)


def _q5_0(b: Bytes) -> Floats:
    """scale | fifth bits | nibbles, 16 is zero"""
    return (_fives(b[:, 2:6], b[:, 6:]).astype(np.float32) - 16) * _halves(b[:, :2])


def _q5_1(b: Bytes) -> Floats:
    """scale, minimum | fifth bits | nibbles"""
    head = _halves(b[:, :4])
    return _fives(b[:, 4:8], b[:, 8:]) * head[:, :1] + head[:, 1:]


def _k_scales(b: Bytes) -> tuple[Floats, Floats]:
    """The 16 bytes that open a Q4_K or Q5_K block -> scales and minimums of its 8 runs of 32.

        scale of scales, scale of minimums | s0..s3 | m0..m3 | low nibbles of s4..s7, high of m4..m7

    s and m have six bits; bits 4 and 5 of number j + 4 are the top two bits of byte j.
    """
    head = _halves(b[:, :4])
    s, m, rest = b[:, 4:8], b[:, 8:12], b[:, 12:16]
    scales = np.concatenate([s & 63, rest & 15 | s >> 6 << 4], axis=1)
    minimums = np.concatenate([m & 63, rest >> 4 | m >> 6 << 4], axis=1)
    return head[:, :1] * scales, head[:, 1:] * minimums


def _q4_k(b: Bytes) -> Floats:
    """scales | 4 x 32 bytes, whose low nibbles are one run of 32 and high nibbles the next"""
    scales, minimums = _k_scales(b)
    values = _nibbles(b[:, 16:].reshape(-1, 4, 32)).reshape(-1, 8, 32)
    return (values * scales[:, :, None] - minimums[:, :, None]).reshape(-1, 256)


def _q5_k(b: Bytes) -> Floats:
    """scales | 32 bytes, bit i of which is the fifth bit in run i | as Q4_K"""
    scales, minimums = _k_scales(b)
    fifth = b[:, 16:48][:, None, :] >> np.arange(8, dtype=np.uint8)[:, None] & 1
    values = _nibbles(b[:, 48:].reshape(-1, 4, 32)).reshape(-1, 8, 32) | fifth << 4
    return (values * scales[:, :, None] - minimums[:, :, None]).reshape(-1, 256)


def _q6_k(b: Bytes) -> Floats:
    """2 x 64 bytes of nibbles | 2 x 32 bytes of upper pairs | 16 signed scales | their scale

    A half of the block is 4 runs of 32: the low nibbles of its 64 bytes, then the high ones. Run r
    has its upper two bits at bit 2r. 32 is zero; each scale serves 16 values.
    """
    low = _nibbles(b[:, :128].reshape(-1, 2, 64)).reshape(-1, 2, 4, 32)
    pairs = b[:, 128:192].reshape(-1, 2, 1, 32) >> np.arange(0, 8, 2, dtype=np.uint8)[:, None] & 3
    values = (low | pairs << 4).reshape(-1, 16, 16).astype(np.float32) - 32
    scales = _halves(b[:, 208:]) * b[:, 192:208].view(np.int8)
    return (values * scales[:, :, None]).reshape(-1, 256)


_DECODERS: dict[str, Callable[[Bytes], Floats]] = {
    "F32": _f32,
    "F16": _halves,
    "BF16": _bf16,
    "Q8_0": _q8_0,
    "Q4_0": _q4_0,
    "Q4_1": _q4_1,
    "Q5_0": _q5_0,
    "Q5_1": _q5_1,
    "Q4_K": _q4_k,
    "Q5_K": _q5_k,
    "Q6_K": _q6_k,
}
