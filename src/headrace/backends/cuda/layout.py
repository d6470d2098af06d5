"""How many bytes the CUDA backend will allocate, computed beforehand.

Weights are added up by format. For the rest, the runner's own classes are instantiated over tensors
with shapes but no memory (torch's "meta" device), so that sizes can't differ from what is allocated
later. Of quantized checkpoints it reads the small tensors that decide whether kernels can use the
codes as they are; it reads no other weights. Needs no GPU.
"""

from __future__ import annotations

import torch

from headrace.backends.cuda.attention.plan import WorkShape
from headrace.backends.cuda.device import FP8_CAPABILITY, Gpu
from headrace.backends.cuda.draws.sampling import ROWS_TOGETHER, SCRATCH_ROW_BYTES, Sampler
from headrace.backends.cuda.kv import KvPool, check_kv_dtype
from headrace.backends.cuda.loading import (
    FLOATS,
    VECTORS,
    int4_group,
    kept_format,
    made_format,
)
from headrace.backends.cuda.products.matrix import (
    INT4_CHUNK,
    Matrix,
    MatrixFormat,
    dense_matrix,
)
from headrace.backends.cuda.products.rounding import FP8_BLOCK
from headrace.backends.cuda.program import (
    Prepared,
    Program,
    Table,
    attention_windows,
    find_matrices,
)
from headrace.backends.cuda.runner import logit_rows, work_shape
from headrace.backends.cuda.step.graphs import GRAPH_ROWS, LAUNCH_BYTES, MOST_GRAPHS, row_buckets
from headrace.backends.cuda.step.inputs import StepInputs
from headrace.core.config import GraphMode, StepSizes
from headrace.core.errors import ConfigError
from headrace.core.sizes import MIB
from headrace.core.step import RunnerLimits
from headrace.models.decoder import DecoderWeights
from headrace.models.spec import ModelSpec
from headrace.weights.methods.quantized import QuantizedTensor
from headrace.weights.weight import Weight

META = torch.device("meta")
DTYPE = torch.bfloat16  # of activations
LAYER_LAUNCHES = 9  # per layer, an upper estimate


def graph_bytes(spec: ModelSpec, graphs: GraphMode, max_batch_tokens: int) -> int:
    """An estimate for as many CUDA graphs as a server captures over time."""
    if graphs is GraphMode.OFF:
        return 0
    buckets = len(row_buckets(min(GRAPH_ROWS, max_batch_tokens)))
    launches = LAYER_LAUNCHES * spec.layers + 8
    return min(2 * buckets, MOST_GRAPHS) * launches * LAUNCH_BYTES


def check_sizes(sizes: StepSizes) -> None:
    """Refuse sizes that this backend does not support."""
    size = sizes.block_tokens
    if size < 16 or size & (size - 1):
        raise ConfigError(
            f"block_tokens is {size}; the CUDA backend supports powers of two from 16 on.",
            "Set block_tokens to 16, 32 or 64.",
            param="block_tokens",
        )
    check_kv_dtype(sizes.kv_dtype)


def check_fp8(gpu: Gpu, shapes: DecoderWeights[Prepared], kv_dtype: str) -> None:
    """Refuse FP8 on a GPU without it, before a kernel fails to compile."""
    if gpu.capability >= FP8_CAPABILITY:
        return
    has = f"{gpu.name} has compute capability {'.'.join(map(str, gpu.capability))}"
    needed = f"FP8 needs {'.'.join(map(str, FP8_CAPABILITY))} or newer"
    if kv_dtype == "fp8":
        raise ConfigError(f"{has}; {needed}.", "Set --kv-dtype bf16.", param="kv_dtype")
    formats = {weight.format for weight in find_matrices(shapes)}
    if formats & {MatrixFormat.FP8, MatrixFormat.FP8_BLOCK}:
        raise ConfigError(
            f"{has}; {needed}, and the layers would be FP8.",
            "Set --quantization int8, or use a checkpoint in BF16, AWQ or GPTQ.",
            param="quantization",
        )


def activation_bytes(
    spec: ModelSpec,
    shapes: DecoderWeights[Prepared],
    sizes: StepSizes,
    multiprocessors: int,
    max_batch_tokens: int,
    context_tokens: int,
    *,
    batch_invariant: bool = False,
) -> int:
    """Buffers, workspaces, inputs and tables of the largest step."""
    limits = RunnerLimits(
        max_batch_tokens=max_batch_tokens,
        max_sequences=sizes.max_sequences,
        total_blocks=1,
        block_tokens=sizes.block_tokens,
        context_tokens=context_tokens,
    )
    shape = work_shape(spec, sizes.max_sequences, multiprocessors, batch_invariant)
    rows = logit_rows(max_batch_tokens, sizes.max_sequences)
    inputs = StepInputs(
        limits,
        shape,
        head_dim=spec.attention[0].head_dim,
        windows=attention_windows(spec),
        wanted_rows=rows,
        vocab_size=spec.vocab_size,
        device=META,
    )
    program = _program(spec, shapes, inputs, shape, limits, rows)
    most_wanted = max_batch_tokens + sizes.max_sequences
    sampler = Sampler(rows, most_wanted, sizes.max_sequences, spec.vocab_size, META)
    return program.nbytes + inputs.nbytes + sampler.nbytes


def scratch_bytes(spec: ModelSpec, max_sequences: int) -> int:
    """Temporary memory: rows that are being drawn from, and torch's workspace."""
    return SCRATCH_ROW_BYTES * spec.vocab_size * min(ROWS_TOGETHER, max_sequences) + 64 * MIB


def _program(
    spec: ModelSpec,
    shapes: DecoderWeights[Prepared],
    inputs: StepInputs,
    shape: WorkShape,
    limits: RunnerLimits,
    rows: int,
) -> Program:
    return Program(
        spec,
        shapes,
        KvPool(spec, 1, limits.block_tokens, "bf16", META),
        inputs,
        shape,
        max_rows=limits.max_batch_tokens,
        logit_rows=rows,
        context_tokens=limits.context_tokens,
        block_tokens=limits.block_tokens,
        dtype=DTYPE,
        device=META,
    )


def shape_weights(weights: DecoderWeights[Weight], quantization: str) -> DecoderWeights[Prepared]:
    """The weights as `loading.Loader` would prepare them, without memory."""
    tied = weights.head.parts == weights.embed.parts
    table = Table(
        torch.empty((weights.embed.rows, weights.embed.columns), dtype=DTYPE, device=META)
    )

    def change(role: str, weight: Weight) -> Prepared:
        if role == "embed":
            return table
        if role in VECTORS:
            return torch.empty(weight.columns, dtype=torch.float32, device=META)
        if role == "head" and tied:
            return dense_matrix(table.data, META, DTYPE)
        return _shape_matrix(role, weight, quantization, weight is weights.layers[-1].down)

    return weights.map(change)


def _shape_matrix(role: str, weight: Weight, quantization: str, last: bool) -> Matrix:
    rows, columns = weight.rows, weight.columns
    bias = _empty(rows, dtype=torch.float32) if weight.bias else None
    format = kept_format(weight)
    parts = [part for part in weight.parts if format and isinstance(part, QuantizedTensor)]
    group = FP8_BLOCK if format is MatrixFormat.FP8_BLOCK else 0
    if format is None and (made := made_format(role, weight, quantization, last)) is not None:
        format, group = made
    if format is MatrixFormat.INT4:
        return _shape_int4(parts, rows, columns, bias, role == "gate_up")
    scales: torch.Tensor | None = None
    if format is MatrixFormat.FP8_BLOCK:
        scales = _empty(rows, -(-columns // group), dtype=torch.float32)
    elif format is not None:
        scales = _empty(rows, dtype=torch.float32)
    return Matrix(
        format=format or MatrixFormat.BF16,
        rows=rows,
        columns=columns,
        data=_empty(rows, columns, dtype=DTYPE if format is None else torch.uint8),
        scales=scales,
        group=group,
        bias=bias,
        gated=role == "gate_up",
    )


def _shape_int4(
    parts: list[QuantizedTensor],
    rows: int,
    columns: int,
    bias: torch.Tensor | None,
    gated: bool,
) -> Matrix:
    group = int4_group(parts[0].group_columns if parts else columns)
    chunks = -(-columns // INT4_CHUNK)
    scale_dtype = _scale_dtype(parts)
    order = parts[0].look().permutation if parts else None
    return Matrix(
        format=MatrixFormat.INT4,
        rows=rows,
        columns=columns,
        data=_empty(chunks, rows, INT4_CHUNK // 4, dtype=torch.int16),
        factors=_empty(
            chunks * (INT4_CHUNK // group),
            rows,
            dtype=torch.int64 if scale_dtype == torch.float32 else torch.int32,
        ),
        group=group,
        scale_dtype=scale_dtype,
        permutation=None if order is None else _empty(columns, dtype=torch.int32),
        bias=bias,
        gated=gated,
    )


def _scale_dtype(parts: list[QuantizedTensor]) -> torch.dtype:
    """The type of INT4 scales. Scales that are float32 in the file are assumed to need it: finding
    out would take reading all of them."""
    found = {s.format.name for part in parts for s in part.sources if s.format.name in FLOATS}
    if not found:  # quantized by us
        return torch.float16
    return torch.float32 if len(found) > 1 else FLOATS[found.pop()]


def _empty(*shape: int, dtype: torch.dtype) -> torch.Tensor:
    return torch.empty(shape, dtype=dtype, device=META)
