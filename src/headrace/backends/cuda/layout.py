"""How many bytes the CUDA backend will allocate, computed beforehand, with neither a GPU nor torch.

The sizes of buffers come from the same functions by which they are allocated (formats.py,
workspace_sizes.py, draw_sizes.py, step/shapes.py, attention/plan.py); what is added up here is
tested against the runner's own tensors, and compared with them at every start. Of quantized
checkpoints it reads the small tensors that decide whether kernels can use the codes as they are; it
reads no other weights.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace

from headrace.backends.cuda.attention.plan import attention_windows, work_shape
from headrace.backends.cuda.device import FP8_CAPABILITY, Gpu
from headrace.backends.cuda.draws.draw_sizes import (
    ROWS_TOGETHER,
    SCRATCH_ROW_BYTES,
    sampler_bytes,
)
from headrace.backends.cuda.kv_sizes import check_kv_dtype
from headrace.backends.cuda.ops import fuse
from headrace.backends.cuda.products.formats import (
    FP8_BLOCK,
    VECTORS,
    MatrixFormat,
    MatrixSize,
    int4_group,
    kept_format,
    made_format,
)
from headrace.backends.cuda.products.workspace_sizes import WorkspaceSizes
from headrace.backends.cuda.step.shapes import (
    GRAPH_ROWS,
    LAUNCH_BYTES,
    MOST_GRAPHS,
    logit_rows,
    packed_ints,
    row_buckets,
)
from headrace.backends.shared.recorder import Value, assign_slots, record, slot_values
from headrace.core.config import GraphMode, StepSizes
from headrace.core.errors import ConfigError
from headrace.core.sizes import MIB
from headrace.models.decoder import DecoderWeights
from headrace.models.spec import ModelSpec
from headrace.weights.methods.quantized import QuantizedTensor
from headrace.weights.weight import Weight, are_tied

VALUE_BYTES = 2  # of activations, embeddings and dense matrices: bf16
LOGIT_BYTES = VECTOR_BYTES = 4
LAYER_LAUNCHES = 9  # per layer, an upper estimate
_SCALE_BYTES = {"F32": 4, "F16": 2, "BF16": 2}


@dataclass(frozen=True, slots=True)
class TableSize:
    """The embedding: [vocab, hidden]"""

    rows: int
    columns: int

    @property
    def bytes(self) -> int:
        return self.rows * self.columns * VALUE_BYTES


@dataclass(frozen=True, slots=True)
class VectorSize:
    values: int

    @property
    def bytes(self) -> int:
        return self.values * VECTOR_BYTES


@dataclass(frozen=True, slots=True)
class SharedSize:
    """The output layer of a model whose embedding is used for it: takes no memory of its own."""

    matrix: MatrixSize

    @property
    def outputs(self) -> int:
        return self.matrix.outputs

    @property
    def bytes(self) -> int:
        return 0


Size = MatrixSize | TableSize | VectorSize | SharedSize  # of a weight on the device


def graph_bytes(
    spec: ModelSpec, graphs: GraphMode, max_batch_tokens: int, *, has_drafts: bool = False
) -> int:
    """An estimate for as many CUDA graphs as a server captures over time: of decode steps, of
    others, and of steps with drafts by the size of attention's tile."""
    if graphs is GraphMode.OFF:
        return 0
    buckets = len(row_buckets(min(GRAPH_ROWS, max_batch_tokens)))
    launches = LAYER_LAUNCHES * spec.layers + 8
    return min((5 if has_drafts else 2) * buckets, MOST_GRAPHS) * launches * LAUNCH_BYTES


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


def check_fp8(gpu: Gpu, shapes: DecoderWeights[Size], kv_dtype: str) -> None:
    """Refuse FP8 on a GPU without it, before a kernel fails to compile."""
    if gpu.capability >= FP8_CAPABILITY:
        return
    has = f"{gpu.name} has compute capability {'.'.join(map(str, gpu.capability))}"
    needed = f"FP8 needs {'.'.join(map(str, FP8_CAPABILITY))} or newer"
    if kv_dtype == "fp8":
        raise ConfigError(f"{has}; {needed}.", "Set --kv-dtype bf16.", param="kv_dtype")
    formats = {matrix.format for matrix in matrices_of(shapes)}
    if formats & {MatrixFormat.FP8, MatrixFormat.FP8_BLOCK}:
        raise ConfigError(
            f"{has}; {needed}, and the layers would be FP8.",
            "Set --quantization int8, or use a checkpoint in BF16, AWQ or GPTQ.",
            param="quantization",
        )


@dataclass(frozen=True, slots=True)
class StepMemory:
    """What a step's memory depends on besides a model's shape: made once, asked for many sizes."""

    spec: ModelSpec
    slots: tuple[Value, ...]
    matrices: tuple[MatrixSize, ...]
    rope_values: int  # of the tables, for one position

    @classmethod
    def of(cls, spec: ModelSpec, shapes: DecoderWeights[Size]) -> StepMemory:
        ropes = {attention.rope for attention in spec.attention}
        return cls(
            spec,
            tuple(_slots(spec, shapes)),
            tuple(dict.fromkeys(matrices_of(shapes))),
            sum(2 * len(rope.inv_freq) for rope in ropes),
        )

    def bytes(
        self,
        sizes: StepSizes,
        multiprocessors: int,
        max_batch_tokens: int,
        context_tokens: int,
        *,
        batch_invariant: bool = False,
    ) -> int:
        """Buffers, workspaces, inputs and tables of the largest step."""
        spec, sequences = self.spec, sizes.max_sequences
        shape = work_shape(spec, sequences, multiprocessors, batch_invariant)
        rows = logit_rows(max_batch_tokens, sequences)
        head_dim, windows = spec.attention[0].head_dim, len(attention_windows(spec))
        buffers = sum(
            value.width
            * (rows if value.head else max_batch_tokens)
            * (LOGIT_BYTES if value.is_logits else VALUE_BYTES)
            for value in self.slots
        )
        tables = 4 * self.rope_values * context_tokens
        attention = 4 * sum(shape.workspace(head_dim))
        products = WorkspaceSizes.of(
            self.matrices, max(max_batch_tokens, rows), normed_columns=spec.hidden_size
        ).bytes(VALUE_BYTES)
        blocks = -(-context_tokens // sizes.block_tokens)
        packed = packed_ints(shape, max_batch_tokens, rows, head_dim, windows)
        inputs = 4 * (packed + max_batch_tokens + sequences * blocks)
        wanted = max_batch_tokens + sequences
        draws = sampler_bytes(rows, wanted, sequences, spec.vocab_size)
        return buffers + tables + attention + products + inputs + draws


def activation_bytes(
    spec: ModelSpec,
    shapes: DecoderWeights[Size],
    sizes: StepSizes,
    multiprocessors: int,
    max_batch_tokens: int,
    context_tokens: int,
    *,
    batch_invariant: bool = False,
) -> int:
    """Buffers, workspaces, inputs and tables of the largest step."""
    return StepMemory.of(spec, shapes).bytes(
        sizes, multiprocessors, max_batch_tokens, context_tokens, batch_invariant=batch_invariant
    )


def scratch_bytes(spec: ModelSpec, max_sequences: int) -> int:
    """Temporary memory: rows that are being drawn from, and torch's workspace."""
    return SCRATCH_ROW_BYTES * spec.vocab_size * min(ROWS_TOGETHER, max_sequences) + 64 * MIB


def weight_bytes(shapes: DecoderWeights[Size]) -> int:
    """All weights on the device."""
    total = 0

    def add(_role: str, size: Size) -> None:
        nonlocal total
        total += size.bytes

    shapes.map(add)
    return total


def matrices_of(shapes: DecoderWeights[Size]) -> list[MatrixSize]:
    found: list[MatrixSize] = []

    def look(_role: str, size: Size) -> None:
        if isinstance(size, SharedSize):
            size = size.matrix
        if isinstance(size, MatrixSize):
            found.append(size)

    shapes.map(look)
    return found


def _slots(spec: ModelSpec, shapes: DecoderWeights[Size]) -> list[Value]:
    """A value of each buffer. Buffers are free again after each layer, so layers with the same
    widths need the same ones: one of each kind is recorded."""
    kinds: dict[object, int] = {}
    for number, (attention, layer) in enumerate(zip(spec.attention, shapes.layers, strict=True)):
        widths = (attention.qkv_width, attention.q_width, layer.gate_up, layer.down)
        kinds.setdefault(widths, number)
    some = tuple(kinds.values())
    few = replace(spec, attention=tuple(spec.attention[i] for i in some))
    layers = [shapes.layers[i] for i in some]
    instructions, _, result = record(few, replace(shapes, layers=layers))
    return slot_values(assign_slots(fuse(instructions, result), result))


def shape_weights(weights: DecoderWeights[Weight], quantization: str) -> DecoderWeights[Size]:
    """The sizes of weights as `loading.Loader` would prepare them."""
    tied = are_tied(weights.embed, weights.head)

    def change(role: str, weight: Weight) -> Size:
        if role == "embed":
            return TableSize(weight.rows, weight.columns)
        if role in VECTORS:
            return VectorSize(weight.columns)
        if role == "head" and tied:
            return SharedSize(
                MatrixSize(format=MatrixFormat.BF16, rows=weight.rows, columns=weight.columns)
            )
        return shape_matrix(role, weight, quantization, last=weight is weights.layers[-1].down)

    return weights.map(change)


def shape_matrix(role: str, weight: Weight, quantization: str, *, last: bool) -> MatrixSize:
    format = kept_format(weight)
    parts = [part for part in weight.parts if format and isinstance(part, QuantizedTensor)]
    group = FP8_BLOCK if format is MatrixFormat.FP8_BLOCK else 0
    if format is None and (made := made_format(role, weight, quantization, last)) is not None:
        format, group = made
    size = MatrixSize(
        format=format or MatrixFormat.BF16,
        rows=weight.rows,
        columns=weight.columns,
        group=group,
        has_bias=bool(weight.bias),
        gated=role == "gate_up",
    )
    if format is not MatrixFormat.INT4:
        return size
    return replace(
        size,
        group=int4_group(parts[0].group_columns if parts else weight.columns),
        scale_bytes=_scale_bytes(parts),
        is_permuted=bool(parts) and parts[0].look().permutation is not None,
    )


def _scale_bytes(parts: Iterable[QuantizedTensor]) -> int:
    """Of an INT4 scale. Scales that are float32 in the file are assumed to need it: finding out
    would take reading all of them."""
    names = (source.format.name for part in parts for source in part.sources)
    found = {name for name in names if name in _SCALE_BYTES}
    if not found:  # quantized by us
        return 2
    return 4 if len(found) > 1 else _SCALE_BYTES[found.pop()]
