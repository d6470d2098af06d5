"""The CPU runner: a model's weights packed for the native kernels, and plans run over them.

A plan's columns go to one native call, and its results come back by row. Decides nothing: block
tables and draws come with the plan. With `overlap` a plan is computed by the runner's own thread
while the next one is being written.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import replace
from functools import partial

import numpy as np

from headrace.backends.cpu import _native
from headrace.backends.cpu.adjustments import adjustments_of
from headrace.backends.cpu.kv import DEFAULT_KV_DTYPE, check_kv_dtype
from headrace.backends.cpu.ops import Prepared, emit
from headrace.backends.cpu.pooling import Pooling
from headrace.backends.cpu.profile import OperationProfile, read_profile
from headrace.backends.cpu.worker import Worker
from headrace.backends.shared.answers import answer_rows
from headrace.backends.shared.flight import (
    Continued,
    Flight,
    fail_rows,
    failed_rows,
    tokens_before,
)
from headrace.backends.shared.recorder import record
from headrace.core.closes import Closes
from headrace.core.step import Contents, RunnerLimits, StepPlan, StepResult
from headrace.models.decoder import DecoderWeights
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


class CpuRunner(Closes):
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
            draws_drafts=True,
        )
        self._pool = _native.Pool(threads)
        shape = spec.attention[0]
        self._kv = _native.KvPool(
            total_blocks, spec.layers, shape.kv_heads, shape.head_dim, kv_dtype
        )
        # kernels/program.h has the order within a block.
        dims = f"{spec.layers}x{shape.kv_heads}x{shape.head_dim}"
        self._layout = f"cpu {kv_dtype} {dims} by {BLOCK_TOKENS}"
        self._program = _native.Program(
            self._pool, self._kv, max_batch_tokens, LOGIT_ROWS, context, path
        )
        prepared = weights.map(lambda role, weight: _prepare(role, weight, threads, release))
        instructions, hidden, result = record(spec, prepared)
        slots = emit(self._program, instructions, result)
        self._program.finish(slots[result])
        assert prepared.final_norm is not None  # it has no stages
        self._pooling = Pooling(self._program, slots[hidden], prepared.final_norm, spec.norm_eps)
        self._flight: Flight[Future[StepResult] | StepResult] = Flight(
            self._limits, spec.vocab_size
        )
        self._before: StepResult | None = None  # only used by the computing thread
        self._worker = Worker(self) if overlap else None
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
        """The mean number of threads that computed at once since the last call: fewer if the
        machine had other work to do. Not while a step is in flight."""
        return self._pool.take_mean_members()

    @property
    def kv_bytes(self) -> int:
        return self._kv.bytes

    @property
    def activation_bytes(self) -> int:
        return self._program.activation_bytes

    @property
    def native_s(self) -> float:
        """Seconds that the last step took in native code. Not while a step is in flight."""
        return self._program.run_s

    def submit(self, plan: StepPlan) -> None:
        continued = self._flight.check(plan)
        asked = [
            (row, extra.targets or [], extra.top_logprobs)
            for row, extra in sorted(plan.extras.items())
            if extra.targets or extra.top_logprobs
        ]
        adjustments = adjustments_of(plan)
        if self._worker is None:
            result = self._compute(plan, continued, asked, adjustments)
            self._flight.add(plan, result)
            return
        # Histories are shared with the plan's author, and have been read at this point.
        tables = [list(table) for table in plan.tables]
        plan = replace(plan, tables=tables, token_ids=list(plan.token_ids))
        work = partial(self._compute, plan, continued, asked, adjustments)
        self._flight.add(plan, self._worker.submit(work))

    def collect(self) -> StepResult:
        oldest = self._flight.oldest
        if isinstance(oldest, Future):
            oldest.exception()  # waits; Ctrl-C in here leaves the step in flight
        self._flight.take()
        return oldest.result() if isinstance(oldest, Future) else oldest

    def _compute(
        self,
        plan: StepPlan,
        continued: Continued,
        asked: list[tuple[int, list[int], int]],
        adjustments: _native.Adjustments | None,
    ) -> StepResult:
        began = time.perf_counter()
        before, self._before = self._before, None  # if this step raises
        if plan.copies:
            self._kv.copy(np.array(plan.copies, np.int32))
        if not len(plan):
            self._before = StepResult(tokens=[], logprobs=[])
            return self._before
        for at, token in tokens_before(continued, before):
            plan.token_ids[at] = token
        tokens, logprobs, tops = self._program.run(
            plan.token_ids,
            plan.counts,
            plan.starts,
            plan.tables,
            [None if draw is None else draw.filters for draw in plan.draws],
            plan.uniforms,
            asked,
            adjustments,
            **_drafted(plan),
        )
        self._before = result = answer_rows(plan, tokens, logprobs, tops)
        if plan.extras:
            self._pooling.add(plan, result)
        fail_rows(result, failed_rows(continued, before))
        result.compute_s = time.perf_counter() - began
        result.sample_s = self._program.sample_s
        return result

    @property
    def block_bytes(self) -> int:
        return self._kv.block_bytes

    @property
    def block_layout(self) -> str:
        return self._layout

    def read_blocks(self, blocks: Sequence[int]) -> list[memoryview]:
        copies = np.empty((len(blocks), self.block_bytes), np.uint8)
        for block, copy in zip(blocks, copies, strict=True):
            self._kv.read(block, copy)
        return [copy.data for copy in copies]

    def write_blocks(self, blocks: Sequence[int], contents: Sequence[Contents]) -> None:
        for block, content in zip(blocks, contents, strict=True):
            self._kv.write(block, np.frombuffer(content, np.uint8))

    def profile(self, on: bool) -> None:
        """Turn the timing of operations on or off, for the following steps."""
        self._program.profile(on)

    def take_profile(self) -> list[OperationProfile]:
        """Where the time of steps since the last call went. Not while a step is in flight."""
        return read_profile(self._program)

    def close(self) -> None:
        """End the threads and free the memory; results that were not collected are lost."""
        for step in self._flight:
            if isinstance(step, Future):
                step.cancel()
        self._flight.close()
        if self._worker is not None:
            self._worker.end()
        # Free these now, not with the last reference to this runner: an exiting interpreter never
        # frees what it still holds, and the native module warns about every leaked object.
        for name in ("_pooling", "_program", "_kv", "_pool"):
            self.__dict__.pop(name, None)


def _drafted(plan: StepPlan) -> dict[str, list[tuple[int, list[float]]]]:
    """The rows with drafts, as an argument that most steps do without."""
    if not plan.drafts:
        return {}
    return {"drafted": [(row, plan.drafts[row].uniforms) for row in sorted(plan.drafts)]}


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
