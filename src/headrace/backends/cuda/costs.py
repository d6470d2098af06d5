"""What each operation of a step has to do at least: products in FLOPs, and bytes to be moved.

For profiles: an operation's time beside these says how far it is from the device's peaks. Weights
and KV blocks are counted once, and so are the rows that an operation reads and writes; what it
keeps in a workspace is not counted. Knows instructions and shapes; runs nothing.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from headrace.backends.cuda.kv_sizes import KV_VALUE_BYTES
from headrace.backends.cuda.ops import AddNormed, RotatedAttend, as_joined
from headrace.backends.cuda.products.formats import MatrixFormat
from headrace.backends.shared.recorder import (
    Embed,
    Instruction,
    Multiply,
    Norm,
    Select,
    Softcap,
    Value,
)
from headrace.models.counting_ops import Chunk
from headrace.models.mixing import pairs, span

PRODUCTS, ATTENTION, NORMS = "products", "attention", "norms"
EMBEDDING, DRAWS, INPUTS, OTHER = "embedding", "draws", "inputs and results", "other"
_ROW_VALUE_BYTES, _LOGIT_BYTES = 2, 4
# In which type the matrix units multiply a format's values; INT4 is widened to bf16.
_RATES = {
    MatrixFormat.F32: "fp32",
    MatrixFormat.F16: "fp16",
    MatrixFormat.FP8: "fp8",
    MatrixFormat.FP8_BLOCK: "fp8",
    MatrixFormat.INT8: "int8",
}
# The kernels that belong to no instruction, and those that do another thing than their instruction:
# by the beginning of a kernel's name.
_KERNELS = {
    "prepare_kernel": NORMS,
    "add_normed_kernel": NORMS,
    "_prepare_kernel": INPUTS,
    "Memcpy": INPUTS,
    "Memset": INPUTS,
    "_pieces_kernel": DRAWS,
    "_join_kernel": DRAWS,
    "_take_kernel": DRAWS,
    "_search_kernel": DRAWS,
    "spread_kernel": DRAWS,
    "count_kernel": DRAWS,
    "choose_kernel": DRAWS,
    "weigh_kernel": DRAWS,
    "_adjust_kernel": DRAWS,
    "_piece_tops_kernel": DRAWS,
    "_join_tops_kernel": DRAWS,
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Cost:
    """One instruction of a step. `rate` is the type whose peak its products are held against."""

    name: str
    group: str
    flops: float = 0.0
    bytes: float = 0.0
    rate: str = "bf16"


def group_of(kernel: str, cost: Cost | None) -> str:
    """Of a kernel by its name, else of the instruction that launched it."""
    for start, group in _KERNELS.items():
        if kernel.startswith(start):
            return group
    return OTHER if cost is None else cost.group


def cost_of(instruction: Instruction, chunks: Sequence[Chunk], kv_dtype: str) -> Cost:
    is_head = instruction.output.head
    rows = sum(chunk.wanted if is_head else chunk.tokens for chunk in chunks)
    moved = _moved_bytes(instruction, rows)
    match instruction:
        case Multiply():
            return _product(instruction, rows, moved)
        case RotatedAttend():
            return _attention(instruction, chunks, kv_dtype, moved)
        case AddNormed():
            return Cost(name="norm, add", group=NORMS, bytes=moved)
        case Norm():
            return Cost(name="norm", group=NORMS, bytes=moved)
        case Embed():
            return Cost(name="embedding", group=EMBEDDING, bytes=2 * moved)
        case Select():
            return Cost(name="select rows", group=EMBEDDING, bytes=2 * rows * _width(instruction))
        case Softcap():
            return Cost(name="softcap", group=PRODUCTS, bytes=moved)
    return Cost(name=type(instruction).__name__, group=OTHER)


def _product(instruction: Multiply, rows: int, moved: float) -> Cost:
    joined = as_joined(instruction)
    matrix = joined.matrix
    parts = ["norm"] if joined.norm is not None else []
    parts += [f"linear {matrix.columns} x {matrix.rows} {matrix.format.value}"]
    parts += ["gate"] if joined.activation is not None else []
    parts += ["add"] if len(joined.inputs) > 1 else []
    return Cost(
        name=", ".join(parts),
        group=PRODUCTS,
        flops=2.0 * rows * matrix.rows * matrix.columns,
        bytes=matrix.bytes + moved,
        rate=_RATES.get(matrix.format, "bf16"),
    )


def _attention(
    instruction: RotatedAttend, chunks: Sequence[Chunk], kv_dtype: str, moved: float
) -> Cost:
    spec = instruction.attention
    token_bytes = 2 * spec.kv_width * KV_VALUE_BYTES[kv_dtype]
    seen = sum(pairs(chunk.tokens, chunk.start, spec.window) for chunk in chunks)
    read = sum(span(chunk.tokens, chunk.start, spec.window) for chunk in chunks)
    written = sum(chunk.tokens for chunk in chunks)
    return Cost(
        name="attention" if spec.window is None else f"attention, window {spec.window}",
        group=ATTENTION,
        flops=4.0 * seen * spec.q_width,
        bytes=(read + written) * token_bytes + moved,
    )


def _moved_bytes(instruction: Instruction, rows: int) -> float:
    """Of the rows that it reads and writes."""
    values = (*instruction.inputs, instruction.output)
    return float(sum(rows * value.width * _value_bytes(value) for value in values))


def _value_bytes(value: Value) -> int:
    return _LOGIT_BYTES if value.is_logits else _ROW_VALUE_BYTES


def _width(instruction: Instruction) -> int:
    return instruction.output.width * _ROW_VALUE_BYTES
