"""The walk through layers that are counted but not served: experts, latent and compressed
attention, recurrent mixers.

The decoder of decoder.py is what backends run, and has no such layers; this is its counterpart for
CountingOps alone. Given plain layers, both count the same (tested).
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from headrace.models.counting_ops import CountingOps, Shape, WeightSize
from headrace.models.layers import LayerSpec
from headrace.models.spec import Activation, ModelSpec


@dataclass(frozen=True, slots=True, kw_only=True)
class StackLayer:
    matrices: Mapping[str, WeightSize]  # by Matrix.name
    mixer_in: tuple[WeightSize, ...]  # projections into the mixer, those of one input joined
    vector_bytes: float  # norms and the like


@dataclass(frozen=True, slots=True, kw_only=True)
class StackWeights:
    embed: WeightSize
    layers: tuple[StackLayer, ...]
    final_norm: WeightSize
    head: WeightSize
    joined_streams: WeightSize | None = None  # where several residual streams become one


def join(weights: Iterable[WeightSize]) -> WeightSize:
    """Matrices of one input, stacked by output."""
    parts = list(weights)
    return WeightSize(
        sum(part.rows for part in parts),
        parts[0].columns,
        sum(part.bytes for part in parts),
        sum(part.bias_bytes for part in parts),
        parts[0].copies,
    )


def stack_states(ops: CountingOps, spec: ModelSpec, weights: StackWeights) -> Shape:
    x = ops.embed(weights.embed, spec.embed_scale)
    for layer, sizes in zip(spec.stack, weights.layers, strict=True):
        ops.vectors(sizes.vector_bytes)
        for _ in range(layer.norms):
            ops.renorm(x)
        _mix(ops, layer, sizes, x)
        _feed(ops, spec, layer, sizes, x)
    return x


def stack_logits(ops: CountingOps, spec: ModelSpec, weights: StackWeights, x: Shape) -> None:
    x = ops.select(x)
    if weights.joined_streams is not None:
        ops.linear((x[0], weights.joined_streams.columns), weights.joined_streams)
    x = ops.linear(ops.norm(x, weights.final_norm, spec.norm_eps), weights.head)
    if spec.final_softcap is not None:
        ops.softcap(x, spec.final_softcap)


def _mix(ops: CountingOps, layer: LayerSpec, sizes: StackLayer, x: Shape) -> None:
    if layer.mixer is None:
        return
    rows = x[0]
    made = [ops.linear((rows, weight.columns), weight) for weight in sizes.mixer_in]
    out = ops.mix(rows, made[0][1], layer.mixer)
    if "out_down" in sizes.matrices:  # in groups, each of its own part of the input
        out = ops.linear(out, sizes.matrices["out_down"])
    _join(ops, layer, sizes, "mixer_streams", x, ops.linear(out, sizes.matrices["attn_out"]))


def _feed(ops: CountingOps, spec: ModelSpec, layer: LayerSpec, sizes: StackLayer, x: Shape) -> None:
    out: Shape | None = None
    if layer.mlp is not None:
        out = _mlp(ops, spec.activation, sizes, "", x)
    if layer.experts is not None:
        matrices = sizes.matrices
        ops.linear(x, matrices["router"])
        if "latent_in" in matrices:
            ops.linear(x, matrices["latent_in"])
        routed = [matrices[name] for name in matrices if name.startswith("experts_")]
        ops.experts(x, routed, layer.experts)
        if "latent_out" in matrices:
            ops.linear((x[0], matrices["latent_out"].columns), matrices["latent_out"])
        if "shared_mlp_down" in matrices:
            ops.add(x, _mlp(ops, spec.activation, sizes, "shared_", x))
        if "shared_gate" in matrices:
            ops.linear(x, matrices["shared_gate"])
        out = x if out is None else ops.add(out, x)
    if out is not None:
        _join(ops, layer, sizes, "mlp_streams", x, out)


def _mlp(
    ops: CountingOps, activation: Activation, sizes: StackLayer, prefix: str, x: Shape
) -> Shape:
    up, down = sizes.matrices[f"{prefix}mlp_up"], sizes.matrices[f"{prefix}mlp_down"]
    gate = sizes.matrices.get(f"{prefix}mlp_gate")
    if gate is None:
        return ops.linear(ops.renorm(ops.linear(x, up)), down)
    return ops.linear(ops.gated(ops.linear(x, join([gate, up])), activation), down)


def _join(
    ops: CountingOps, layer: LayerSpec, sizes: StackLayer, name: str, x: Shape, out: Shape
) -> None:
    """Add to the residual, or to each of several streams."""
    if layer.streams > 1:
        wide = (x[0], layer.streams * x[1])
        ops.linear(wide, sizes.matrices[name])
        ops.add(wide, wide)
    else:
        ops.add(x, out)
