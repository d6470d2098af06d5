"""Matrices as they are stored: exact where they come quantized, close where they are rounded."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from headrace.backends.cuda.products.formats import MatrixFormat
from headrace.backends.cuda.products.matrix import (
    dense_matrix,
    dequantize_matrix,
    fp8_matrix,
    int4_matrix,
    int8_matrix,
    quantize_matrix,
)
from headrace.backends.cuda.products.rounding import round_to_fp8
from headrace.core.errors import UnsupportedModelError, WeightsError


@pytest.mark.parametrize(
    ("format", "tolerance", "bits"),
    [
        (MatrixFormat.FP8, 0.04, 8),
        (MatrixFormat.FP8_BLOCK, 0.04, 8),
        (MatrixFormat.INT8, 0.012, 8),
        (MatrixFormat.INT4, 0.12, 4),
    ],
)
def test_rounding(device: torch.device, format: MatrixFormat, tolerance: float, bits: int) -> None:
    values = np.random.default_rng(3).standard_normal((200, 384)).astype(np.float32)
    matrix = quantize_matrix(values, device, format, group=64)
    found = dequantize_matrix(matrix).cpu().numpy()
    assert np.linalg.norm(found - values) / np.linalg.norm(values) < tolerance
    assert (matrix.rows, matrix.columns, matrix.format) == (200, 384, format)
    codes = 200 * 384 * bits // 8
    assert codes < matrix.bytes < 1.13 * codes


def test_gate_and_up_lie_side_by_side(device: torch.device) -> None:
    values = torch.randn(260, 256)
    for format in (MatrixFormat.FP8_BLOCK, MatrixFormat.INT8, MatrixFormat.INT4):
        plain = dequantize_matrix(quantize_matrix(values, device, format))
        gated = quantize_matrix(values, device, format, gated=True, bias=torch.arange(260))
        assert torch.equal(dequantize_matrix(gated)[0::2], plain[:130])
        assert torch.equal(dequantize_matrix(gated)[1::2], plain[130:])
        assert gated.bias is not None
        assert gated.bias[:4].tolist() == [0, 130, 1, 131]


@pytest.mark.parametrize("group", [0, 32, 64])
def test_fp8_scales_of_least_error(device: torch.device, group: int) -> None:
    """No line is further off than with the scale of its largest value, and all together less; a
    last group that is short, and a line of zeros, are like the others."""
    generator = torch.Generator().manual_seed(4)
    values = torch.randn(90, 208, generator=generator) * torch.rand(90, 1, generator=generator)
    values[7] = 0.0
    codes, scales = round_to_fp8(values.to(device), group)
    width = group or 208
    assert scales.shape == (90, -(-208 // width))
    each = scales.repeat_interleave(width, 1)[:, :208].cpu()
    lines = torch.nn.functional.pad(values, (0, -208 % width)).reshape(-1, width)
    peak = lines.abs().amax(1, keepdim=True).clamp(min=1e-10) / 448.0
    plain = ((lines / peak).to(torch.float8_e4m3fn).float() * peak - lines).square().sum(1)
    found = torch.nn.functional.pad(codes.cpu().float() * each - values, (0, -208 % width))
    error = found.reshape(-1, width).square().sum(1)
    assert (error <= plain * 1.0001 + 1e-12).all()
    assert error.sum() < 0.95 * plain.sum()
    assert (codes[7].float() == 0).all()


def test_fp8_scales(device: torch.device) -> None:
    codes = torch.randn(130, 200).to(torch.float8_e4m3fn)
    one = fp8_matrix(codes.view(torch.uint8).numpy(), torch.tensor([0.5]), device)
    assert one.format is MatrixFormat.FP8
    assert torch.equal(dequantize_matrix(one).cpu(), codes.float() * 0.5)
    blocks = torch.rand(2, 2) + 0.5
    blocked = fp8_matrix(codes, blocks, device)
    assert blocked.format is MatrixFormat.FP8_BLOCK
    found = dequantize_matrix(blocked).cpu()
    assert torch.equal(found[129, :128], codes[129, :128].float() * blocks[1, 0])
    assert torch.equal(found[127, 128:], codes[127, 128:].float() * blocks[0, 1])
    with pytest.raises(WeightsError, match="130 x 200 has scales of shape"):
        fp8_matrix(codes, torch.ones(3, 2), device)


def test_as_many_blocks_as_outputs_are_still_blocks(device: torch.device) -> None:
    """128 outputs of 16384 columns have 1 x 128 blocks: a scale too many for one a tensor, and as
    many as one an output would be."""
    codes = torch.ones(128, 16384).to(torch.float8_e4m3fn)
    blocks = torch.rand(1, 128) + 0.5
    matrix = fp8_matrix(codes, blocks, device)
    assert matrix.format is MatrixFormat.FP8_BLOCK
    want = blocks.repeat_interleave(128, 1).expand(128, -1)
    assert torch.equal(dequantize_matrix(matrix).cpu(), want)


def test_int4_scales_keep_their_precision(device: torch.device) -> None:
    codes = np.random.default_rng(1).integers(0, 16, (8, 256), dtype=np.uint8)
    whole = torch.rand(8, 1) + 0.5
    for scales, dtype in (
        (whole.half(), torch.float16),
        (whole.half().float(), torch.float16),
        (whole.bfloat16() * 1e9, torch.bfloat16),
        (whole, torch.float32),
    ):
        matrix = int4_matrix(codes, scales, device)  # one group a row: as groups of 128
        assert matrix.group == 128
        assert matrix.scale_dtype == dtype
        want = (torch.from_numpy(codes).float() - 8) * scales.float()
        assert torch.equal(dequantize_matrix(matrix).cpu(), want)


def test_what_int4_refuses(device: torch.device) -> None:
    codes = np.zeros((4, 96), np.uint8)
    with pytest.raises(UnsupportedModelError, match="96 columns have 6 groups"):
        int4_matrix(codes, np.ones((4, 6), np.float32), device)
    with pytest.raises(UnsupportedModelError, match="not whole numbers"):
        int4_matrix(
            codes, np.ones((4, 3), np.float32), device, zeros=np.full((4, 3), 7.5, np.float32)
        )
    with pytest.raises(
        UnsupportedModelError, match="expected a multiple of the INT4 group size, 64"
    ):
        quantize_matrix(torch.randn(4, 96), device, MatrixFormat.INT4, group=64)
    with pytest.raises(WeightsError, match="has 3 scales; expected 4"):
        int8_matrix(np.zeros((4, 96), np.int8), np.ones(3, np.float32), device)


def test_dense(device: torch.device) -> None:
    values = np.random.default_rng(2).standard_normal((6, 10))
    matrix = dense_matrix(values, device, torch.float32)
    assert torch.equal(dequantize_matrix(matrix).cpu(), torch.from_numpy(values).float())
    assert matrix.bytes == 240
