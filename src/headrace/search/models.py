"""A model that is planned for: its numbers, the types its weights may have, and those as formats.

Knows no GPU.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass

from headrace.backends.demands import kv_value_bytes
from headrace.models.decoder import DecoderWeights
from headrace.models.matrices import Part, layer_matrices
from headrace.models.precision import find_precision, weight_bytes
from headrace.models.spec import ModelSpec
from headrace.simulate.step_work import Format, Formats
from headrace.weights.weight import Weight

# What a checkpoint of 16 bits is quantized to, as engines load it: 8 bits, 4 bits, 4 bits of
# Blackwell's own.
_FROM_SIXTEEN = ("fp8", "int8", "awq", "nvfp4")
_SIXTEEN = ("bf16", "fp16")
FILE = "file"  # each tensor as it is stored in a file


@dataclass(frozen=True, slots=True, kw_only=True)
class PlannedModel:
    name: str
    spec: ModelSpec
    precision: str  # of its checkpoint, or "file"
    precisions: tuple[str, ...]  # to search over, the checkpoint's first
    weights: DecoderWeights[Weight] | None = None  # a file's own tensors
    stored_bytes: int | None = None  # of the file

    def counted_precision(self, precision: str) -> str:
        """A name in precision.PRECISIONS; a file's tensors are multiplied in 16 bits."""
        return "bf16" if precision == FILE else precision


def precisions_for(checkpoint: str, asked: tuple[str, ...]) -> tuple[str, ...]:
    """Those that were asked for, or the checkpoint's and what it can be quantized to."""
    if asked:
        return tuple(
            dict.fromkeys(name if name == FILE else find_precision(name).name for name in asked)
        )
    return (checkpoint, *_FROM_SIXTEEN) if checkpoint in _SIXTEEN else (checkpoint,)


def formats_of(model: PlannedModel, precision: str, kv_dtype: str) -> Formats:
    """Bytes of a value by part, scales included."""
    kv = kv_value_bytes(kv_dtype)
    if precision == FILE:
        stored = model.stored_bytes or 2 * model.spec.parameters
        each = Format(value_bytes=stored / model.spec.parameters)
        return Formats(attention=each, mlp=each, experts=each, output=each, kv_value_bytes=kv)
    found, spec = find_precision(precision), model.spec
    sizes = weight_bytes(spec, found)
    values: Counter[Part] = Counter()
    for layer, times in Counter(spec.layer_specs).items():
        for matrix in layer_matrices(layer, spec.hidden_size):
            values[matrix.part] += times * matrix.values
    linear = values[Part.ATTENTION] + values[Part.MLP] + values[Part.EXPERTS]
    scales = sizes.scales / linear if linear else 0.0

    def of(part: Part, size: float) -> Format:
        form = found.formats.get(part, found.plain)
        plain = form.bits >= 16 and found.mixture is None
        value = size / values[part] if values[part] else 2.0
        return Format(
            value_bytes=value if plain else value + scales,
            computes="bf16" if plain else found.computes,
        )

    return Formats(
        attention=of(Part.ATTENTION, sizes.attention),
        mlp=of(Part.MLP, sizes.mlp),
        experts=of(Part.EXPERTS, sizes.experts),
        kv_value_bytes=kv,
    )
