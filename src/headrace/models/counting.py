"""Ops that compute nothing and count everything: FLOPs and bytes of one step.

Runs the same decoder as every backend, so that planner and engine can't disagree about what a model
does. A tensor is only its shape; a weight is its shape and its bytes. Knows no machine: the planner
estimates how long these FLOPs and bytes take.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from headrace.models.decoder import DecoderWeights, hidden_states, logits
from headrace.models.refs import WeightRef
from headrace.models.spec import Activation, AttentionSpec, ModelSpec

Shape = tuple[int, int]  # rows, width

_VECTOR_VALUE_BYTES = 4  # norms and biases are float32 everywhere


@dataclass(frozen=True, slots=True, kw_only=True)
class Chunk:
    """One sequence's part of a step: computes `tokens` after `start` tokens that are in blocks."""

    tokens: int
    start: int = 0
    wanted: int = 1  # rows whose logits are computed


@dataclass(frozen=True, slots=True)
class WeightSize:
    rows: int
    columns: int
    bytes: float  # without its bias
    bias_bytes: float = 0.0


@dataclass(slots=True, kw_only=True)
class StepCount:
    """The cost of a step. Bytes are those that must move at least once: weights and blocks are
    read, and each operation reads its inputs and writes its result."""

    matmul_flops: int = 0
    attention_flops: int = 0
    weight_bytes: float = 0.0
    activation_bytes: float = 0.0
    kv_read_bytes: float = 0.0
    kv_written_bytes: float = 0.0

    @property
    def flops(self) -> int:
        return self.matmul_flops + self.attention_flops


def size_weights(
    refs: DecoderWeights[WeightRef], bytes_per_value: float
) -> DecoderWeights[WeightSize]:
    """Each weight's size if all matrices take `bytes_per_value`."""

    def size(_role: str, ref: WeightRef) -> WeightSize:
        bias = sum(part.shape[0] for part in ref.bias) * _VECTOR_VALUE_BYTES
        if len(ref.parts[0].shape) == 1:
            values = ref.parts[0].shape[0]
            return WeightSize(1, values, values * _VECTOR_VALUE_BYTES)
        rows, columns = sum(part.shape[0] for part in ref.parts), ref.parts[0].shape[1]
        return WeightSize(rows, columns, rows * columns * bytes_per_value, bias)

    return refs.map(size)


def count_step(
    spec: ModelSpec,
    weights: DecoderWeights[WeightSize],
    chunks: Sequence[Chunk],
    *,
    kv_value_bytes: float = 2.0,
    activation_value_bytes: float = 4.0,
) -> StepCount:
    """Count one step of these chunks."""
    ops = CountingOps(chunks, kv_value_bytes, activation_value_bytes)
    x = hidden_states(ops, spec, weights)
    if any(chunk.wanted for chunk in chunks):
        logits(ops, spec, weights, x)
    return ops.count


class CountingOps:
    def __init__(
        self, chunks: Sequence[Chunk], kv_value_bytes: float, activation_value_bytes: float
    ) -> None:
        self.count = StepCount()
        self._chunks = chunks
        self._kv_value_bytes = kv_value_bytes
        self._activation_value_bytes = activation_value_bytes

    def embed(self, table: WeightSize, scale: float) -> Shape:
        n = sum(chunk.tokens for chunk in self._chunks)
        self.count.weight_bytes += n * table.bytes / table.rows
        return self._write((n, table.columns))

    def norm(self, x: Shape, weight: WeightSize, eps: float) -> Shape:
        self._read(x)
        self.count.weight_bytes += weight.bytes
        return self._write(x)

    def linear(self, x: Shape, weight: WeightSize) -> Shape:
        self._read(x)
        self.count.matmul_flops += 2 * x[0] * weight.rows * weight.columns
        self.count.weight_bytes += weight.bytes + weight.bias_bytes
        return self._write((x[0], weight.rows))

    def head_norm(
        self, qkv: Shape, q_weight: WeightSize, k_weight: WeightSize, attention: AttentionSpec
    ) -> Shape:
        self.count.weight_bytes += q_weight.bytes + k_weight.bytes
        return self._turn_heads(qkv, attention)

    def rope(self, qkv: Shape, attention: AttentionSpec) -> Shape:
        return self._turn_heads(qkv, attention)

    def attention(self, qkv: Shape, attention: AttentionSpec) -> Shape:
        self._read(qkv)
        token_bytes = 2 * attention.kv_width * self._kv_value_bytes
        for chunk in self._chunks:
            # A query and a key, a score and a value: two multiply-adds for each value of a head.
            pairs = _pairs(chunk, attention.window)
            self.count.attention_flops += 4 * pairs * attention.q_width
            self.count.kv_read_bytes += _span(chunk, attention.window) * token_bytes
            self.count.kv_written_bytes += chunk.tokens * token_bytes
        return self._write((qkv[0], attention.q_width))

    def gated(self, gate_up: Shape, activation: Activation) -> Shape:
        self._read(gate_up)
        return self._write((gate_up[0], gate_up[1] // 2))

    def add(self, x: Shape, y: Shape) -> Shape:
        self._read(x)
        self._read(y)
        return self._write(x)

    def select(self, x: Shape) -> Shape:
        return sum(chunk.wanted for chunk in self._chunks), x[1]

    def softcap(self, x: Shape, cap: float) -> Shape:
        self._read(x)
        return self._write(x)

    def _turn_heads(self, qkv: Shape, attention: AttentionSpec) -> Shape:
        """Queries and keys are read and written in place; values are not changed."""
        turned = (qkv[0], attention.q_width + attention.kv_width)
        self._read(turned)
        self._write(turned)
        return qkv

    def _read(self, x: Shape) -> None:
        self.count.activation_bytes += x[0] * x[1] * self._activation_value_bytes

    def _write(self, x: Shape) -> Shape:
        self.count.activation_bytes += x[0] * x[1] * self._activation_value_bytes
        return x


def _pairs(chunk: Chunk, window: int | None) -> int:
    """How many (query, key) pairs are seen: token i of the chunk sees start + i + 1 keys, or the
    window's."""
    first, last = chunk.start + 1, chunk.start + chunk.tokens
    if window is None or last <= window:
        return (first + last) * chunk.tokens // 2
    growing = max(0, window - first)  # tokens that see fewer keys than the window holds
    return (first + window - 1) * growing // 2 + (chunk.tokens - growing) * window


def _span(chunk: Chunk, window: int | None) -> int:
    """How many positions of the blocks a chunk reads, each once."""
    first = 0 if window is None else max(0, chunk.start - window + 1)
    return chunk.start + chunk.tokens - first
