"""The counts of counting.py without walking the decoder: for simulators and searches, which count
millions of steps.

What grows with tokens and with wanted rows is found by counting two small steps once; what mixing
costs is a sum over chunks, kept for each kind of layer. Equal to count_step (tested).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

from headrace.models.counted_layers import StackWeights
from headrace.models.counting import Chunk, StepCount, WeightSize, count_step
from headrace.models.counting_ops import experts_used
from headrace.models.decoder import DecoderWeights
from headrace.models.layers import ExpertsSpec, Mixer
from headrace.models.mixing import DecodeTerm, Mixing, decode_terms, mixing
from headrace.models.spec import ModelSpec


@dataclass(frozen=True, slots=True)
class Kind:
    """A kind of mixer, and how many layers have it."""

    mixer: Mixer
    layers: int
    terms: tuple[DecodeTerm, ...] | None  # of a single token; None: only by its position
    fixed: Mixing  # of a single token, where that does not depend on its position


@dataclass(slots=True)
class StepLoad:
    """A step's chunks, summed: add and remove them one by one, each in constant time."""

    kinds: tuple[Kind, ...]
    value_bytes: float  # of keys and values
    tokens: int = 0
    wanted: int = 0
    sequences: int = 0
    flops: int = 0
    read_bytes: float = 0.0
    written_bytes: float = 0.0
    state_bytes: float = 0.0

    def add(self, tokens: int, start: int = 0, wanted: int = 1) -> None:
        """A chunk of `tokens` after `start` tokens that are kept."""
        self._change(tokens, start, wanted, 1)

    def remove(self, tokens: int, start: int = 0, wanted: int = 1) -> None:
        """Undo an add with the same numbers."""
        self._change(tokens, start, wanted, -1)

    def add_decodes(self, starts: Sequence[int]) -> None:
        """A chunk of one token with one wanted row for each of `starts`: the same as to add them
        one by one, and many times faster for all but a few kinds of layer."""
        if not starts:
            return
        if min(starts) < 1 or any(kind.terms is None for kind in self.kinds):
            for start in starts:
                self.add(1, start)
            return
        rows = len(starts)
        self.tokens += rows
        self.wanted += rows
        self.sequences += rows
        every, longest = sum(starts) + rows, max(starts) + 1
        for kind in self.kinds:
            layers = kind.layers
            self.written_bytes += rows * layers * kind.fixed.written_bytes
            self.state_bytes += rows * layers * kind.fixed.state_bytes
            if not kind.terms:
                self.flops += rows * layers * kind.fixed.flops
            for term in kind.terms or ():
                seen = every
                if term.cap is not None and longest > term.cap:
                    seen = sum(min(start + 1, term.cap) for start in starts)
                self.flops += layers * seen * term.flops
                self.read_bytes += layers * seen * term.read_bytes

    def _change(self, tokens: int, start: int, wanted: int, sign: int) -> None:
        self.tokens += sign * tokens
        self.wanted += sign * wanted
        self.sequences += sign
        for kind in self.kinds:
            cost = mixing(kind.mixer, tokens, start, self.value_bytes)
            times = sign * kind.layers
            self.flops += times * cost.flops
            self.read_bytes += times * cost.read_bytes
            self.written_bytes += times * cost.written_bytes
            self.state_bytes += times * cost.state_bytes


@dataclass(frozen=True, slots=True, kw_only=True)
class ClosedForm:
    """Call it with a load made by `load()`."""

    kinds: tuple[Kind, ...]
    value_bytes: float
    experts: tuple[tuple[ExpertsSpec, float], ...]  # bytes of one expert, of all such layers
    token_flops: int
    wanted_flops: int
    fixed_bytes: float  # of weights that any step reads
    token_bytes: float  # of embedding rows
    head_bytes: float  # of the output layer, if any row is wanted
    token_activation_bytes: float
    wanted_activation_bytes: float

    def load(self) -> StepLoad:
        """An empty one."""
        return StepLoad(self.kinds, self.value_bytes)

    def __call__(self, load: StepLoad) -> StepCount:
        weights = self.fixed_bytes + load.tokens * self.token_bytes
        for experts, each_bytes in self.experts:
            weights += experts_used(experts, load.tokens) * each_bytes
        if load.wanted:
            weights += self.head_bytes
        return StepCount(
            matmul_flops=load.tokens * self.token_flops + load.wanted * self.wanted_flops,
            attention_flops=load.flops,
            weight_bytes=weights,
            activation_bytes=load.tokens * self.token_activation_bytes
            + load.wanted * self.wanted_activation_bytes,
            kv_read_bytes=load.read_bytes,
            kv_written_bytes=load.written_bytes,
            state_bytes=load.state_bytes,
        )


def closed_form(
    spec: ModelSpec,
    weights: DecoderWeights[WeightSize] | StackWeights,
    *,
    kv_value_bytes: float = 2.0,
    activation_value_bytes: float = 4.0,
) -> ClosedForm:
    """For these weights; arguments as count_step's."""

    def probe(tokens: int, wanted: int) -> StepCount:
        return count_step(
            spec, weights, [Chunk(tokens=tokens, wanted=wanted)],
            kv_value_bytes=kv_value_bytes, activation_value_bytes=activation_value_bytes,
        )  # fmt: skip

    one, last = probe(1, 0), probe(1, 1)
    experts = _expert_bytes(spec, weights)
    assert weights.embed is not None  # the whole model
    row_bytes = weights.embed.bytes / weights.embed.rows
    routed = sum(experts_used(each, 1) * size for each, size in experts.items())
    mixers = Counter(layer.mixer for layer in spec.layer_specs if layer.mixer is not None)
    return ClosedForm(
        kinds=tuple(
            Kind(
                mixer,
                layers,
                decode_terms(mixer, kv_value_bytes),
                mixing(mixer, 1, 1, kv_value_bytes),
            )
            for mixer, layers in mixers.items()
        ),
        value_bytes=kv_value_bytes,
        experts=tuple(experts.items()),
        token_flops=one.matmul_flops,
        wanted_flops=last.matmul_flops - one.matmul_flops,
        fixed_bytes=one.weight_bytes - row_bytes - routed,
        token_bytes=row_bytes,
        head_bytes=last.weight_bytes - one.weight_bytes,
        token_activation_bytes=one.activation_bytes,
        wanted_activation_bytes=last.activation_bytes - one.activation_bytes,
    )


def _expert_bytes(
    spec: ModelSpec, weights: DecoderWeights[WeightSize] | StackWeights
) -> dict[ExpertsSpec, float]:
    """Bytes of one expert, summed over the layers that have such experts."""
    found: dict[ExpertsSpec, float] = {}
    if not isinstance(weights, StackWeights):
        return found
    for layer, sizes in zip(spec.stack, weights.layers, strict=True):
        if layer.experts is not None:
            routed = (size for name, size in sizes.matrices.items() if name.startswith("experts_"))
            each = sum(size.bytes + size.bias_bytes for size in routed)
            found[layer.experts] = found.get(layer.experts, 0.0) + each
    return found
