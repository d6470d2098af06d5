"""Pipeline parallelism: which layers of a model each stage holds, as engines divide them.

Stages hold layers in turn; the embedding table is on the first and the output layer on the last,
where a tied table is kept once more. Engines differ in where the layers go that are left over. From
their sources: vLLM's get_pp_indices (distributed/utils.py), SGLang's of the same name,
TensorRT-LLM's Mapping.pp_layers, and llama.cpp's --split-mode layer, which divides the layers and
the output layer alike. Knows no GPU and no memory.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from types import MappingProxyType

from headrace.core.errors import ConfigError
from headrace.models.matrices import Part
from headrace.models.spec import ModelSpec


@dataclass(frozen=True, slots=True, kw_only=True)
class Stage:
    """One of `count`, from 0."""

    number: int
    count: int
    first: int  # layer
    layers: int

    @property
    def is_first(self) -> bool:
        return self.number == 0

    @property
    def is_last(self) -> bool:
        return self.number == self.count - 1

    @property
    def end(self) -> int:
        return self.first + self.layers

    def has_layer(self, number: int) -> bool:
        return self.first <= number < self.end

    def has_table(self, part: Part, *, tied: bool) -> bool:
        if part is Part.EMBEDDING:
            return self.is_first or (tied and self.is_last)
        return self.is_last

    def of(self, spec: ModelSpec) -> ModelSpec:
        """The model with this stage's layers alone; what is outside of layers stays."""
        here = slice(self.first, self.end)
        return replace(spec, attention=spec.attention[here], stack=spec.stack[here])

    def share_of(self, spec: ModelSpec) -> ModelSpec:
        """The model as this stage computes it."""
        here = self.of(spec)
        numbered = tuple(
            replace(attention, layer=layer) for layer, attention in enumerate(here.attention)
        )
        return replace(here, attention=numbered, has_embedding=self.is_first, has_head=self.is_last)

    def __str__(self) -> str:
        """Layers are counted from 1 for a person."""
        tables = [
            name
            for name, is_here in (
                ("the embedding table", self.is_first),
                ("the output layer", self.is_last),
            )
            if is_here
        ]
        layers = f"layers {self.first + 1:,} to {self.end:,}"
        return f"stage {self.number + 1} of {self.count}, " + " and ".join([layers, *tables])


def stages_of(layers: int, count: int, engine: str = "vllm") -> tuple[Stage, ...]:
    """As the engine divides them; one that has no rule here divides as vLLM does."""
    if not 1 <= count <= layers:
        raise ConfigError(
            f"{count} pipeline stages do not divide {layers} layers: each needs one.",
            f"Use 1 to {layers} stages.",
            param="pp",
        )
    sizes = _RULES.get(engine, _vllm)(layers, count)
    firsts = [sum(sizes[:number]) for number in range(count)]
    return tuple(
        Stage(number=number, count=count, first=first, layers=size)
        for number, (first, size) in enumerate(zip(firsts, sizes, strict=True))
    )


def _vllm(layers: int, count: int) -> list[int]:
    """One more for each stage before the last, backwards."""
    sizes, rest = [layers // count] * count, layers % count
    for number in range(count - 1 - rest, count - 1):
        sizes[number] += 1
    return sizes


def _sglang(layers: int, count: int) -> list[int]:
    """One more for the last stages."""
    return [layers // count + (number >= count - layers % count) for number in range(count)]


def _trtllm(layers: int, count: int) -> list[int]:
    """One more for the first stages."""
    return [layers // count + (number < layers % count) for number in range(count)]


def _llama(layers: int, count: int) -> list[int]:
    """The output layer counts as one of them, and is on the last."""
    ends = [-(-(layers + 1) * (number + 1) // count) for number in range(count)]
    ends[-1] = layers
    return [end - begin for begin, end in zip([0, *ends], ends, strict=False)]


_RULES: Mapping[str, Callable[[int, int], list[int]]] = MappingProxyType(
    {"vllm": _vllm, "sglang": _sglang, "trtllm": _trtllm, "llama.cpp": _llama}
)
