"""The forward pass of a decoder-only transformer, written once over Ops.

Reads a ModelSpec and opaque weights. Has no arrays, positions or blocks: those are behind the ops.
The same code runs on numpy, is recorded for the CPU and CUDA backends, and counts FLOPs.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, fields
from typing import Generic, TypeVar, cast

from headrace.models.ops import Ops, T, W
from headrace.models.spec import AttentionSpec, ModelSpec

V = TypeVar("V")


@dataclass(slots=True, kw_only=True)
class LayerWeights(Generic[W]):
    attn_norm: W | None = None
    qkv: W  # [q_width + 2 * kv_width, hidden], perhaps in parts
    attn_out: W  # [hidden, q_width]
    mlp_norm: W | None = None
    gate_up: W  # [2 * intermediate, hidden], perhaps in parts
    down: W  # [hidden, intermediate]
    q_norm: W | None = None  # [head_dim], or [q_width] with a joint norm
    k_norm: W | None = None  # [head_dim], or [kv_width]
    attn_post_norm: W | None = None
    mlp_post_norm: W | None = None

    def map(self, change: Callable[[str, W], V]) -> LayerWeights[V]:
        """Each weight changed by `change(role, weight)`: the role is the field's name."""
        changed = {
            field.name: None if weight is None else change(field.name, weight)
            for field in fields(self)
            for weight in [getattr(self, field.name)]
        }
        return cast("LayerWeights[V]", LayerWeights(**changed))


@dataclass(slots=True, kw_only=True)
class DecoderWeights(Generic[W]):
    """A stage of a pipeline has no embedding if it is not the first, and neither final norm nor
    head if it is not the last."""

    embed: W | None  # [vocab, hidden]
    layers: list[LayerWeights[W]]
    final_norm: W | None
    head: W | None  # [vocab, hidden]; the embed weight again when tied

    def map(self, change: Callable[[str, W], V]) -> DecoderWeights[V]:
        """Each weight changed by `change(role, weight)`: the role is the field's name."""
        return DecoderWeights(
            embed=None if self.embed is None else change("embed", self.embed),
            layers=[layer.map(change) for layer in self.layers],
            final_norm=None if self.final_norm is None else change("final_norm", self.final_norm),
            head=None if self.head is None else change("head", self.head),
        )


def hidden_states(ops: Ops[T, W], spec: ModelSpec, weights: DecoderWeights[W]) -> T:
    """The step's tokens through every layer -> [n, hidden]. A stage of a pipeline begins with what
    the one before it sends, and sends what it has to the next."""
    if weights.embed is None:
        x = ops.receive(spec.hidden_size)
    else:
        x = _summed(ops, spec, ops.embed(weights.embed, spec.embed_scale))
    for attention, layer in zip(spec.attention, weights.layers, strict=True):
        x = _attend(ops, spec, attention, layer, x)
        x = _mlp(ops, spec, layer, x)
    return x if spec.has_head else ops.send(x)


def logits(ops: Ops[T, W], spec: ModelSpec, weights: DecoderWeights[W], x: T) -> T:
    """Hidden states -> logits of the rows that the step wants: [m, vocab]"""
    assert weights.final_norm is not None  # only the last stage has logits
    assert weights.head is not None
    x = ops.norm(ops.select(x), weights.final_norm, spec.norm_eps)
    x = ops.linear(x, weights.head)
    if spec.ranks > 1:
        x = ops.gather(x, spec.vocab_size)
    return x if spec.final_softcap is None else ops.softcap(x, spec.final_softcap)


def _attend(
    ops: Ops[T, W], spec: ModelSpec, attention: AttentionSpec, layer: LayerWeights[W], x: T
) -> T:
    qkv = ops.linear(_norm(ops, spec, layer.attn_norm, x), layer.qkv)
    if layer.q_norm is not None and layer.k_norm is not None:
        qkv = ops.head_norm(qkv, layer.q_norm, layer.k_norm, attention)
    qkv = ops.rope(qkv, attention)
    out = _summed(ops, spec, ops.linear(ops.attention(qkv, attention), layer.attn_out))
    return ops.add(x, _norm(ops, spec, layer.attn_post_norm, out))


def _mlp(ops: Ops[T, W], spec: ModelSpec, layer: LayerWeights[W], x: T) -> T:
    gate_up = ops.linear(_norm(ops, spec, layer.mlp_norm, x), layer.gate_up)
    out = _summed(ops, spec, ops.linear(ops.gated(gate_up, spec.activation), layer.down))
    return ops.add(x, _norm(ops, spec, layer.mlp_post_norm, out))


def _summed(ops: Ops[T, W], spec: ModelSpec, x: T) -> T:
    """Of something whose inputs are divided among ranks."""
    return x if spec.ranks == 1 else ops.reduce(x)


def _norm(ops: Ops[T, W], spec: ModelSpec, weight: W | None, x: T) -> T:
    """Where the layer has this norm."""
    return x if weight is None else ops.norm(x, weight, spec.norm_eps)
