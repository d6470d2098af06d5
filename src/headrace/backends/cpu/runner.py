"""The CPU runner: a model's weights packed for the native kernels, and plans run over them.

Turns a StepPlan into flat arrays, makes one native call, and turns arrays back into a StepResult.
Does not decide anything: block tables and draws come with the plan.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable

import numpy as np

from headrace.backends.cpu import _native
from headrace.backends.cpu.draws import DrawArrays
from headrace.backends.cpu.ops import Prepared, RecordingOps
from headrace.core.step import EntryResult, RunnerLimits, StepEntry, StepPlan, StepResult
from headrace.models.decoder import DecoderWeights, hidden_states, logits
from headrace.models.spec import ModelSpec
from headrace.weights.dequantize import dequantize
from headrace.weights.tensor import Tensor
from headrace.weights.weight import Weight

BLOCK_TOKENS = 16  # fixed by the kernels: a block's tokens are the lanes of a vector
LOGIT_ROWS = 32  # rows whose logits exist at one time

KV_BYTES_PER_VALUE = {"f32": 4, "f16": 2}

_VECTORS = frozenset(
    ("attn_norm", "mlp_norm", "q_norm", "k_norm", "attn_post_norm", "mlp_post_norm", "final_norm")
)


class CpuRunner:
    """Implements `core.step.Runner`."""

    def __init__(
        self,
        spec: ModelSpec,
        weights: DecoderWeights[Weight],
        *,
        total_blocks: int,
        max_batch_tokens: int = 512,
        max_sequences: int = 64,
        context_tokens: int | None = None,
        threads: int = 1,
        kv_type: str = "f16",
        path: str | None = None,
        release: Callable[[Tensor], None] | None = None,
    ) -> None:
        context = min(context_tokens or spec.context_tokens, spec.context_tokens)
        self._limits = RunnerLimits(
            max_batch_tokens=max_batch_tokens,
            max_sequences=max_sequences,
            total_blocks=total_blocks,
            block_tokens=BLOCK_TOKENS,
            context_tokens=context,
        )
        self._pool = _native.Pool(threads)
        shape = spec.attention[0]
        self._kv = _native.KvPool(
            total_blocks, spec.layers, shape.kv_heads, shape.head_dim, kv_type
        )
        self._program = _native.Program(
            self._pool, self._kv, max_batch_tokens, LOGIT_ROWS, context, path
        )
        prepared = weights.map(lambda role, weight: _prepare(role, weight, threads, release))
        ops = RecordingOps()
        result = logits(ops, spec, prepared, hidden_states(ops, spec, prepared))
        self._program.finish(ops.emit(self._program, result))
        self._results: deque[StepResult] = deque()
        self.weight_bytes = _packed_bytes(prepared)

    @property
    def limits(self) -> RunnerLimits:
        return self._limits

    @property
    def kv_bytes(self) -> int:
        return self._kv.bytes

    @property
    def activation_bytes(self) -> int:
        return self._program.activation_bytes

    def submit(self, plan: StepPlan) -> None:
        started = time.perf_counter()
        arrays = _StepArrays(plan.entries)
        arrays.run(self._program)
        entries = arrays.results(plan.entries)
        self._results.append(StepResult(entries=entries, compute_s=time.perf_counter() - started))

    def collect(self) -> StepResult:
        return self._results.popleft()


class _StepArrays:
    """A plan as the flat arrays that the native program reads, and those that it writes."""

    def __init__(self, entries: list[StepEntry]) -> None:
        tokens: list[int] = []
        positions: list[int] = []
        owners: list[int] = []
        for number, entry in enumerate(entries):
            count = len(entry.token_ids)
            tokens += entry.token_ids
            positions += range(entry.start, entry.start + count)
            owners += [number] * count
        width = max(len(entry.block_table) for entry in entries)
        tables = np.zeros((len(entries), width), np.int32)
        for number, entry in enumerate(entries):
            tables[number, : len(entry.block_table)] = entry.block_table
        self.inputs = (
            np.array(tokens, np.int32),
            np.array(positions, np.int32),
            np.array(owners, np.int32),
            tables,
        )
        self.draws = DrawArrays(entries)

    def run(self, program: _native.Program) -> None:
        self.draws.run(program, *self.inputs)

    def results(self, entries: list[StepEntry]) -> list[EntryResult]:
        return self.draws.results(entries)


def _prepare(
    role: str, weight: Weight, threads: int, release: Callable[[Tensor], None] | None
) -> Prepared:
    if role in _VECTORS:
        return dequantize(weight.parts[0]).reshape(-1) + np.float32(weight.offset)
    tables = [_table(part) for part in weight.parts]
    if role == "embed":  # looked up row by row in the mapped file
        return tables[0]
    bias = None
    if weight.bias:
        bias = np.concatenate([dequantize(part).reshape(-1) for part in weight.bias])
    matrix = _native.Matrix(tables, bias, threads)
    if release is not None:
        for part in weight.parts:
            release(part)
    return matrix


def _table(tensor: Tensor) -> _native.Table:
    rows, columns = tensor.shape
    data = np.frombuffer(tensor.data, np.uint8)
    return _native.Table(tensor.format.name, rows, columns, data)


def _packed_bytes(weights: DecoderWeights[Prepared]) -> int:
    total = 0

    def count(role: str, weight: Prepared) -> None:
        nonlocal total
        if isinstance(weight, _native.Matrix):
            total += weight.bytes
        elif isinstance(weight, np.ndarray):
            total += weight.nbytes

    weights.map(count)
    return total
