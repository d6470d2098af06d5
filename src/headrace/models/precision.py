"""What a model's weights weigh: by precision, with scales and with what stays unquantized, on one
of several ranks.

A precision says which format each part of a model has. Follows what quantizers do by default:
embeddings, the output layer, routers, norms and biases keep 16 bits unless a format says otherwise.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, fields
from types import MappingProxyType

from headrace.core.errors import ConfigError
from headrace.models import formats as kinds
from headrace.models.formats import Format
from headrace.models.gguf_mixtures import MIXTURES, Place, gguf_format
from headrace.models.layers import HeadsSpec, LayerSpec
from headrace.models.matrices import Matrix, Part, Split, layer_matrices, layer_vectors
from headrace.models.spec import ModelSpec
from headrace.models.stages import Stage

_LINEAR = (Part.ATTENTION, Part.MLP, Part.EXPERTS)
_MAX_RANKS = 1024


@dataclass(frozen=True, slots=True, kw_only=True)
class Precision:
    name: str
    formats: Mapping[Part, Format]  # of parts that are not `plain`
    plain: Format = kinds.BF16
    vector_bytes: int = 2  # of a value of a norm or bias
    computes: str = "bf16"  # in which type a GPU multiplies by these weights
    mixture: str | None = None  # GGUF: the type depends on the layer too

    def format_of(self, matrix: Matrix, place: Place) -> Format:
        if self.mixture is not None:
            return gguf_format(self.mixture, matrix, place)
        return self.formats.get(matrix.part, self.plain)


@dataclass(frozen=True, slots=True, kw_only=True)
class WeightBytes:
    """Bytes of one rank's weights by part, scales apart."""

    embedding: float = 0.0
    attention: float = 0.0  # and recurrent mixers
    mlp: float = 0.0  # and shared experts
    experts: float = 0.0
    router: float = 0.0
    output: float = 0.0  # none if it is the embedding again
    norms: float = 0.0  # and biases
    scales: float = 0.0

    @property
    def total(self) -> int:
        return int(sum(getattr(self, field.name) for field in fields(self)))


def _every_linear(form: Format) -> Mapping[Part, Format]:
    return MappingProxyType(dict.fromkeys(_LINEAR, form))


def _experts_only(form: Format, others: Format = kinds.BF16) -> Mapping[Part, Format]:
    return MappingProxyType({Part.ATTENTION: others, Part.MLP: others, Part.EXPERTS: form})


_ALL = (
    Precision(
        name="fp32", formats={}, plain=kinds.FP32, vector_bytes=4, computes="fp32"
    ),
    Precision(name="bf16", formats={}),
    Precision(name="fp16", formats={}, plain=kinds.FP16, computes="fp16"),
    Precision(name="fp8", formats=_every_linear(kinds.FP8), computes="fp8"),
    Precision(name="fp8-block", formats=_every_linear(kinds.FP8_BLOCK), computes="fp8"),
    Precision(name="int8", formats=_every_linear(kinds.INT8), computes="int8"),
    Precision(name="int4", formats=_every_linear(kinds.INT4)),
    Precision(name="int4-experts", formats=_experts_only(kinds.INT4_32)),  # Kimi K2.5
    Precision(name="awq", formats=_every_linear(kinds.AWQ), computes="fp16"),
    Precision(name="gptq", formats=_every_linear(kinds.GPTQ), computes="fp16"),
    Precision(name="nvfp4", formats=_every_linear(kinds.NVFP4), computes="fp4"),
    Precision(name="nvfp4-experts", formats=_experts_only(kinds.NVFP4), computes="fp4"),
    Precision(name="mxfp4", formats=_experts_only(kinds.MXFP4)),  # gpt-oss: its experts alone
    Precision(
        name="fp8-block+mxfp4-experts",  # DeepSeek V4
        formats=_experts_only(kinds.MXFP4, kinds.FP8_BLOCK), computes="fp8",
    ),
    Precision(
        name="fp8-block+nvfp4-experts",
        formats=_experts_only(kinds.NVFP4, kinds.FP8_BLOCK), computes="fp8",
    ),
    *(
        Precision(name=name, formats={}, vector_bytes=4, computes="fp16", mixture=name)
        for name in MIXTURES
    ),
)  # fmt: skip

PRECISIONS: Mapping[str, Precision] = MappingProxyType({each.name: each for each in _ALL})


def find_precision(name: str) -> Precision:
    """By name, in any case; `-` and `_` are the same."""
    wanted = name.strip().lower().replace("_", "-")
    for known, precision in PRECISIONS.items():
        if known.replace("_", "-") == wanted:
            return precision
    raise ConfigError(
        f"{name[:40]!r} is not a precision that Headrace knows.",
        f"Use one of {', '.join(PRECISIONS)}.",
        param="quant",
    )


def weight_bytes(
    spec: ModelSpec, precision: Precision, *, tp: int = 1, stage: Stage | None = None
) -> WeightBytes:
    """What each of `tp` ranks holds, of all layers or of a stage's; an error if tensor parallelism
    does not divide the model."""
    check_tp(spec, precision, tp)
    parts = {field.name: 0.0 for field in fields(WeightBytes)}
    vectors = spec.hidden_size  # the last norm
    for number, layer in enumerate(spec.layer_specs):
        if stage is not None and not stage.has_layer(number):
            continue
        vectors += layer_vectors(layer, spec.hidden_size)
        place = place_of(spec, number, layer)
        for matrix in layer_matrices(layer, spec.hidden_size):
            _add(parts, matrix, precision.format_of(matrix, place), tp)
            vectors += matrix.bias_values
    for matrix in table_matrices(spec, stage):
        _add(parts, matrix, precision.format_of(matrix, place_of(spec)), tp)
    streams = spec.stack[-1].streams if spec.stack else 1
    if streams > 1:
        vectors += streams * streams * spec.hidden_size + streams + 1
    parts["norms"] = vectors * precision.vector_bytes
    return WeightBytes(**parts)


def table_matrices(spec: ModelSpec, stage: Stage | None = None) -> Iterator[Matrix]:
    """The embedding table, and the output layer unless it is the same, as far as a stage has them.
    Ranks share them by vocabulary, padded where it does not divide."""
    names = [("embedding", Part.EMBEDDING)]
    if not spec.tied_embeddings:
        names.append(("output", Part.OUTPUT))
    for name, part in names:
        if stage is not None and not stage.has_table(part, tied=spec.tied_embeddings):
            continue
        yield Matrix(
            name=name, part=part, rows=spec.vocab_size, columns=spec.hidden_size, split=Split.ROWS
        )


def place_of(spec: ModelSpec, layer: int = 0, described: LayerSpec | None = None) -> Place:
    heads_per_kv = 1
    if described is not None and isinstance(described.mixer, HeadsSpec):
        heads_per_kv = described.mixer.heads // described.mixer.kv_heads
    experts = 0 if described is None or described.experts is None else described.experts.count
    return Place(
        layer=layer, layers=spec.layers, heads_per_kv=heads_per_kv, experts=experts,
        tied=spec.tied_embeddings,
    )  # fmt: skip


def check_tp(spec: ModelSpec, precision: Precision, tp: int) -> None:
    """Refuse a number of ranks that does not divide the model, with the nearest that do."""
    holds = tp_obstacle(spec, precision, tp)
    if holds is None:
        return
    works = [
        next((n for n in ranks if tp_obstacle(spec, precision, n) is None), None)
        for ranks in (range(min(tp, _MAX_RANKS) - 1, 0, -1), range(tp + 1, 2 * tp + 1))
    ]
    nearest = " or ".join(str(number) for number in works if number is not None)
    raise ConfigError(
        f"Tensor parallelism over {tp} ranks does not divide the model: {holds}.",
        f"Use {nearest or 1}.",
        param="tp",
    )


def tp_obstacle(spec: ModelSpec, precision: Precision, tp: int) -> str | None:
    """What `tp` ranks do not divide, or None if they divide everything."""
    if not 1 <= tp <= _MAX_RANKS:
        return f"1 to {_MAX_RANKS} ranks are possible"
    if tp == 1:
        return None
    seen: dict[LayerSpec, int] = {}
    for number, layer in enumerate(spec.layer_specs):
        seen.setdefault(layer, number)
    for layer, number in seen.items():
        place = place_of(spec, number, layer)
        for matrix in layer_matrices(layer, spec.hidden_size):
            found = _obstacle(matrix, precision.format_of(matrix, place), tp)
            if found:
                return found
    return None


def _obstacle(matrix: Matrix, form: Format, tp: int) -> str | None:
    if matrix.split is Split.WHOLE:
        return None
    if matrix.units % tp and not (matrix.repeats and tp % matrix.units == 0):
        return f"{matrix.units} {matrix.unit_name}"
    along = form.group if matrix.split is Split.COLUMNS else form.rows
    side = matrix.columns if matrix.split is Split.COLUMNS else matrix.rows
    if not form.scale_bits or along is None or along == 1 or side % along or matrix.repeats:
        return None
    if (side // tp) % along:
        return f"{side} {matrix.unit_name}, in groups of {along} that share a scale"
    return None


def share(matrix: Matrix, tp: int) -> tuple[int, int]:
    """Rows and columns that one rank has."""
    if matrix.split is Split.ROWS:
        if matrix.repeats and matrix.units < tp:
            return matrix.rows // matrix.units, matrix.columns
        return -(-matrix.rows // tp), matrix.columns
    if matrix.split is Split.COLUMNS:
        return matrix.rows, -(-matrix.columns // tp)
    return matrix.rows, matrix.columns


def _add(parts: dict[str, float], matrix: Matrix, form: Format, tp: int) -> None:
    rows, columns = share(matrix, tp)
    parts[matrix.part.value] += matrix.copies * form.value_bytes(rows, columns)
    parts["scales"] += matrix.copies * form.scale_bytes(rows, columns)
