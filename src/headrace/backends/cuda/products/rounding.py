"""Floats to codes and scales: FP8, INT8 and INT4, rounded to nearest.

Knows values and the range of codes; not how a matrix is laid out (matrix.py). Every function takes
float32 [outputs, columns] and computes on that tensor's device.
"""

from __future__ import annotations

import torch

from headrace.backends.cuda.products.formats import FP8_BLOCK
from headrace.core.errors import UnsupportedModelError

FP8_MAX = 448.0
INT8_MAX = 127.0
# The relative precision of e4m3 depends on where a value lies between two powers of two, so the
# best scale depends on the values. Trying these factors removes 1/12 to 1/2 of the squared error.
FP8_TRIALS = 8
_TOGETHER = 1 << 24  # values processed at one time, to bound memory


def round_to_fp8(data: torch.Tensor, group: int = 0) -> tuple[torch.Tensor, torch.Tensor]:
    """e4m3 codes, and the scales with the least squared error: one per output and `group` columns
    (0: all columns)."""
    outputs, columns = data.shape
    group = group or columns
    values = torch.nn.functional.pad(data, (0, -columns % group)).reshape(-1, group)
    codes = torch.empty(values.shape, dtype=torch.float8_e4m3fn, device=data.device)
    scales = torch.empty(len(values), device=data.device)
    lines = max(1, _TOGETHER // group)
    for start in range(0, len(values), lines):
        here = slice(start, start + lines)
        codes[here], scales[here] = _best_fp8(values[here])
    bits = codes.view(torch.uint8).reshape(outputs, -1)[:, :columns].contiguous()
    return bits.view(torch.float8_e4m3fn), scales.reshape(outputs, -1)


def _best_fp8(values: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """With one scale per row."""
    smallest = values.abs().amax(1, keepdim=True).clamp(min=1e-10) / FP8_MAX
    best = _fp8(values, smallest)
    scales, error = smallest, (best.to(torch.float32) * smallest - values).square().sum(1, True)
    for trial in range(1, FP8_TRIALS):
        scale = smallest * 2.0 ** (trial / FP8_TRIALS)
        codes = _fp8(values, scale)
        found = (codes.to(torch.float32) * scale - values).square().sum(1, True)
        better = found < error
        kept = torch.where(better, codes.view(torch.uint8), best.view(torch.uint8))
        best = kept.view(torch.float8_e4m3fn)
        scales, error = torch.where(better, scale, scales), torch.where(better, found, error)
    return best, scales[:, 0]


def _fp8(values: torch.Tensor, scales: torch.Tensor) -> torch.Tensor:
    return (values / scales).clamp(-FP8_MAX, FP8_MAX).to(torch.float8_e4m3fn)


def round_to_fp8_blocks(data: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """e4m3 codes, and one scale per block of 128 x 128."""
    rows, columns = data.shape
    down, across = -(-rows // FP8_BLOCK), -(-columns // FP8_BLOCK)
    padded = torch.zeros(down * FP8_BLOCK, across * FP8_BLOCK, device=data.device)
    padded[:rows, :columns] = data.abs()
    peaks = padded.reshape(down, FP8_BLOCK, across, FP8_BLOCK).amax((1, 3))
    scales = peaks.clamp(min=1e-10) / FP8_MAX
    tall = scales.repeat_interleave(FP8_BLOCK, 0)[:rows]
    return _fp8(data, tall.repeat_interleave(FP8_BLOCK, 1)[:, :columns]), scales


def round_to_int8(data: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Codes, and one scale per output channel."""
    scales = data.abs().amax(1).clamp(min=1e-10) / INT8_MAX
    return torch.round(data / scales[:, None]).to(torch.int8), scales


def round_to_int4(data: torch.Tensor, group: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Codes 0 to 15, one per value, with 8 for zero; one scale per `group` columns."""
    rows, columns = data.shape
    if columns % group:
        raise UnsupportedModelError(
            f"A matrix has {columns} columns; expected a multiple of the INT4 group size, {group}.",
            "Choose a group size that divides the columns, or another format.",
        )
    grouped = data.reshape(rows, columns // group, group)
    # The value with the largest magnitude becomes code 0 or close to 15, depending on its sign.
    peaks = grouped.gather(2, grouped.abs().argmax(2, keepdim=True))
    scales = (peaks / -8.0).to(torch.float16).to(torch.float32)
    scales = torch.where(scales == 0, torch.ones_like(scales), scales)
    codes = (torch.round(grouped / scales) + 8.0).clamp(0, 15).to(torch.uint8)
    return codes.reshape(rows, columns), scales[:, :, 0]
