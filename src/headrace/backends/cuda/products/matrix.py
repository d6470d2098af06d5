"""A weight on the device, in its format: dense, FP8, INT8 or INT4, and how it is made.

Knows layouts and rounding; not which kernel reads them (product.py) nor which file they came
from. Every function that makes one takes arrays [outputs, columns], numpy or torch.

The layout of each format (n outputs, k columns):
  dense      data [n, k]
  fp8        data [n, k] e4m3, scales [n]
  fp8_block  data [n, k] e4m3, scales [n, k / group]: a checkpoint's block of 128 x 128 has its
             scale repeated for its outputs, so that gate and up outputs may be interleaved
  int8       data [n, k], scales [n]
  int4       data [k / 128, n, 32], words of 16 bits: bits 4j to 4j + 3 are columns of the j-th
             quarter of 128. factors [k / group, n]: a group's scale in the high half of a number
             (16 bits of 32; 32 of 64 if 16 would round it), and 128 + its zero point as bf16 in the
             low half. Columns are padded to a multiple of 128, with scales of 0
A gated matrix has output 2i = gate i and 2i + 1 = up i: a tile then holds both.
"""

from __future__ import annotations

from dataclasses import dataclass, fields

import numpy as np
import torch
from numpy.typing import NDArray

from headrace.backends.cuda.products.formats import (
    FP8_BLOCK,
    INT4_CHUNK,
    INT4_GROUPS,
    MatrixFormat,
    MatrixSize,
    row_group,
)
from headrace.backends.cuda.products.rounding import (
    round_to_fp8,
    round_to_fp8_blocks,
    round_to_int4,
    round_to_int8,
)
from headrace.core.errors import UnsupportedModelError, WeightsError

Values = torch.Tensor | NDArray[np.generic]


_DENSE = {
    torch.float32: MatrixFormat.F32,
    torch.bfloat16: MatrixFormat.BF16,
    torch.float16: MatrixFormat.F16,
}


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Matrix:
    format: MatrixFormat
    rows: int  # outputs
    columns: int
    data: torch.Tensor
    scales: torch.Tensor | None = None  # fp8, int8
    factors: torch.Tensor | None = None  # int4
    group: int = 0  # int4 and fp8_block: columns that share a scale
    scale_dtype: torch.dtype | None = None  # int4: of the scales in the factors
    permutation: torch.Tensor | None = None  # i32: stored column j takes x[permutation[j]]
    bias: torch.Tensor | None = None  # f32 [rows]
    gated: bool = False

    @property
    def bytes(self) -> int:
        """Its memory on the device."""
        values = (getattr(self, field.name) for field in fields(self))
        return sum(v.numel() * v.element_size() for v in values if isinstance(v, torch.Tensor))

    @property
    def size(self) -> MatrixSize:
        """The same as numbers."""
        return MatrixSize(
            format=self.format,
            rows=self.rows,
            columns=self.columns,
            group=self.group,
            scale_bytes=2 if self.scale_dtype is None else self.scale_dtype.itemsize,
            is_permuted=self.permutation is not None,
            has_bias=self.bias is not None,
            gated=self.gated,
        )

    @property
    def outputs(self) -> int:
        """The recorder's name for `rows`."""
        return self.rows

    @property
    def row_group(self) -> int:
        """Columns of x that share a scale if x is quantized; 0: one scale per row."""
        return row_group(self.format, self.columns, self.group)

    @property
    def device(self) -> torch.device:
        return self.data.device


def dense_matrix(
    values: Values,
    device: torch.device | str,
    dtype: torch.dtype = torch.bfloat16,
    *,
    bias: Values | None = None,
    gated: bool = False,
) -> Matrix:
    data = _on(device, values)
    rows, columns = data.shape
    return Matrix(
        format=_DENSE[dtype],
        rows=rows,
        columns=columns,
        data=_interleave(data.to(dtype), gated).contiguous(),
        bias=_bias(bias, device, gated),
        gated=gated,
    )


def quantize_matrix(
    values: Values,
    device: torch.device | str,
    format: MatrixFormat,
    *,
    group: int = 128,
    bias: Values | None = None,
    gated: bool = False,
) -> Matrix:
    """Round to nearest: FP8 and INT8 with one scale per output channel; FP8 blocks with one per
    group of columns, or, for groups of 128, per block of 128 x 128; INT4 with one per group and
    without zero points."""
    data = _on(device, values).to(torch.float32)
    if format is MatrixFormat.FP8:
        codes, scales = round_to_fp8(data)
        return fp8_matrix(codes, scales, device, bias=bias, gated=gated)
    if format is MatrixFormat.FP8_BLOCK and group == FP8_BLOCK:
        codes, scales = round_to_fp8_blocks(data)
        return fp8_matrix(codes, scales, device, bias=bias, gated=gated)
    if format is MatrixFormat.FP8_BLOCK:
        codes, scales = round_to_fp8(data, group)
        return fp8_matrix(codes, scales, device, group=group, bias=bias, gated=gated)
    if format is MatrixFormat.INT8:
        codes, scales = round_to_int8(data)
        return int8_matrix(codes, scales, device, bias=bias, gated=gated)
    if format is MatrixFormat.INT4:
        codes, scales = round_to_int4(data, group)
        return int4_matrix(codes, scales, device, bias=bias, gated=gated)
    raise AssertionError(f"{format} has no codes")


def fp8_matrix(
    codes: Values,  # [n, k] e4m3, or its bytes
    scales: Values,  # [n] or [n, 1], one value, or one for each block of 128 x 128
    device: torch.device | str,
    *,
    group: int = 0,  # scales are [n, k / group]
    bias: Values | None = None,
    gated: bool = False,
) -> Matrix:
    data = _on(device, codes)
    if data.dtype == torch.uint8:
        data = data.view(torch.float8_e4m3fn)
    rows, columns = data.shape
    found = _on(device, scales).to(torch.float32)
    blocks = (-(-rows // FP8_BLOCK), -(-columns // FP8_BLOCK))
    if found.numel() == 1:
        found = found.reshape(1).expand(rows)
    if group:
        format, laid = MatrixFormat.FP8_BLOCK, _interleave(found, gated)
    elif tuple(found.shape) == blocks:  # checked first: with 16384 columns both have the same shape
        each_row = found.repeat_interleave(FP8_BLOCK, 0)[:rows]
        format, laid, group = MatrixFormat.FP8_BLOCK, _interleave(each_row, gated), FP8_BLOCK
    elif found.numel() == rows:
        format, laid = MatrixFormat.FP8, _interleave(found.reshape(rows), gated)
    else:
        raise WeightsError(
            f"An FP8 matrix of {rows} x {columns} has scales of shape {tuple(found.shape)}; "
            f"expected one, {rows}, or {blocks[0]} x {blocks[1]} of them.",
            "Use a checkpoint with one scale per tensor, per output channel or per block of 128 x "
            "128.",
        )
    return Matrix(
        format=format,
        rows=rows,
        columns=columns,
        data=_interleave(data.view(torch.uint8), gated).contiguous().view(torch.float8_e4m3fn),
        scales=laid.contiguous(),
        group=group,
        bias=_bias(bias, device, gated),
        gated=gated,
    )


def int8_matrix(
    codes: Values,  # [n, k] int8
    scales: Values,  # [n] or [n, 1]
    device: torch.device | str,
    *,
    bias: Values | None = None,
    gated: bool = False,
) -> Matrix:
    data = _on(device, codes)
    rows, columns = data.shape
    found = _on(device, scales).to(torch.float32)
    if found.numel() != rows:
        raise WeightsError(
            f"An INT8 matrix of {rows} x {columns} has {found.numel()} scales; expected {rows}.",
            "Use a checkpoint with one scale per output channel.",
        )
    return Matrix(
        format=MatrixFormat.INT8,
        rows=rows,
        columns=columns,
        data=_interleave(data, gated).contiguous(),
        scales=_interleave(found.reshape(rows), gated).contiguous(),
        bias=_bias(bias, device, gated),
        gated=gated,
    )


def int4_matrix(
    codes: Values,  # [n, k] u8, 0..15: one per value; column j is in group j // group
    scales: Values,  # [n, k / group]
    device: torch.device | str,
    *,
    zeros: Values | None = None,  # [n, k / group] whole numbers; None: 8
    permutation: Values | None = None,  # [k]: column j of the codes takes x[permutation[j]]
    bias: Values | None = None,
    gated: bool = False,
) -> Matrix:
    """value = (code - zero) * scale, exactly: scales keep their precision."""
    data = _on(device, codes)
    rows, columns = data.shape
    found = _on(device, scales)
    group, repeat = _kernel_group(columns, found.shape[1])
    points = torch.full(found.shape, 8.0, device=data.device)
    if zeros is not None:
        points = _on(device, zeros).to(torch.float32)
        if not torch.equal(points, points.round()) or points.min() < 0 or points.max() > 127:
            raise UnsupportedModelError(
                "INT4 weights have zero points that are not whole numbers from 0 to 127.",
                "Use a checkpoint with integer zero points, or an unquantized one.",
            )
    narrow = _narrow(found)
    missing = -columns % INT4_CHUNK // group
    factors = torch.nn.functional.pad(
        _join_factors(narrow, points).repeat_interleave(repeat, 1), (0, missing)
    )
    return Matrix(
        format=MatrixFormat.INT4,
        rows=rows,
        columns=columns,
        data=_pack_words(_interleave(data, gated)),
        factors=_interleave(factors, gated).t().contiguous(),
        group=group,
        scale_dtype=narrow.dtype,
        permutation=None if permutation is None else _on(device, permutation).to(torch.int32),
        bias=_bias(bias, device, gated),
        gated=gated,
    )


def dequantize_matrix(matrix: Matrix) -> torch.Tensor:
    """float32 [rows, columns], in the stored order of outputs and columns. For tests; slow."""
    if matrix.format is MatrixFormat.INT4:
        assert matrix.factors is not None
        assert matrix.scale_dtype is not None
        scales, points = _split_factors(matrix.factors.t(), matrix.scale_dtype)
        codes = _unpack_words(matrix.data).reshape(matrix.rows, -1, matrix.group).float()
        values = (codes - points[:, :, None]) * scales[:, :, None]
        return values.reshape(matrix.rows, -1)[:, : matrix.columns]
    values = matrix.data.to(torch.float32)
    if matrix.format is MatrixFormat.FP8_BLOCK:
        assert matrix.scales is not None
        return values * matrix.scales.repeat_interleave(matrix.group, 1)[:, : matrix.columns]
    return values if matrix.scales is None else values * matrix.scales[:, None]


def _on(device: torch.device | str, values: Values) -> torch.Tensor:
    if isinstance(values, torch.Tensor):
        return values.to(device)
    return torch.from_numpy(np.array(values)).to(device)  # a copy: torch needs writable memory


def _interleave(values: torch.Tensor, gated: bool) -> torch.Tensor:
    """Rows [gates | ups] -> gate 0, up 0, gate 1, up 1 ..."""
    if not gated:
        return values
    half = values.shape[0] // 2
    return torch.stack((values[:half], values[half:]), 1).reshape(values.shape)


def _bias(bias: Values | None, device: torch.device | str, gated: bool) -> torch.Tensor | None:
    if bias is None:
        return None
    return _interleave(_on(device, bias).to(torch.float32).reshape(-1), gated).contiguous()


def _kernel_group(columns: int, groups: int) -> tuple[int, int]:
    """The group size that kernels use, and how many of these make one in the checkpoint."""
    size = columns // groups
    for group in INT4_GROUPS:
        if size * groups == columns and size % group == 0:
            return group, size // group
    raise UnsupportedModelError(
        f"INT4 weights of {columns} columns have {groups} groups; expected groups of a multiple "
        "of 32 columns.",
        "Use a checkpoint quantized with a group size of 32, 64 or 128.",
    )


def _narrow(scales: torch.Tensor) -> torch.Tensor:
    """Scales in two bytes if that loses nothing, which is so for most checkpoints."""
    for dtype in (torch.float16, torch.bfloat16):
        if torch.equal(scales.to(dtype).to(scales.dtype), scales):
            return scales.to(dtype)
    return scales.to(torch.float32)


def _pack_words(codes: torch.Tensor) -> torch.Tensor:
    """u8 [n, k], one code each -> i16 [k / 128, n, 32]"""
    filled = torch.nn.functional.pad(codes, (0, -codes.shape[1] % INT4_CHUNK))
    quarters = filled.reshape(codes.shape[0], -1, 4, INT4_CHUNK // 4)
    low = quarters[:, :, 0] | (quarters[:, :, 1] << 4)
    high = quarters[:, :, 2] | (quarters[:, :, 3] << 4)
    words = torch.stack((low, high), 3).view(torch.int16)[..., 0]
    return words.transpose(0, 1).contiguous()


def _unpack_words(words: torch.Tensor) -> torch.Tensor:
    """The inverse, with padded columns -> u8 [n, k]"""
    halves = words.transpose(0, 1).contiguous().view(torch.uint8)
    low, high = halves[:, :, 0::2], halves[:, :, 1::2]
    quarters = torch.stack((low & 15, low >> 4, high & 15, high >> 4), 2)
    return quarters.reshape(words.shape[1], -1)


def _join_factors(scales: torch.Tensor, points: torch.Tensor) -> torch.Tensor:
    whole, bits = (
        (torch.int64, torch.int32) if scales.dtype == torch.float32 else (torch.int32, torch.int16)
    )
    low = (points + 128.0).to(torch.bfloat16).view(torch.int16).to(whole)
    return (scales.contiguous().view(bits).to(whole) << 8 * scales.itemsize) | low


def _split_factors(
    factors: torch.Tensor, scale_dtype: torch.dtype
) -> tuple[torch.Tensor, torch.Tensor]:
    """float32 scales, zero points"""
    bits = torch.int32 if scale_dtype == torch.float32 else torch.int16
    scales = (factors >> 8 * scale_dtype.itemsize).to(bits).view(scale_dtype)
    points = (factors & 0xFFFF).to(torch.int16).view(torch.bfloat16).to(torch.float32) - 128.0
    return scales.to(torch.float32), points
