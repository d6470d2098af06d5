"""What one step asks of one GPU, as coefficients: bytes and operations for each token, sequence and
context token, for a model spread over GPUs in a layout.

Made once for (model, formats, layout); pricing a step is then a handful of multiplications, done in
roofline.py. Follows from the list of weight matrices in models/matrices.py, so that the planner
and the counts can't disagree about what a layer multiplies. Knows no GPU, engine or efficiency.
"""

from __future__ import annotations

import math
from collections import Counter, defaultdict
from collections.abc import Iterator
from dataclasses import dataclass, field

from headrace.core.errors import ConfigError
from headrace.models.kv import index_bytes, kept_values
from headrace.models.layers import (
    CompressedSpec,
    HeadsSpec,
    LatentSpec,
    LayerSpec,
    Mixer,
    RecurrentSpec,
)
from headrace.models.matrices import Matrix, Part, Split, layer_matrices
from headrace.models.spec import ModelSpec

_ACTIVATION_BYTES = 2.0  # what GPUs exchange is bf16
_STATE_BYTES = 4.0  # recurrent states are float32
# Kernels that engines launch in a layer: a count of products, norms, rotation, cache writes and the
# like as they are fused in practice. Their gaps bound a small batch; their time is measured.
_MIXER_KERNELS = {HeadsSpec: 7, LatentSpec: 12, CompressedSpec: 14, RecurrentSpec: 9}
_MLP_KERNELS = 3
_EXPERT_KERNELS = 7  # router, choice, sorting, two grouped products, activation, sum
_QUANTIZED_KERNELS = 2  # activations are quantized before a product


@dataclass(frozen=True, slots=True, kw_only=True)
class Format:
    """How weights are kept, and in which type they are multiplied."""

    value_bytes: float  # with its share of scales
    computes: str = "bf16"  # a key of Gpu.flops

    @property
    def quantizes(self) -> bool:
        """Whether activations are quantized too."""
        return self.computes not in ("bf16", "fp16", "fp32")


@dataclass(frozen=True, slots=True, kw_only=True)
class Formats:
    """Of each part of the model. Norms and router stay in 16 bits."""

    attention: Format
    mlp: Format
    experts: Format
    output: Format = field(default_factory=lambda: Format(value_bytes=2.0))
    kv_value_bytes: float = 2.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Layout:
    """How a model lies on GPUs. `tp` GPUs share each attention layer; there are `copies` of
    attention, each with its own sequences (1: plain tensor parallelism). MLPs and experts are
    spread over all tp x copies GPUs: experts whole over `expert_parallel` groups of them, by
    their width within a group. `pipeline` stages hold the layers in turn."""

    tp: int = 1
    copies: int = 1
    expert_parallel: int = 1
    pipeline: int = 1

    def __post_init__(self) -> None:
        for name in ("tp", "copies", "expert_parallel", "pipeline"):
            if getattr(self, name) < 1:
                raise ConfigError(
                    f"{name} is {getattr(self, name)}.", f"Give {name} of 1 or more.", param=name
                )
        if self.width % self.expert_parallel:
            raise ConfigError(
                f"{self.expert_parallel} groups of experts do not divide {self.width} GPUs.",
                "Use a divisor.",
                param="expert_parallel",
            )

    @property
    def width(self) -> int:
        """GPUs that share a layer."""
        return self.tp * self.copies

    @property
    def gpus(self) -> int:
        return self.width * self.pipeline


@dataclass(frozen=True, slots=True, kw_only=True)
class Span:
    """Layers whose queries see at most `limit` keys (inf: all of them)."""

    limit: float
    read_bytes: float  # a context token, read once a step
    decode_flops: float  # a context token, of a sequence that computes one token
    pair_flops: float  # a query and a key, of longer chunks


@dataclass(frozen=True, slots=True, kw_only=True)
class StepWork:
    """Of one GPU, for all layers together. "A token" is one of its copy of attention, or of all
    copies where it says so."""

    attention_bytes: float
    attention_flops: float  # a token of its copy
    attention_computes: str
    mlp_bytes: float  # dense MLPs, shared experts, routers
    mlp_flops: float  # a token of all copies
    mlp_computes: str
    expert_bytes: float  # one expert of every layer, its share
    expert_flops: float  # a token of all copies that is routed to one expert, its share
    expert_computes: str
    experts: int  # of a layer
    experts_active: int  # 0: there are none
    expert_groups: int
    output_bytes: float
    output_flops: float  # a row of logits of all copies
    embedding_bytes: float
    spans: tuple[Span, ...]
    state_bytes: float  # a sequence of its copy, read and written
    state_flops: float  # a token of its copy
    kernels: float
    expert_kernels: float
    exchanges: float  # in a step, among the GPUs that share a layer: two a layer
    exchange_rounds: float  # of all exchanges: log2 of the GPUs for each
    exchange_bytes: float  # a token of all copies, one GPU sends in an exchange
    width: int
    copies: int
    hops: int  # between stages
    hop_bytes: float  # a token of its copy

    @property
    def weight_bytes(self) -> float:
        """Resident on the GPU with the most layers."""
        here = self.experts / self.expert_groups if self.experts_active else 0
        layers = self.attention_bytes + self.mlp_bytes + self.expert_bytes * here
        return layers / (self.hops + 1) + self.output_bytes + self.embedding_bytes


def step_work(spec: ModelSpec, formats: Formats, layout: Layout) -> StepWork:
    """The coefficients of a model in a layout."""
    sums: defaultdict[str, float] = defaultdict(float)
    spans: dict[float, list[float]] = {}
    hidden = spec.hidden_size
    experts = active = 0
    layers = Counter(spec.layer_specs)
    for layer, times in layers.items():
        for name, amount in _layer_sums(layer, hidden, formats, layout):
            sums[name] += times * amount
        for span in _spans(layer.mixer, formats.kv_value_bytes, layout.tp):
            of_limit = spans.setdefault(span.limit, [0.0, 0.0, 0.0])
            for at, amount in enumerate((span.read_bytes, span.decode_flops, span.pair_flops)):
                of_limit[at] += times * amount
        if layer.experts is not None:
            experts, active = layer.experts.count, layer.experts.active
    width = layout.width
    output_values = spec.vocab_size * hidden / width
    return StepWork(
        attention_bytes=sums["attention_bytes"],
        attention_flops=sums["attention_flops"],
        attention_computes=formats.attention.computes,
        mlp_bytes=sums["mlp_bytes"],
        mlp_flops=sums["mlp_flops"],
        mlp_computes=formats.mlp.computes,
        expert_bytes=sums["experts_bytes"],
        expert_flops=sums["experts_flops"],
        expert_computes=formats.experts.computes,
        experts=max(1, experts),
        experts_active=active,
        expert_groups=layout.expert_parallel if experts else 1,
        output_bytes=output_values * formats.output.value_bytes,
        output_flops=2 * output_values,
        embedding_bytes=0.0 if spec.tied_embeddings else output_values * 2.0,
        spans=tuple(
            Span(limit=limit, read_bytes=parts[0], decode_flops=parts[1], pair_flops=parts[2])
            for limit, parts in sorted(spans.items(), reverse=True)
        ),
        state_bytes=sums["state_bytes"],
        state_flops=sums["state_flops"],
        kernels=sums["kernels"],
        expert_kernels=sums["expert_kernels"],
        exchanges=2.0 * len(spec.layer_specs) if width > 1 else 0.0,
        exchange_rounds=2.0 * len(spec.layer_specs) * math.log2(width),
        exchange_bytes=2 * (width - 1) / width * hidden * _ACTIVATION_BYTES,
        width=width,
        copies=layout.copies,
        hops=layout.pipeline - 1,
        hop_bytes=hidden * _ACTIVATION_BYTES,
    )


def _layer_sums(
    layer: LayerSpec, hidden: int, formats: Formats, layout: Layout
) -> Iterator[tuple[str, float]]:
    for matrix in layer_matrices(layer, hidden):
        if matrix.part is Part.EXPERTS:
            here = matrix.rows * matrix.columns / (layout.width // layout.expert_parallel)
            yield "experts_bytes", here * formats.experts.value_bytes
            yield "experts_flops", 2 * here
            continue
        attention = matrix.part is Part.ATTENTION
        here = matrix.values * _share(matrix, layout.tp if attention else layout.width)
        name = "attention" if attention else "mlp"
        kept = formats.attention if attention else formats.mlp
        yield f"{name}_bytes", here * (2.0 if matrix.part is Part.ROUTER else kept.value_bytes)
        yield f"{name}_flops", 2 * here
    if isinstance(layer.mixer, RecurrentSpec):
        values = layer.mixer.state_values / layout.tp
        yield "state_bytes", 2 * values * _STATE_BYTES
        yield "state_flops", values * layer.mixer.state_flops
    yield from _kernels(layer, formats)


def _share(matrix: Matrix, ranks: int) -> float:
    """Of a matrix, what one rank has. Degrees that do not divide are refused where a deployment is
    checked; here they round to an even share."""
    if matrix.split is Split.WHOLE:
        return 1.0
    return max(1 / ranks, 1 / matrix.units) if matrix.repeats else 1 / ranks


def _kernels(layer: LayerSpec, formats: Formats) -> Iterator[tuple[str, float]]:
    if layer.mixer is not None:
        extra = _QUANTIZED_KERNELS if formats.attention.quantizes else 0
        yield "kernels", _MIXER_KERNELS[type(layer.mixer)] + extra
    if layer.mlp is not None:
        extra = _QUANTIZED_KERNELS if formats.mlp.quantizes else 0
        yield "kernels", _MLP_KERNELS + extra
    if layer.experts is not None:
        extra = _QUANTIZED_KERNELS if formats.experts.quantizes else 0
        shared = _MLP_KERNELS if layer.experts.shared_width else 0
        yield "expert_kernels", _EXPERT_KERNELS + extra + shared


def _spans(mixer: Mixer | None, value_bytes: float, tp: int) -> Iterator[Span]:
    """What a layer's queries see, and what it costs to look."""
    if isinstance(mixer, HeadsSpec | LatentSpec | CompressedSpec) and mixer.index is not None:
        index = mixer.index
        keys = index_bytes(mixer, 1 << 20) / (1 << 20)
        score = 2.0 * index.heads * index.dim
        yield Span(limit=math.inf, read_bytes=keys, decode_flops=score, pair_flops=score)
    match mixer:
        case HeadsSpec():
            limit = min(mixer.window or math.inf, mixer.index.top if mixer.index else math.inf)
            kept = kept_values(mixer, 1, keeps_windows=False, tp=tp) * value_bytes
            pair = 2.0 * mixer.heads * (mixer.key_dim + mixer.value_dim) / tp
            yield Span(limit=limit, read_bytes=kept, decode_flops=pair, pair_flops=pair)
        case LatentSpec():
            limit = mixer.index.top if mixer.index else math.inf
            kept = mixer.kept_values * value_bytes
            # A decoding token multiplies with the latent itself; long chunks expand it to heads.
            decode = 2.0 * mixer.heads * (2 * mixer.kv_rank + mixer.rope_dim) / tp
            pair = 2.0 * mixer.heads * (mixer.key_dim + mixer.value_dim) / tp
            yield Span(limit=limit, read_bytes=kept, decode_flops=decode, pair_flops=pair)
        case CompressedSpec():
            pair = 4.0 * mixer.heads * mixer.head_dim / tp
            kept = mixer.head_dim * value_bytes
            yield Span(limit=mixer.window, read_bytes=kept, decode_flops=pair, pair_flops=pair)
            if mixer.ratio:  # one entry for `ratio` tokens, chosen ones if there is an index
                top = mixer.index.top * mixer.ratio if mixer.index else math.inf
                yield Span(
                    limit=top,
                    read_bytes=kept / mixer.ratio,
                    decode_flops=pair / mixer.ratio,
                    pair_flops=pair / mixer.ratio,
                )
