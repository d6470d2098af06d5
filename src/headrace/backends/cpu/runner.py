"""The CPU runner: a model's weights packed for the native kernels, and plans run over them.

Turns a StepPlan into flat arrays, makes one native call, and turns arrays back into a StepResult.
Does not decide anything: block tables and draws come with the plan. A plan's tokens, tables and
copies are read when it is submitted, so that a block table may grow afterwards; with `overlap` it
is computed by a thread of the runner's own, while the next one is being written.
"""

from __future__ import annotations

from collections.abc import Callable, Collection
from types import TracebackType

import numpy as np
from numpy.typing import NDArray

from headrace.backends.cpu import _native
from headrace.backends.cpu.draws import DrawArrays
from headrace.backends.cpu.flight import (
    DrawnTokens,
    Flight,
    check_previous,
    continue_from,
    previous_rows,
)
from headrace.backends.cpu.kv import DEFAULT_KV_DTYPE, check_kv_dtype
from headrace.backends.cpu.ops import Prepared, RecordingOps
from headrace.backends.cpu.plain import PlainStep, is_plain
from headrace.backends.cpu.pooling import Pooling
from headrace.backends.cpu.profile import OperationProfile, read_profile
from headrace.core.step import (
    Drawn,
    EntryResult,
    RunnerLimits,
    StepEntry,
    StepPlan,
    StepResult,
)
from headrace.models.decoder import DecoderWeights, hidden_states, logits
from headrace.models.spec import ModelSpec
from headrace.weights.dequantize import dequantize, plain_tensor
from headrace.weights.dummy import DummyTensor
from headrace.weights.methods.quantized import QuantizedTensor
from headrace.weights.tensor import Tensor
from headrace.weights.weight import Part, Weight

BLOCK_TOKENS = 16  # fixed by the kernels: a block's tokens are the lanes of a vector
LOGIT_ROWS = 32  # rows whose logits exist at one time

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
        kv_dtype: str = DEFAULT_KV_DTYPE,
        overlap: bool = False,
        path: str | None = None,
        release: Callable[[Tensor], None] | None = None,
    ) -> None:
        check_kv_dtype(kv_dtype)
        context = min(context_tokens or spec.context_tokens, spec.context_tokens)
        self._limits = RunnerLimits(
            max_batch_tokens=max_batch_tokens,
            max_sequences=max_sequences,
            total_blocks=total_blocks,
            block_tokens=BLOCK_TOKENS,
            context_tokens=context,
            steps_in_flight=2 if overlap else 1,
        )
        self._pool = _native.Pool(threads)
        shape = spec.attention[0]
        self._kv = _native.KvPool(
            total_blocks, spec.layers, shape.kv_heads, shape.head_dim, kv_dtype
        )
        self._program = _native.Program(
            self._pool, self._kv, max_batch_tokens, LOGIT_ROWS, context, path
        )
        prepared = weights.map(lambda role, weight: _prepare(role, weight, threads, release))
        ops = RecordingOps()
        hidden = hidden_states(ops, spec, prepared)
        result = logits(ops, spec, prepared, hidden)
        self._program.finish(ops.emit(self._program, result))
        self._pooling = Pooling(
            self._program, ops.slots[hidden], prepared.final_norm, spec.norm_eps
        )
        self._flight = Flight(self._limits.steps_in_flight)
        self.weight_bytes = _packed_bytes(prepared)

    @property
    def limits(self) -> RunnerLimits:
        return self._limits

    @property
    def progress(self) -> int:
        return self._program.progress

    @property
    def threads(self) -> int:
        return self._pool.threads

    def take_mean_threads(self) -> float:
        """How many of them computed together since the last time: fewer where the machine had
        something else to do. Not while a step is in flight."""
        return self._pool.take_mean_members()

    @property
    def kv_bytes(self) -> int:
        return self._kv.bytes

    @property
    def activation_bytes(self) -> int:
        return self._program.activation_bytes

    @property
    def native_s(self) -> float:
        """What the last step took in native code; not while one is in flight."""
        return self._program.run_s

    def submit(self, plan: StepPlan) -> None:
        self._flight.check_open()
        check_previous(plan, self._limits)
        if self._limits.steps_in_flight == 1 and is_plain(plan):
            self._flight.submit(PlainStep(self._program, plan.entries))
        else:
            self._flight.submit(_Step(self._program, self._kv, self._pooling, plan))

    def collect(self) -> StepResult:
        return self._flight.collect()

    def profile(self, on: bool) -> None:
        """Time each operation of the steps to come, or no longer."""
        self._program.profile(on)

    def take_profile(self) -> list[OperationProfile]:
        """Where the time of the steps since the last time went; not while one is in flight."""
        return read_profile(self._program)

    def close(self) -> None:
        """End the threads and let go of the memory; results not collected are lost."""
        self._flight.close()
        # Now, not with the last reference to this runner: what an ending interpreter still holds it
        # never frees, and the native module tells of every object that it finds left.
        for name in ("_pooling", "_program", "_kv", "_pool"):
            self.__dict__.pop(name, None)

    def __enter__(self) -> CpuRunner:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.close()


class _Step:
    """A plan, read; implements `flight.ReadStep`."""

    def __init__(
        self, program: _native.Program, kv: _native.KvPool, pooling: Pooling, plan: StepPlan
    ) -> None:
        self._program = program
        self._kv = kv
        self._pooling = pooling
        self._copies = np.array(plan.copies, np.int32) if plan.copies else None
        self._entries = list(plan.entries)
        self._pools = any(entry.pool for entry in self._entries)
        self._arrays = _StepArrays(self._entries) if self._entries else None
        self._unknown = previous_rows(self._entries)
        self.sample_s = 0.0

    @property
    def drawing(self) -> Collection[int]:
        return () if self._arrays is None else self._arrays.draws.drawing

    def compute(self, previous: DrawnTokens) -> Drawn | list[EntryResult]:
        tokens, failed = continue_from(previous, self._unknown)
        if self._copies is not None:
            self._kv.copy(self._copies)
        if self._arrays is None:
            return []
        for row, token in tokens:
            self._arrays.inputs[0][row] = token
        self._arrays.run(self._program)
        self.sample_s = self._program.sample_s
        if not self._pools and not failed:
            drawn = self._arrays.draws.drawn(self._entries)
            if drawn is not None:
                return drawn
        results = self._arrays.draws.results(self._entries)
        self._pooling.add(self._entries, results)
        for number, error in failed:
            sequence_id = self._entries[number].sequence_id
            results[number] = EntryResult(sequence_id=sequence_id, error=error)
        return results


class _StepArrays:
    """A plan as the flat arrays that the native program reads, and those that it writes."""

    def __init__(self, entries: list[StepEntry]) -> None:
        columns = np.array(_flatten(entries), np.int32)
        tables = [entry.block_table for entry in entries]
        self.inputs = (columns[0], columns[1], columns[2], _even(tables))
        self.draws = DrawArrays(entries)

    def run(self, program: _native.Program) -> None:
        self.draws.run(program, *self.inputs)


def _flatten(entries: list[StepEntry]) -> tuple[list[int], list[int], list[int]]:
    """Of every row: its token, its position, the number of its entry."""
    tokens: list[int] = []
    positions: list[int] = []
    owners: list[int] = []
    for number, entry in enumerate(entries):
        count = len(entry.token_ids)
        tokens += entry.token_ids
        positions += range(entry.start, entry.start + count)
        owners += [number] * count
    return tokens, positions, owners


def _even(tables: list[list[int]]) -> NDArray[np.int32]:
    """One row a table, the shorter ones filled up with 0."""
    width = max(map(len, tables))
    if all(len(table) == width for table in tables):
        return np.array(tables, np.int32)
    even = np.zeros((len(tables), width), np.int32)
    for row, table in zip(even, tables, strict=True):
        row[: len(table)] = table
    return even


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
            for source in _sources(part):
                release(source)
    return matrix


def _sources(part: Part) -> tuple[Tensor, ...]:
    """The tensors of the file that a part was read from."""
    if isinstance(part, QuantizedTensor):
        return part.sources
    return () if isinstance(part, DummyTensor) else (part,)


def _table(part: Part) -> _native.Table:
    tensor = plain_tensor(part)
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
