"""FLOPs and bytes of one step, counted.

Runs the same decoder as every backend, so that planner and engine can't disagree about what a model
does; layers that no backend has kernels for are walked by counted_layers.py. Knows no machine.
"""

from __future__ import annotations

from collections.abc import Sequence

from headrace.models.counted_layers import StackWeights, stack_logits, stack_states
from headrace.models.counting_ops import Chunk, CountingOps, StepCount, WeightSize
from headrace.models.decoder import DecoderWeights, hidden_states, logits
from headrace.models.refs import WeightRef
from headrace.models.spec import ModelSpec

__all__ = ["Chunk", "CountingOps", "StepCount", "WeightSize", "count_step", "size_weights"]

_VECTOR_VALUE_BYTES = 4  # norms and biases are float32 everywhere


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
    weights: DecoderWeights[WeightSize] | StackWeights,
    chunks: Sequence[Chunk],
    *,
    kv_value_bytes: float = 2.0,
    activation_value_bytes: float = 4.0,
) -> StepCount:
    """Count one step of these chunks."""
    ops = CountingOps(chunks, kv_value_bytes, activation_value_bytes)
    wanted = any(chunk.wanted for chunk in chunks)
    if isinstance(weights, StackWeights):
        states = stack_states(ops, spec, weights)
        if wanted:
            stack_logits(ops, spec, weights, states)
        return ops.count
    x = hidden_states(ops, spec, weights)
    if wanted and spec.has_head:
        logits(ops, spec, weights, x)
    return ops.count
