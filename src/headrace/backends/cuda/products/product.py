"""A product with its prologue and epilogue: y = epilogue(prologue(x) @ W.T + bias).

Prologue: none, or an RMS norm. Epilogue: none, a gate (a gated matrix has half as many results as
outputs), or a sum with the residual. The number of launches depends on the rows and on the matrix's
format: choice.py chooses the kernels. The launches depend only on (product, rows) and use only the
tensors given and the workspace: they can be captured into a CUDA graph.

A product does not know what its rows mean: padding rows are computed like the others.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace

import torch

from headrace.backends.cuda.products import launches
from headrace.backends.cuda.products.choice import Choices, KernelChoice
from headrace.backends.cuda.products.epilogue import (
    ACTIVATION_GELU_TANH,
    ACTIVATION_NONE,
    ACTIVATION_SILU,
)
from headrace.backends.cuda.products.formats import MatrixFormat
from headrace.backends.cuda.products.matrix import Matrix
from headrace.backends.cuda.products.norm import QUANTIZE_FP8, QUANTIZE_INT8, QUANTIZE_NONE
from headrace.backends.cuda.products.workspace_sizes import (
    COUNTERS,
    PARTIAL_VALUES,
    WorkspaceSizes,
)
from headrace.models.spec import Activation

_ACTIVATIONS = {
    None: ACTIVATION_NONE,
    Activation.SILU: ACTIVATION_SILU,
    Activation.GELU_TANH: ACTIVATION_GELU_TANH,
}
_QUANTIZED = {
    MatrixFormat.FP8: (torch.float8_e4m3fn, QUANTIZE_FP8),
    MatrixFormat.FP8_BLOCK: (torch.float8_e4m3fn, QUANTIZE_FP8),
    MatrixFormat.INT8: (torch.int8, QUANTIZE_INT8),
}


@dataclass(frozen=True, slots=True, eq=False)
class Norm:
    weight: torch.Tensor  # [columns], float32 or the activations' type, offset already added
    eps: float


class Workspace:
    """Intermediate memory of a product, shared by all products of one stream."""

    def __init__(
        self,
        matrices: Iterable[Matrix],
        *,
        max_rows: int,
        device: torch.device | str,
        dtype: torch.dtype = torch.bfloat16,
        choices: Choices | None = None,
        pdl: bool = False,
        normed_columns: int | None = None,
    ) -> None:
        """`normed_columns`: the most columns of any product with a norm; None: of any product."""
        self.choices = choices or Choices()
        self.dtype = dtype
        self.pdl = pdl
        sizes = WorkspaceSizes.of(
            (matrix.size for matrix in matrices), max_rows, normed_columns=normed_columns
        )
        self.rows = torch.empty(max_rows, sizes.width, dtype=dtype, device=device)
        self.codes = torch.empty(sizes.codes, dtype=torch.uint8, device=device)
        self.scales = torch.empty(sizes.scales, dtype=torch.float32, device=device)
        self.partials = torch.empty(PARTIAL_VALUES, dtype=torch.float32, device=device)
        self.counters = torch.zeros(COUNTERS, dtype=torch.int32, device=device)
        self.wide = torch.empty(sizes.wide, dtype=dtype, device=device)
        self.widened = torch.empty(sizes.widened, dtype=dtype, device=device)

    @property
    def bytes(self) -> int:
        held = (self.rows, self.codes, self.scales, self.partials, self.counters, self.wide)
        return sum(t.numel() * t.element_size() for t in (*held, self.widened))


class Product:
    """`product(x, out, residual, rows=n)`: the first n rows of x through the matrix, into out.

    x [>= n, columns], with contiguous rows; out [>= n, outputs, or half of them when gated], in the
    activations' type or, without `add`, float32. With `add`, residual (shaped as out; it may be
    out) is added. x must not be out.
    """

    def __init__(
        self,
        matrix: Matrix,
        workspace: Workspace,
        *,
        norm: Norm | None = None,
        activation: Activation | None = None,
        add: bool = False,
    ) -> None:
        assert matrix.gated == (activation is not None)
        assert not (add and matrix.gated)
        self.matrix = matrix
        self.norm = norm
        self.add = add
        self.activation = _ACTIVATIONS[activation]
        self._workspace = workspace
        self._chosen: dict[int, KernelChoice] = {}  # by rows: cached, as the look-up is slow

    @property
    def width(self) -> int:
        """Values in a row of the result."""
        return self.matrix.rows // 2 if self.matrix.gated else self.matrix.rows

    def __call__(
        self, x: torch.Tensor, out: torch.Tensor, residual: torch.Tensor | None = None, *, rows: int
    ) -> None:
        launch = self._chosen.get(rows)
        if launch is None:
            launch = self._workspace.choices.launch(self.matrix, rows)
            self._chosen[rows] = launch
        self.run(launch, x, out, residual, rows)

    def run(
        self,
        launch: KernelChoice,
        x: torch.Tensor,
        out: torch.Tensor,
        residual: torch.Tensor | None,
        rows: int,
    ) -> None:
        """Like a call, with a given choice: for benchmarks and tests."""
        assert self.add == (residual is not None)
        place = launches.Place(x[:rows], out[:rows], None if residual is None else residual[:rows])
        if launch.kernel == "row":
            assert rows == 1
            launches.row(self, self._workspace, launch, place)
        elif launch.kernel == "dot":
            launch = self._bounded(launch, rows)
            whole = launch.whole_rows and self.matrix.format in (
                MatrixFormat.FP8,
                MatrixFormat.FP8_BLOCK,
            )
            fused = launch.fuse_norm and launch.parts == 1 and (whole or self.matrix.format.dense)
            place = self._prepare(place, fused_norm=fused, quantize=not whole)
            if self.matrix.format is MatrixFormat.INT4:
                launches.int4(self, self._workspace, launch, place)
            else:
                launches.dot(self, self._workspace, launch, place, fused)
        else:
            self._library(launch, place)

    def _bounded(self, launch: KernelChoice, rows: int) -> KernelChoice:
        """One program per tile if the workspace can't hold the parts."""
        tiles = -(-rows // launch.block_m) * -(-self.matrix.rows // launch.block_n)
        values = tiles * launch.block_m * launch.block_n * launch.parts
        if launch.parts == 1 or (tiles <= COUNTERS and values <= PARTIAL_VALUES):
            return launch
        return replace(launch, parts=1)

    def _prepare(
        self, place: launches.Place, *, fused_norm: bool = False, quantize: bool = True
    ) -> launches.Place:
        """Norms, permutes or quantizes x into the workspace, unless the kernel does that itself."""
        workspace, matrix = self._workspace, self.matrix
        norm = None if fused_norm else self.norm
        dtype, code = _QUANTIZED.get(matrix.format, (workspace.dtype, QUANTIZE_NONE))
        if not quantize:
            dtype, code = workspace.dtype, QUANTIZE_NONE
        if norm is None and code == QUANTIZE_NONE and matrix.permutation is None:
            return place
        rows = place.x.shape[0]
        if code == QUANTIZE_NONE:
            prepared = workspace.rows[:rows, : matrix.columns]
        else:
            held = workspace.codes[: rows * matrix.columns]
            prepared = held.view(dtype).view(rows, matrix.columns)
        launches.prepare(
            place.x,
            prepared,
            scales=workspace.scales,
            weight=None if norm is None else norm.weight,
            eps=0.0 if norm is None else norm.eps,
            permutation=matrix.permutation,
            quantize=code,
            group=matrix.row_group if code != QUANTIZE_NONE else 0,
            pdl=workspace.pdl,
        )
        return place._replace(x=prepared)

    def _apart(self, place: launches.Place, *, scaled: bool) -> bool:
        """Whether the epilogue needs a separate launch, because torch's product can't do it."""
        if self.matrix.gated or self.matrix.bias is not None:
            return True
        return scaled and (self.add or place.out.dtype != self._workspace.dtype)

    def _library(self, launch: KernelChoice, place: launches.Place) -> None:
        matrix, workspace = self.matrix, self._workspace
        widened = launch.kernel == "widened"
        place = self._prepare(place, quantize=not widened)
        data, scales = matrix.data, matrix.scales
        if widened:
            data, scales = launches.widen(matrix, workspace), None
        apart = self._apart(place, scaled=scales is not None)
        rows = place.x.shape[0]
        chunk = max(1, workspace.wide.numel() // matrix.rows) if apart else rows
        for start in range(0, rows, chunk):
            here = place.part(start, start + chunk)
            count = here.x.shape[0]
            sums = here.out
            if apart:
                sums = workspace.wide[: count * matrix.rows].view(count, matrix.rows)
            row_scales = workspace.scales[start : start + count]
            launches.multiply(
                here, data, sums, None if apart else here.residual, row_scales, scales
            )
            if apart:
                launches.finish(self, sums, here, workspace.pdl)
