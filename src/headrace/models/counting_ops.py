"""Ops that compute nothing and count everything: FLOPs and bytes of one step.

A tensor is only its shape; a weight is its shape and its bytes. Knows no machine: the planner
estimates how long these FLOPs and bytes take.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from headrace.models.layers import ExpertsSpec, HeadsSpec, Mixer
from headrace.models.mixing import mixing, pairs, span
from headrace.models.spec import Activation, AttentionSpec

Shape = tuple[int, int]  # rows, width


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
    copies: int = 1  # experts of this size: rows, columns and bytes are those of one


@dataclass(slots=True, kw_only=True)
class StepCount:
    """The cost of a step. Bytes are those that must move at least once: weights and blocks are
    read, and each operation reads its inputs and writes its result. Attention FLOPs are those of
    scores, index scores and recurrent states: products without weights."""

    matmul_flops: int = 0
    attention_flops: int = 0
    weight_bytes: float = 0.0
    activation_bytes: float = 0.0
    kv_read_bytes: float = 0.0
    kv_written_bytes: float = 0.0
    state_bytes: float = 0.0  # of recurrent layers: read and written
    reduced_bytes: float = 0.0  # summed over ranks
    gathered_bytes: float = 0.0  # sent to the first rank, by all others together
    sent_bytes: float = 0.0  # to the next stage

    @property
    def flops(self) -> int:
        return self.matmul_flops + self.attention_flops


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
            seen = pairs(chunk.tokens, chunk.start, attention.window)
            self.count.attention_flops += 4 * seen * attention.q_width
            read = span(chunk.tokens, chunk.start, attention.window)
            self.count.kv_read_bytes += read * token_bytes
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

    def reduce(self, x: Shape) -> Shape:
        self.count.reduced_bytes += x[0] * x[1] * self._activation_value_bytes
        return x

    def gather(self, x: Shape, width: int) -> Shape:
        self.count.gathered_bytes += x[0] * (width - x[1]) * self._activation_value_bytes
        return x[0], width

    def receive(self, width: int) -> Shape:
        return self._write((sum(chunk.tokens for chunk in self._chunks), width))

    def send(self, x: Shape) -> Shape:
        self.count.sent_bytes += x[0] * x[1] * self._activation_value_bytes
        return x

    # What follows is for layers that are only counted (counted_layers.py).

    def renorm(self, x: Shape) -> Shape:
        """A norm whose weight is counted with the layer's other vectors."""
        self._read(x)
        return self._write(x)

    def vectors(self, size: float) -> None:
        self.count.weight_bytes += size

    def mix(self, rows: int, in_width: int, mixer: Mixer) -> Shape:
        """Everything between the projections into a mixer and the one out of it."""
        if isinstance(mixer, HeadsSpec):
            for _ in range(2 if mixer.norm_values else 1):  # norm, rope
                self.renorm((rows, mixer.q_width + mixer.k_width))
        self._read((rows, in_width))
        for chunk in self._chunks:
            cost = mixing(mixer, chunk.tokens, chunk.start, self._kv_value_bytes)
            self.count.attention_flops += cost.flops
            self.count.kv_read_bytes += cost.read_bytes
            self.count.kv_written_bytes += cost.written_bytes
            self.count.state_bytes += cost.state_bytes
        return self._write((rows, mixer.out_width))

    def experts(self, x: Shape, weights: Sequence[WeightSize], experts: ExpertsSpec) -> Shape:
        """Each token's experts. Which experts a step uses depends on its tokens: counted is the
        number expected if each token chose at random."""
        rows = x[0] * experts.active
        used = experts_used(experts, x[0])
        for weight in weights:
            self._read((rows, weight.columns))
            self.count.matmul_flops += 2 * rows * weight.rows * weight.columns
            self.count.weight_bytes += used * (weight.bytes + weight.bias_bytes)
            self._write((rows, weight.rows))
        return x

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


def experts_used(experts: ExpertsSpec, tokens: int) -> float:
    """How many experts of a layer `tokens` tokens use between them, if each chooses at random:
    count x (1 - (1 - active / count) ^ tokens). One token uses exactly `active`."""
    unused = (1 - experts.active / experts.count) ** tokens
    return experts.count * (1 - unused)
