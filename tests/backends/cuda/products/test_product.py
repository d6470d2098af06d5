"""Products on random inputs against float64, with every prologue, epilogue and kernel, at odd
shapes, into outputs that were poisoned."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from headrace.backends.cuda.products.choice import KernelChoice, rule
from headrace.backends.cuda.products.formats import WIDENED, MatrixFormat
from headrace.backends.cuda.products.matrix import (
    Matrix,
    dense_matrix,
    dequantize_matrix,
    int4_matrix,
    quantize_matrix,
)
from headrace.backends.cuda.products.product import Norm, Product, Workspace
from headrace.models.spec import Activation

EPS = 1e-5


def make(
    format: MatrixFormat,
    rows: int,
    columns: int,
    device: torch.device,
    *,
    gated: bool = False,
    bias: bool = False,
    group: int = 32,
) -> Matrix:
    values = torch.randn(rows, columns) / columns**0.5
    shift = torch.randn(rows) if bias else None
    if format.dense:
        dtype = {"f32": torch.float32, "bf16": torch.bfloat16, "f16": torch.float16}[format]
        return dense_matrix(values, device, dtype, bias=shift, gated=gated)
    return quantize_matrix(values, device, format, group=group, bias=shift, gated=gated)


def activate(x: torch.Tensor, activation: Activation) -> torch.Tensor:
    if activation is Activation.SILU:
        return torch.nn.functional.silu(x)
    return torch.nn.functional.gelu(x, approximate="tanh")


def expected(
    product: Product,
    x: torch.Tensor,
    activation: Activation | None,
    residual: torch.Tensor | None,
) -> torch.Tensor:
    """In float64, from the matrix as it is stored."""
    matrix = product.matrix
    rows = x.double()
    if product.norm is not None:
        mean = rows.square().mean(1, keepdim=True)
        rows = rows / (mean + product.norm.eps).sqrt() * product.norm.weight.double()
    if matrix.permutation is not None:
        rows = rows[:, matrix.permutation.long()]
    sums = rows @ dequantize_matrix(matrix).double().T
    if matrix.bias is not None:
        sums += matrix.bias.double()
    if activation is not None:
        sums = activate(sums[:, 0::2], activation) * sums[:, 1::2]
    return sums if residual is None else sums + residual.double()


def check(
    matrix: Matrix,
    launch: KernelChoice,
    rows: int,
    *,
    dtype: torch.dtype = torch.float32,
    out_dtype: torch.dtype | None = None,
    norm: bool = False,
    activation: Activation | None = None,
    add: bool = False,
    tolerance: float,
) -> None:
    device = matrix.device
    gains = Norm(torch.rand(matrix.columns, device=device) + 0.5, EPS) if norm else None
    workspace = Workspace([matrix], max_rows=rows + 70, device=device, dtype=dtype)
    workspace.partials.fill_(torch.nan)
    product = Product(matrix, workspace, norm=gains, activation=activation, add=add)
    x = torch.randn(rows + 2, matrix.columns, device=device).to(dtype)
    x[rows:] = torch.nan  # rows past the step's are not its affair
    out = torch.full((rows + 2, product.width), torch.nan, device=device, dtype=out_dtype or dtype)
    residual = torch.randn(rows, product.width, device=device).to(out.dtype) if add else None
    if residual is not None:
        out[:rows] = residual
    want = expected(product, x[:rows], activation, residual)
    for _ in range(2):  # a second time: what a launch leaves behind must not matter
        if residual is not None:
            out[:rows] = residual
        product.run(launch, x, out, out if add else None, rows)
        error = (out[:rows].double() - want).norm() / want.norm()
        assert error < tolerance, error
    assert out[rows:].isnan().all()
    assert (workspace.counters == 0).all()


DOT = KernelChoice(kernel="dot", block_m=16, block_n=32, block_k=64)
EXACT = 1e-5
# Rows in three bits of mantissa, in seven bits, in eight. The interpreter cuts off what it should
# round: twice the error.
TWICE = 1 if torch.cuda.is_available() else 2
FP8 = 0.05 * TWICE
INT8 = 0.02 * TWICE
BF16 = 0.01 * TWICE


@pytest.mark.parametrize("rows", [1, 3, 16, 19])
@pytest.mark.parametrize("parts", [1, 3])
@pytest.mark.parametrize("swap", [False, True])
def test_dot_of_odd_shapes(device: torch.device, rows: int, parts: int, swap: bool) -> None:
    matrix = make(MatrixFormat.F32, 50, 200, device, bias=True)
    launch = KernelChoice(kernel="dot", block_n=32, block_k=64, parts=parts, swap=swap)
    check(matrix, launch, rows, add=True, tolerance=EXACT)


@pytest.mark.parametrize("kernel", ["row", "dot", "library"])
@pytest.mark.parametrize("activation", list(Activation))
def test_gate_and_norm(device: torch.device, kernel: str, activation: Activation) -> None:
    matrix = make(MatrixFormat.F32, 44, 136, device, gated=True, bias=True)
    rows = 1 if kernel == "row" else 5
    for fuse in (False, True):
        launch = KernelChoice(kernel=kernel, block_n=16, block_k=64, fuse_norm=fuse)
        check(matrix, launch, rows, norm=True, activation=activation, tolerance=EXACT)


@pytest.mark.parametrize("kernel", ["row", "dot", "library"])
@pytest.mark.parametrize("out_dtype", [torch.bfloat16, torch.float32])
def test_bf16(device: torch.device, kernel: str, out_dtype: torch.dtype) -> None:
    matrix = make(MatrixFormat.BF16, 70, 128, device)
    rows = 1 if kernel == "row" else 17
    launch = KernelChoice(kernel=kernel, block_n=16, block_k=64, stages=1 if kernel == "row" else 3)
    for add in {False, out_dtype == torch.bfloat16}:
        check(
            matrix,
            launch,
            rows,
            dtype=torch.bfloat16,
            out_dtype=out_dtype,
            norm=True,
            add=add,
            tolerance=BF16,
        )


@pytest.mark.parametrize("format", [MatrixFormat.FP8, MatrixFormat.FP8_BLOCK, MatrixFormat.INT8])
@pytest.mark.parametrize("rows", [2, 21])
def test_quantized_rows(device: torch.device, format: MatrixFormat, rows: int) -> None:
    matrix = make(format, 160, 272, device, bias=True)
    tolerance = INT8 if format is MatrixFormat.INT8 else FP8
    for parts, swap in ((1, False), (2, True)):
        launch = KernelChoice(kernel="dot", block_n=32, block_k=64, parts=parts, swap=swap)
        check(
            matrix,
            launch,
            rows,
            dtype=torch.bfloat16,
            norm=True,
            add=True,
            tolerance=tolerance,
        )
    if format is not MatrixFormat.INT8:
        return
    gated = make(format, 64, 144, device, gated=True)
    check(gated, DOT, rows, activation=Activation.SILU, tolerance=INT8)


@pytest.mark.parametrize(
    ("format", "columns", "group"),
    [
        (MatrixFormat.INT8, 272, 32),
        (MatrixFormat.INT8, 1100, 64),
        (MatrixFormat.FP8_BLOCK, 400, 128),
    ],
)
@pytest.mark.parametrize("swap", [False, True])
def test_an_outlier_costs_its_group_alone(
    device: torch.device, format: MatrixFormat, columns: int, group: int, swap: bool
) -> None:
    """A value 1,000 times the others; its group's weights are 0, so that only the others count.
    With one scale a row all of them would round to nothing."""
    values = torch.randn(70, columns) / columns**0.5
    values[:, group : 2 * group] = 0.0
    matrix = quantize_matrix(values, device, format)
    assert matrix.row_group == group
    workspace = Workspace([matrix], max_rows=40, device=device)
    workspace.scales.fill_(torch.nan)
    product = Product(matrix, workspace)
    x = torch.randn(40, columns, device=device).to(torch.bfloat16)
    x[:, group + 3] = 1000.0
    for rows, parts in ((1, 1), (19, 2), (40, 1)):
        out = torch.full((rows, 70), torch.nan, device=device)
        launch = KernelChoice(kernel="dot", block_n=32, block_k=256, parts=parts, swap=swap)
        product.run(launch, x, out, None, rows)
        want = expected(product, x[:rows], None, None)
        error = (out.double() - want).norm() / want.norm()
        assert error < (INT8 if format is MatrixFormat.INT8 else FP8), error


@pytest.mark.parametrize("format", WIDENED)
def test_widened_matrix(device: torch.device, format: MatrixFormat) -> None:
    matrix = make(format, 144, 256, device, gated=True)
    check(
        matrix,
        KernelChoice(kernel="widened"),
        5,
        dtype=torch.bfloat16,
        norm=True,
        activation=Activation.SILU,
        tolerance=BF16,
    )


def test_fp8_in_the_library(device: torch.device) -> None:
    matrix = make(MatrixFormat.FP8, 160, 256, device, bias=True)
    for add in (False, True):
        check(
            matrix, KernelChoice(kernel="library"), 33, dtype=torch.bfloat16, add=add, tolerance=FP8
        )


def test_fp8_of_one_row_is_not_quantized(device: torch.device) -> None:
    matrix = make(MatrixFormat.FP8, 30, 200, device, bias=True)
    launch = KernelChoice(kernel="row", block_n=8, block_k=128, stages=1)
    check(matrix, launch, 1, norm=True, add=True, tolerance=EXACT)


@pytest.mark.parametrize("parts", [1, 2])
@pytest.mark.parametrize("swap", [False, True])
def test_fp8_widened_beside_whole_rows(device: torch.device, parts: int, swap: bool) -> None:
    """Rows that are not quantized: as close as bf16 is. Codes of every exponent, zero and the
    subnormal ones too."""
    values = torch.randn(70, 160) * 2.0 ** torch.randint(-14, 1, (70, 160))
    values[::3, ::2] = 0.0
    matrix = quantize_matrix(values, device, MatrixFormat.FP8, bias=torch.randn(70))
    for fuse_norm in (False, True):
        launch = KernelChoice(
            kernel="dot",
            block_n=32,
            block_k=64,
            parts=parts,
            swap=swap,
            fuse_norm=fuse_norm,
            whole_rows=True,
        )
        check(matrix, launch, 5, dtype=torch.bfloat16, norm=True, tolerance=BF16)


@pytest.mark.parametrize("columns", [96, 200, 1100])
def test_fp8_in_small_groups(device: torch.device, columns: int) -> None:
    """Beside rows that are not quantized, by every kernel and at any row count: the same."""
    values = torch.randn(70, columns) * 2.0 ** torch.randint(-10, 1, (70, columns))
    matrix = quantize_matrix(values, device, MatrixFormat.FP8_BLOCK, group=32, bias=torch.randn(70))
    for rows in (1, 19, 70, 300) if columns < 1000 else (2,):
        launch = rule(MatrixFormat.FP8_BLOCK, 70, columns, rows)
        assert launch.whole_rows or launch.kernel == "widened"
        check(matrix, launch, rows, dtype=torch.bfloat16, norm=True, add=True, tolerance=BF16)
    for parts, swap in ((2, True), (3, False)):
        launch = KernelChoice(kernel="dot", block_n=64, parts=parts, swap=swap, whole_rows=True)
        check(matrix, launch, 5, dtype=torch.bfloat16, norm=True, tolerance=BF16)
    quantized = KernelChoice(kernel="dot", block_n=32)
    check(matrix, quantized, 5, dtype=torch.bfloat16, norm=True, tolerance=FP8)


@pytest.mark.parametrize("group", [32, 64, 128])
def test_int4_groups(device: torch.device, group: int) -> None:
    """Each tile height; parts that share 3 chunks evenly, unevenly, and with one left over."""
    matrix = make(MatrixFormat.INT4, 50, 384, device, group=group, bias=True)
    for rows, block_m, parts in ((1, 8, 1), (7, 8, 4), (9, 8, 2), (18, 16, 3), (33, 64, 1)):
        launch = KernelChoice(kernel="dot", block_m=block_m, block_n=32, parts=parts, warps=2)
        check(matrix, launch, rows, dtype=torch.bfloat16, norm=True, add=True, tolerance=BF16)


@pytest.mark.parametrize(("columns", "group"), [(96, 32), (160, 32), (192, 64), (448, 64)])
def test_int4_columns_that_end_inside_a_chunk(
    device: torch.device, columns: int, group: int
) -> None:
    matrix = make(MatrixFormat.INT4, 48, columns, device, group=group)
    launch = KernelChoice(kernel="dot", block_m=8, block_n=32, parts=2, warps=2)
    check(matrix, launch, 3, dtype=torch.bfloat16, add=True, tolerance=BF16)
    check(matrix, KernelChoice(kernel="widened"), 3, dtype=torch.bfloat16, tolerance=BF16)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
@pytest.mark.parametrize("kernel", ["dot", "widened"])
def test_int4_scales_of_each_type(device: torch.device, dtype: torch.dtype, kernel: str) -> None:
    """Of either sign, and with zero points past the codes."""
    generator = torch.Generator().manual_seed(9)
    codes = torch.randint(0, 16, (40, 256), dtype=torch.uint8, generator=generator)
    sizes = 2.0 ** torch.randint(-20, 30, (40, 4), generator=generator)
    if dtype == torch.float16:
        sizes = sizes.clamp(2.0**-6, 1.0)
    scales = (torch.randn(40, 4, generator=generator) * sizes).to(dtype)
    zeros = torch.randint(0, 128, (40, 4), generator=generator)
    matrix = int4_matrix(codes, scales, device, zeros=zeros)
    assert matrix.scale_dtype == dtype
    wide = (codes.reshape(40, 4, 64).float() - zeros[:, :, None]) * scales[:, :, None].float()
    assert torch.equal(dequantize_matrix(matrix).cpu(), wide.reshape(40, 256))
    launch = KernelChoice(kernel=kernel, block_m=8, block_n=16, warps=1)
    check(
        matrix,
        launch,
        5,
        dtype=torch.bfloat16,
        out_dtype=torch.float32,
        tolerance=BF16,
    )


@pytest.mark.parametrize("permuted", [False, True])
def test_int4_of_a_checkpoint(device: torch.device, permuted: bool) -> None:
    """Codes, scales, zero points and a permutation, against the arithmetic on the same arrays."""
    generator = np.random.default_rng(5)
    rows, columns, group = 24, 256, 64
    codes = generator.integers(0, 16, (rows, columns), dtype=np.uint8)
    scales = generator.uniform(0.01, 0.02, (rows, columns // group)).astype(np.float32)
    zeros = generator.integers(0, 16, scales.shape, dtype=np.uint8)
    order = generator.permutation(columns).astype(np.int32) if permuted else None
    matrix = int4_matrix(codes, scales, device, zeros=zeros, permutation=order, gated=True)
    wide = np.repeat(scales, group, 1) * (codes - np.repeat(zeros, group, 1).astype(np.float32))
    stored = dequantize_matrix(matrix).cpu().numpy()
    np.testing.assert_array_equal(stored[0::2], wide[: rows // 2])
    np.testing.assert_array_equal(stored[1::2], wide[rows // 2 :])
    for norm in (False, True):
        check(
            matrix,
            KernelChoice(kernel="dot", block_m=8, block_n=16),
            3,
            dtype=torch.bfloat16,
            norm=norm,
            activation=Activation.SILU,
            tolerance=BF16,
        )


def test_calls_follow_the_rule(device: torch.device) -> None:
    """Whatever the rule picks is right, at each row count where it changes its mind."""
    for format in (MatrixFormat.BF16, MatrixFormat.FP8, MatrixFormat.INT8, MatrixFormat.INT4):
        matrix = make(format, 96, 128, device)
        workspace = Workspace([matrix], max_rows=300, device=device)
        product = Product(matrix, workspace)
        x = torch.randn(300, 128, device=device).to(torch.bfloat16)
        for rows in (1, 2, 40, 70, 300):
            out = torch.full((rows, 96), torch.nan, device=device, dtype=torch.bfloat16)
            product(x, out, rows=rows)
            want = expected(product, x[:rows], None, None)
            assert (out.double() - want).norm() / want.norm() < FP8
