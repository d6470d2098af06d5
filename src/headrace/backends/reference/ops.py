"""Ops in plain numpy, float32: the definition of each operation, which other backends must match.

Slow and readable on purpose. Knows one step at a time: which rows belong to which sequence, where
they start and which blocks hold their keys and values. Knows nothing of scheduling or sampling.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from headrace.core.ranks import Ranks
from headrace.core.step import StepPlan
from headrace.models.sharding import Span
from headrace.models.spec import Activation, AttentionSpec, ModelSpec, RopeSpec
from headrace.weights.dequantize import dequantize
from headrace.weights.weight import Weight

Floats = NDArray[np.float32]

_QUERY_ROWS = 128  # computed at a time, to bound the memory for scores of a long chunk


@dataclass(frozen=True, slots=True)
class ReferenceWeight:
    """A whole weight in float32: [out, in] or [d]."""

    values: Floats
    bias: Floats | None = None


def prepare(weight: Weight) -> ReferenceWeight:
    """Dequantize a weight's parts and stack them by output rows."""
    values = np.concatenate([dequantize(part) for part in weight.parts])
    if weight.offset:
        values = values + np.float32(weight.offset)
    if not weight.bias:
        return ReferenceWeight(values)
    return ReferenceWeight(values, np.concatenate([dequantize(part) for part in weight.bias]))


class KvBlocks:
    """Keys and values of all sequences, in blocks: a list with one array per layer,
    [2 (keys, values), total_blocks, block_tokens, kv_heads, head_dim]."""

    def __init__(self, spec: ModelSpec, total_blocks: int, block_tokens: int) -> None:
        self.total_blocks = total_blocks
        self.block_tokens = block_tokens
        self.layers: list[Floats] = [
            np.zeros((2, total_blocks, block_tokens, a.kv_heads, a.head_dim), np.float32)
            for a in spec.attention
        ]

    def copy(self, pairs: Sequence[tuple[int, int]]) -> None:
        """Copies whole blocks, (from, to), one after the other."""
        for source, target in pairs:
            for layer in self.layers:
                layer[:, target] = layer[:, source]

    @property
    def block_bytes(self) -> int:
        return sum(layer[:, 0].nbytes for layer in self.layers)

    @property
    def layout(self) -> str:
        """Layer by layer, as `layers` says."""
        shapes = (f"{heads}x{dim}" for _, _, _, heads, dim in (a.shape for a in self.layers))
        return f"reference f32 {','.join(shapes)} by {self.block_tokens}"

    def content(self, block: int) -> memoryview:
        """A copy of a block."""
        return memoryview(b"".join(layer[:, block].tobytes() for layer in self.layers))

    def put(self, block: int, content: bytes | bytearray | memoryview) -> None:
        values, at = np.frombuffer(content, np.float32), 0
        if values.nbytes != self.block_bytes:
            raise ValueError(f"{values.nbytes} bytes for a block of {self.block_bytes}")
        for layer in self.layers:
            part = layer[:, block]
            part[:] = values[at : at + part.size].reshape(part.shape)
            at += part.size

    def write(
        self, layer: int, table: Sequence[int], start: int, keys: Floats, values: Floats
    ) -> None:
        """Store the keys and values of tokens from `start` on: [n, kv_heads, head_dim] each."""
        positions = np.arange(start, start + len(keys))
        blocks = np.asarray(table)[positions // self.block_tokens]
        slots = positions % self.block_tokens
        self.layers[layer][0, blocks, slots] = keys
        self.layers[layer][1, blocks, slots] = values

    def read(self, layer: int, table: Sequence[int], first: int, end: int) -> tuple[Floats, Floats]:
        """Keys and values of positions first..end: [end - first, kv_heads, head_dim] each."""
        first_block = first // self.block_tokens
        last_block = -(-end // self.block_tokens)
        found = self.layers[layer][:, table[first_block:last_block]]
        flat = found.reshape(2, -1, *found.shape[3:])
        offset = first_block * self.block_tokens
        keys, values = flat[:, first - offset : end - offset]
        return keys, values


@dataclass(frozen=True, slots=True, kw_only=True)
class Share:
    """One rank's part of a model that several compute."""

    ranks: Ranks
    vocab: Sequence[Span]  # each rank's tokens of the vocabulary


class ReferenceOps:
    """The operations of one step. `wanted` are the rows that `select` returns."""

    def __init__(
        self,
        blocks: KvBlocks,
        plan: StepPlan,
        advance: Callable[[], None] = lambda: None,
        share: Share | None = None,
    ) -> None:
        self._share = share
        self._advance = advance  # called by each operation that takes time
        self._blocks = blocks
        self._token_ids = np.array(plan.token_ids, np.int64)
        self._positions = np.concatenate(
            [np.arange(s, s + n) for s, n in zip(plan.starts, plan.counts, strict=True)]
        )
        ends = np.cumsum(plan.counts)
        # Of each sequence: its rows, its first position, its blocks.
        self._shares = [
            (slice(end - count, end), start, table)
            for end, count, start, table in zip(
                ends, plan.counts, plan.starts, plan.tables, strict=True
            )
        ]
        self._turns: dict[int, tuple[Floats, Floats]] = {}
        self.wanted: Sequence[int] = range(len(self._token_ids))

    def embed(self, table: ReferenceWeight, scale: float) -> Floats:
        if self._share is None:
            return table.values[self._token_ids] * np.float32(scale)
        first, end = self._share.vocab[self._share.ranks.rank]
        is_own = (self._token_ids >= first) & (self._token_ids < end)
        found = table.values[np.where(is_own, self._token_ids - first, 0)]
        return np.where(is_own[:, None], found * np.float32(scale), np.float32(0))

    def norm(self, x: Floats, weight: ReferenceWeight, eps: float) -> Floats:
        mean_square = np.mean(np.square(x), axis=-1, keepdims=True)
        normed: Floats = x / np.sqrt(mean_square + np.float32(eps)) * weight.values
        return normed

    def linear(self, x: Floats, weight: ReferenceWeight) -> Floats:
        self._advance()
        product: Floats = x @ weight.values.T
        return product if weight.bias is None else product + weight.bias

    def head_norm(
        self,
        qkv: Floats,
        q_weight: ReferenceWeight,
        k_weight: ReferenceWeight,
        attention: AttentionSpec,
    ) -> Floats:
        q, k, v = _heads(qkv, attention)
        if attention.joint_norm:
            q, k = q.reshape(len(q), -1), k.reshape(len(k), -1)
            if self._share is not None:
                return _joined(*self._norm_together(q, k, q_weight, k_weight, attention), v)
        q = self.norm(q, q_weight, attention.norm_eps)
        k = self.norm(k, k_weight, attention.norm_eps)
        return _joined(q, k, v)

    def _norm_together(
        self,
        q: Floats,
        k: Floats,
        q_weight: ReferenceWeight,
        k_weight: ReferenceWeight,
        attention: AttentionSpec,
    ) -> tuple[Floats, Floats]:
        """A norm over heads of several ranks. Heads that several ranks have count as often in
        the sum as in the number."""
        assert self._share is not None
        ranks, eps = self._share.ranks, np.float32(attention.norm_eps)
        squares = np.stack([np.sum(np.square(x), axis=-1) for x in (q, k)], axis=1)
        sums = ranks.sum(squares)

        def normed(x: Floats, squares: Floats, weight: ReferenceWeight) -> Floats:
            found: Floats = x / np.sqrt(squares / (ranks.count * x.shape[1]) + eps) * weight.values
            return found

        return normed(q, sums[:, :1], q_weight), normed(k, sums[:, 1:], k_weight)

    def rope(self, qkv: Floats, attention: AttentionSpec) -> Floats:
        q, k, v = _heads(qkv, attention)
        cos, sin = self._cos_sin(attention.rope)
        interleaved = attention.rope.interleaved
        return _joined(_rotate(q, cos, sin, interleaved), _rotate(k, cos, sin, interleaved), v)

    def attention(self, qkv: Floats, attention: AttentionSpec) -> Floats:
        self._advance()
        q, k, v = _heads(qkv, attention)
        for rows, start, table in self._shares:
            self._blocks.write(attention.layer, table, start, k[rows], v[rows])
        out = np.empty((len(qkv), attention.q_width), np.float32)
        for rows, first, table in self._shares:
            for at in range(rows.start, rows.stop, _QUERY_ROWS):
                some = slice(at, min(at + _QUERY_ROWS, rows.stop))
                start = first + at - rows.start
                out[some] = self._attend(q[some], start, table, attention)
        return out

    def gated(self, gate_up: Floats, activation: Activation) -> Floats:
        gate, up = np.split(gate_up, 2, axis=-1)
        return _activate(gate, activation) * up

    def add(self, x: Floats, y: Floats) -> Floats:
        return x + y

    def select(self, x: Floats) -> Floats:
        return x[list(self.wanted)]

    def softcap(self, x: Floats, cap: float) -> Floats:
        capped: Floats = np.tanh(x / np.float32(cap)) * np.float32(cap)
        return capped

    def reduce(self, x: Floats) -> Floats:
        assert self._share is not None
        return self._share.ranks.sum(x)

    def gather(self, x: Floats, width: int) -> Floats:
        assert self._share is not None
        widths = [end - first for first, end in self._share.vocab]
        found = self._share.ranks.gather(x, widths)
        return np.zeros((len(x), width), np.float32) if found is None else found

    def receive(self, width: int) -> Floats:
        assert self._share is not None
        return self._share.ranks.receive(np.empty((len(self._token_ids), width), np.float32))

    def send(self, x: Floats) -> Floats:
        assert self._share is not None
        self._share.ranks.send(x)
        return x

    def _cos_sin(self, rope: RopeSpec) -> tuple[Floats, Floats]:
        """[n, 1, len(inv_freq)] each. Cached for the step, as layers share a few ropes."""
        if id(rope) not in self._turns:
            frequencies = np.array(rope.inv_freq, np.float32)
            angles = self._positions.astype(np.float32)[:, None, None] * frequencies
            exact = angles.astype(np.float64)
            cos, sin = np.cos(exact) * rope.scale, np.sin(exact) * rope.scale
            self._turns[id(rope)] = cos.astype(np.float32), sin.astype(np.float32)
        return self._turns[id(rope)]

    def _attend(
        self, q: Floats, start: int, table: Sequence[int], attention: AttentionSpec
    ) -> Floats:
        """Rows of one sequence, from position `start` on: [n, heads, head_dim] -> [n, q_width]"""
        n, end = len(q), start + len(q)
        first = 0 if attention.window is None else max(0, start - attention.window + 1)
        keys, values = self._blocks.read(attention.layer, table, first, end)
        if n > 1 and not np.isfinite(values[start - first :]).all():
            # A weight of 0 would not keep a row from what is no number behind it.
            rows = [self._attend(q[i : i + 1], start + i, table, attention) for i in range(n)]
            return np.concatenate(rows)
        seen = np.arange(first, end)
        at = np.arange(start, end)[:, None]
        hidden = seen > at
        if attention.window is not None:
            hidden |= seen <= at - attention.window

        # Each key/value head is shared by a group of query heads: [kv_heads, group * n, head_dim].
        group = attention.heads // attention.kv_heads
        grouped = q.reshape(n, attention.kv_heads, group, -1).transpose(1, 2, 0, 3)
        queries = grouped.reshape(attention.kv_heads, group * n, -1)
        scores = queries @ keys.transpose(1, 2, 0) * np.float32(attention.scale)
        if attention.softcap is not None:
            scores = self.softcap(scores, attention.softcap)
        scores = scores.reshape(attention.kv_heads, group, n, -1)
        scores = np.where(hidden, np.float32(-np.inf), scores)
        scores = np.exp(scores - scores.max(axis=-1, keepdims=True))
        scores /= scores.sum(axis=-1, keepdims=True)
        mixed: Floats = scores.reshape(attention.kv_heads, group * n, -1) @ values.transpose(
            1, 0, 2
        )
        return mixed.reshape(attention.kv_heads, group, n, -1).transpose(2, 0, 1, 3).reshape(n, -1)


def _activate(x: Floats, activation: Activation) -> Floats:
    if activation is Activation.SILU:
        with np.errstate(over="ignore"):  # exp of a large number: infinity, and x / infinity is 0
            silu: Floats = x / (1 + np.exp(-x))
        return silu
    inner = np.float32(np.sqrt(2 / np.pi)) * (x + np.float32(0.044715) * x**3)
    gelu: Floats = np.float32(0.5) * x * (1 + np.tanh(inner))
    return gelu


def _heads(qkv: Floats, attention: AttentionSpec) -> tuple[Floats, Floats, Floats]:
    """[n, qkv_width] -> queries, keys, values: [n, heads or kv_heads, head_dim]"""
    split = qkv.reshape(len(qkv), -1, attention.head_dim)
    keys_end = attention.heads + attention.kv_heads
    return split[:, : attention.heads], split[:, attention.heads : keys_end], split[:, keys_end:]


def _joined(q: Floats, k: Floats, v: Floats) -> Floats:
    return np.concatenate([x.reshape(len(x), -1) for x in (q, k, v)], axis=1)


def _rotate(x: Floats, cos: Floats, sin: Floats, interleaved: bool) -> Floats:
    """Rotate pairs among the first values of each head: [n, heads, head_dim]"""
    half = cos.shape[-1]
    if interleaved:
        first, second = slice(0, 2 * half, 2), slice(1, 2 * half, 2)
    else:
        first, second = slice(0, half), slice(half, 2 * half)
    a, b = x[..., first], x[..., second]
    out = x.copy()
    out[..., first] = a * cos - b * sin
    out[..., second] = a * sin + b * cos
    return out
