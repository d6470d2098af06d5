"""The launches that products consist of: grids, strides and flags for each kernel.

One function per kernel or torch call. Nothing is chosen here (see choice.py, product.py), and
nothing is allocated, except by torch where that can't be avoided.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

import torch
import triton

from headrace.backends.cuda.products.dot import (
    SCALES_BLOCK,
    SCALES_CHANNEL,
    SCALES_NONE,
    dot_kernel,
)
from headrace.backends.cuda.products.epilogue import finish_kernel
from headrace.backends.cuda.products.formats import INT4_CHUNK, MatrixFormat
from headrace.backends.cuda.products.int4 import (
    SCALE_BF16,
    SCALE_F16,
    SCALE_F32,
    int4_kernel,
    unpack_kernel,
    widen_kernel,
)
from headrace.backends.cuda.products.matrix import Matrix
from headrace.backends.cuda.products.norm import QUANTIZE_NONE, add_normed_kernel, prepare_kernel
from headrace.backends.cuda.products.row import row_kernel

if TYPE_CHECKING:
    from headrace.backends.cuda.products.choice import KernelChoice
    from headrace.backends.cuda.products.product import Product, Workspace

INTERPRETED = bool(triton.knobs.runtime.interpret)
PREFETCH_TILES = 2  # on an H200 more was slower, and none no faster
PREFETCH_CHUNKS = 8
MOST_STAGES = 6
_SCALES = {
    MatrixFormat.FP8: SCALES_CHANNEL,
    MatrixFormat.INT8: SCALES_CHANNEL,
    MatrixFormat.FP8_BLOCK: SCALES_BLOCK,
}

_INT4_SCALES = {
    torch.float16: SCALE_F16.value,
    torch.bfloat16: SCALE_BF16.value,
    torch.float32: SCALE_F32.value,
}


class Place(NamedTuple):
    """The tensors that a product reads and writes, with as many rows as it computes."""

    x: torch.Tensor
    out: torch.Tensor
    residual: torch.Tensor | None

    def part(self, start: int, end: int) -> Place:
        residual = None if self.residual is None else self.residual[start:end]
        return Place(self.x[start:end], self.out[start:end], residual)


def _flags(pdl: bool) -> dict[str, bool]:
    """The flags of a launch that may start before the previous one has ended."""
    return {"PDL": True, "launch_pdl": True} if pdl else {"PDL": False}


def _row_warps(width: int) -> int:
    return 4 if width <= 2048 else 8 if width <= 8192 else 16


def prepare(
    x: torch.Tensor,
    out: torch.Tensor,
    *,
    scales: torch.Tensor | None = None,
    weight: torch.Tensor | None = None,
    eps: float = 0.0,
    permutation: torch.Tensor | None = None,
    quantize: int = QUANTIZE_NONE,
    group: int = 0,
    pdl: bool = False,
) -> None:
    """out = quantize(permute(norm(x))), each of them optional, for the rows of out. With `group`,
    that many columns share a scale: [groups, rows]."""
    assert permutation is None or quantize == QUANTIZE_NONE
    rows, width = out.shape
    assert scales is None or scales.numel() >= rows * (triton.cdiv(width, group) if group else 1)
    prepare_kernel[(rows,)](
        x,
        weight,
        permutation,
        out,
        scales,
        width,
        x.stride(0),
        out.stride(0),
        eps,
        BLOCK=triton.next_power_of_2(max(width, group)),
        NORM=weight is not None,
        PERMUTE=permutation is not None,
        QUANTIZE=quantize,
        GROUP=group,
        num_warps=_row_warps(width),
        **_flags(pdl),
    )


def add_normed(
    y: torch.Tensor,
    weight: torch.Tensor,
    eps: float,
    residual: torch.Tensor,
    *,
    rows: int,
    pdl: bool = False,
) -> None:
    """residual += norm(y), for models with a norm after attention and MLP."""
    width = y.shape[1]
    add_normed_kernel[(rows,)](
        y,
        weight,
        residual,
        width,
        y.stride(0),
        residual.stride(0),
        eps,
        BLOCK=triton.next_power_of_2(width),
        num_warps=_row_warps(width),
        **_flags(pdl),
    )


def row(product: Product, workspace: Workspace, launch: KernelChoice, place: Place) -> None:
    matrix, norm = product.matrix, product.norm
    row_kernel[(triton.cdiv(matrix.rows, launch.block_n),)](
        place.x,
        matrix.data,
        place.out,
        matrix.scales,
        None if norm is None else norm.weight,
        matrix.bias,
        place.residual,
        matrix.rows,
        matrix.columns,
        0.0 if norm is None else norm.eps,
        BLOCK_N=launch.block_n,
        BLOCK_K=launch.block_k,
        STAGES=launch.stages,
        EVEN=matrix.columns % launch.block_k == 0,
        SCALED=matrix.scales is not None,
        NORM=norm is not None,
        ACTIVATION=product.activation,
        BIAS=matrix.bias is not None,
        ADD=product.add,
        PREFETCH=PREFETCH_TILES // 2 if workspace.pdl else 0,
        INTERPRETED=INTERPRETED,
        num_warps=launch.warps,
        **_flags(workspace.pdl),
    )


def dot(
    product: Product, workspace: Workspace, launch: KernelChoice, place: Place, fused_norm: bool
) -> None:
    matrix, rows = product.matrix, place.x.shape[0]
    norm = product.norm if fused_norm else None
    scales = _SCALES.get(matrix.format, SCALES_NONE)
    widen = scales != SCALES_NONE and place.x.dtype.itemsize > 1
    group = 0 if widen else matrix.row_group
    block_k, stages = launch.block_k, launch.stages
    if needed := matrix.group or group:  # one iteration computes the columns of one scale
        stages = min(MOST_STAGES, stages * max(1, block_k // needed))
        block_k = needed
    tiles = triton.cdiv(rows, launch.block_m) * triton.cdiv(matrix.rows, launch.block_n)
    dot_kernel[(tiles, launch.parts)](
        place.x,
        matrix.data.view(torch.uint8) if widen else matrix.data,
        place.out,
        workspace.scales,
        matrix.scales,
        None if norm is None else norm.weight,
        matrix.bias,
        place.residual,
        workspace.partials,
        workspace.counters,
        rows,
        matrix.rows,
        matrix.columns,
        place.x.stride(0),
        place.out.stride(0),
        0 if place.residual is None else place.residual.stride(0),
        0.0 if norm is None else norm.eps,
        BLOCK_M=launch.block_m,
        BLOCK_N=launch.block_n,
        BLOCK_K=block_k,
        PARTS=launch.parts,
        SWAP=launch.swap,
        EVEN=matrix.columns % block_k == 0,
        SCALES=scales,
        GROUP=group,
        NORM=norm is not None,
        WIDEN=widen,
        ACTIVATION=product.activation,
        BIAS=matrix.bias is not None,
        ADD=product.add,
        PREFETCH=PREFETCH_TILES if workspace.pdl else 0,
        INTERPRETED=INTERPRETED,
        num_warps=launch.warps,
        num_stages=stages,
        **_flags(workspace.pdl),
    )


def int4(product: Product, workspace: Workspace, launch: KernelChoice, place: Place) -> None:
    matrix, rows = product.matrix, place.x.shape[0]
    tiles = triton.cdiv(rows, launch.block_m) * triton.cdiv(matrix.rows, launch.block_n)
    steps = triton.cdiv(triton.cdiv(matrix.columns, INT4_CHUNK), launch.parts)
    assert matrix.scale_dtype is not None
    int4_kernel[(tiles, launch.parts)](
        place.x,
        matrix.data,
        matrix.factors,
        place.out,
        matrix.bias,
        place.residual,
        workspace.partials,
        workspace.counters,
        rows,
        matrix.rows,
        matrix.columns,
        place.x.stride(0),
        place.out.stride(0),
        0 if place.residual is None else place.residual.stride(0),
        BLOCK_M=launch.block_m,
        BLOCK_N=launch.block_n,
        GROUP=matrix.group,
        SCALE=_INT4_SCALES[matrix.scale_dtype],
        PARTS=launch.parts,
        STAGES=launch.stages,
        EVEN=matrix.columns % INT4_CHUNK == 0,
        ACTIVATION=product.activation,
        BIAS=matrix.bias is not None,
        ADD=product.add,
        LATE=launch.late,
        PREFETCH=min(PREFETCH_CHUNKS, triton.next_power_of_2(steps)) if workspace.pdl else 0,
        INTERPRETED=INTERPRETED,
        num_warps=launch.warps,
        num_stages=launch.stages,
        **_flags(workspace.pdl),
    )


def widen(matrix: Matrix, workspace: Workspace) -> torch.Tensor:
    """The matrix dequantized into the workspace -> [rows, columns]"""
    out = workspace.widened[: matrix.rows * matrix.columns].view(matrix.rows, matrix.columns)
    if matrix.format is MatrixFormat.INT4:
        assert matrix.scale_dtype is not None
        unpack_kernel[(triton.cdiv(matrix.columns, INT4_CHUNK), triton.cdiv(matrix.rows, 64))](
            matrix.data,
            matrix.factors,
            out,
            matrix.rows,
            matrix.columns,
            BLOCK_N=64,
            GROUP=matrix.group,
            SCALE=_INT4_SCALES[matrix.scale_dtype],
            **_flags(workspace.pdl),
        )
        return out
    block_k = matrix.group or 128
    widen_kernel[(triton.cdiv(matrix.columns, block_k), triton.cdiv(matrix.rows, 64))](
        matrix.data,
        matrix.scales,
        out,
        matrix.rows,
        matrix.columns,
        BLOCK_N=64,
        BLOCK_K=block_k,
        BLOCKED=matrix.format is MatrixFormat.FP8_BLOCK,
        **_flags(workspace.pdl),
    )
    return out


def multiply(
    place: Place,
    data: torch.Tensor,
    sums: torch.Tensor,
    residual: torch.Tensor | None,
    row_scales: torch.Tensor,
    scales: torch.Tensor | None,
) -> None:
    """torch's product: sums = (residual +) x @ data.T, scaled if there are scales."""
    x, right = place.x, data.t()
    if not x.is_cuda:  # torch has none of the mixed products on a CPU
        total = x.to(torch.float32) @ right.to(torch.float32)
        if scales is not None:
            total *= row_scales[:, None] * scales[None, :]
        sums.copy_(total if residual is None else total + residual.to(torch.float32))
    elif scales is not None:
        assert residual is None
        torch._scaled_mm(
            x,
            right,
            scale_a=row_scales[:, None],
            scale_b=scales[None, :],
            out_dtype=sums.dtype,
            use_fast_accum=True,
            out=sums,
        )
    elif sums.dtype != x.dtype:
        assert residual is None
        torch.ops.aten.mm.dtype_out(x, right, sums.dtype, out=sums)
    elif residual is None:
        torch.mm(x, right, out=sums)
    else:
        torch.addmm(residual, x, right, out=sums)


def finish(product: Product, sums: torch.Tensor, place: Place, pdl: bool) -> None:
    """Bias, gate and residual after torch's product."""
    rows, outputs = sums.shape
    residual = place.residual
    block_m, block_n = 4, 512
    finish_kernel[(triton.cdiv(rows, block_m), triton.cdiv(outputs, block_n))](
        sums,
        place.out,
        product.matrix.bias,
        residual,
        rows,
        outputs,
        sums.stride(0),
        place.out.stride(0),
        0 if residual is None else residual.stride(0),
        BLOCK_M=block_m,
        BLOCK_N=block_n,
        ACTIVATION=product.activation,
        BIAS=product.matrix.bias is not None,
        ADD=residual is not None,
        num_warps=4,
        **_flags(pdl),
    )
