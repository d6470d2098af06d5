"""What a model would take on a GPU or a CPU, by the formulas of the backend that would serve it.

For `headrace fit` and `headrace plan`: from a ModelSpec alone, or from a file's own tensors. A
model, a type of weights or a number of GPUs that this engine does not serve gets the same ledger
from the model's shapes, with a note that says so. Needs no GPU and no torch; knows no prices.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields, replace
from functools import partial
from operator import mul

from headrace.backends.cuda import layout
from headrace.backends.cuda.backend import CudaBackend
from headrace.backends.cuda.draws.draw_sizes import sampler_bytes
from headrace.backends.cuda.kv_sizes import KV_VALUE_BYTES
from headrace.backends.cuda.products.formats import MatrixSize
from headrace.backends.cuda.step.shapes import logit_rows
from headrace.core.config import GraphMode, StepSizes
from headrace.core.errors import ConfigError
from headrace.models.decoder import DecoderWeights
from headrace.models.kv import kv_bytes, state_bytes
from headrace.models.matrices import Part, Split, layer_matrices
from headrace.models.precision import find_precision, weight_bytes
from headrace.models.spec import ModelSpec
from headrace.models.stages import Stage
from headrace.plan.fit import Demand, Weights
from headrace.plan.fit_work import work_of
from headrace.plan.ledger import KvCost, predict
from headrace.weights.shaped import shaped_weights
from headrace.weights.weight import Weight

# Bytes of a value of keys and values; with the scales of a block where there are any. The q types
# are llama.cpp's.
KV_TYPES = {**KV_VALUE_BYTES, "int8": 1, "q8_0": 34 / 32, "q4_0": 18 / 32}
# How the CUDA backend holds each type of weights: the values of --quantization, and checkpoints
# that keep their codes.
_CUDA = {
    "bf16": "none",
    "fp16": "none",
    "fp8": "fp8",
    "int8": "int8",
    "int4": "int4",
    "awq": "int4",
    "gptq": "int4",
}
_PARTS = {
    "embed": "embedding",
    "qkv": "attention",
    "attn_out": "attention",
    "gate_up": "mlp",
    "down": "mlp",
    "head": "output",
}
_FILE = "file"  # each tensor as it is stored
_TABLES = {"embed": Part.EMBEDDING, "head": Part.OUTPUT}


@dataclass(frozen=True, slots=True, kw_only=True)
class Setup:
    """How a model is to be served, as far as memory depends on it. None: the backend's default."""

    precision: str = "bf16"
    kv_dtype: str = "bf16"
    tp: int = 1
    stage: Stage | None = None  # of a pipeline: its layers alone
    max_batch_tokens: int | None = None
    max_sequences: int | None = None
    concurrency: int = 1
    graphs: bool = True
    keeps_windows: bool = False  # a window layer keeps only its window, as other engines do


def demand_on_gpu(
    spec: ModelSpec,
    setup: Setup,
    *,
    multiprocessors: int,
    weights: DecoderWeights[Weight] | None = None,
) -> Demand:
    """What a model takes on each of `tp` GPUs, of a stage or of all layers. `weights`: a file's
    own, which count as this engine would hold them."""
    sizes, stage = _gpu_sizes(setup), setup.stage
    here = spec if stage is None else stage.of(spec)
    held, shapes = _weights(spec, setup, weights)
    work = work_of(spec, dict(held.parts), tp=setup.tp)
    if stage is not None:  # a token passes all stages: only what is held is this one's
        held, shapes = _weights(spec, setup, weights, stage)
        values = work_of(here, dict(held.parts), tp=setup.tp).part_values
        work = replace(work, part_values=values)
    value_bytes = kv_value_bytes(setup.kv_dtype)
    return Demand(
        spec=spec,
        stage=stage,
        weights=held,
        work=work,
        kv=KvCost.of(here, setup.kv_dtype, 0),
        sequence_bytes=_sequence_bytes(here, value_bytes, setup),
        state_bytes=state_bytes(here, tp=setup.tp),
        activation_bytes=_activations(here, setup, sizes, shapes, multiprocessors),
        graphs_bytes=layout.graph_bytes(
            here, GraphMode.START if setup.graphs else GraphMode.OFF, sizes.max_batch_tokens
        ),
        runtime_bytes=layout.scratch_bytes(spec, sizes.max_sequences),
        block_tokens=sizes.block_tokens,
        max_batch_tokens=sizes.max_batch_tokens,
        max_sequences=sizes.max_sequences,
        tp=setup.tp,
        notes=() if shapes is not None and stage is None else (_note(spec, setup),),
    )


def _weights(
    spec: ModelSpec,
    setup: Setup,
    weights: DecoderWeights[Weight] | None,
    stage: Stage | None = None,
) -> tuple[Weights, DecoderWeights[layout.Size] | None]:
    """And their shapes, where this engine could hold them."""
    if setup.precision not in (_FILE, *_CUDA):
        weights = None  # a type that its tensors would have to be converted to
    if spec.served and weights is not None:
        shapes = layout.shape_weights(weights, _CUDA.get(setup.precision, "none"))
        found = Counter(matrix.format.value for matrix in layout.matrices_of(shapes))
        held, shapes = _held(shapes, " and ".join(name for name, _ in found.most_common()), stage)
        return (held, shapes) if setup.tp == 1 else (_divided(held, setup.tp), None)
    if spec.served and setup.tp == 1 and setup.precision in _CUDA:
        shapes = layout.shape_weights(shaped_weights(spec), _CUDA[setup.precision])
        return _held(shapes, setup.precision, stage)
    return _counted(spec, setup, stage), None


def kv_value_bytes(kv_dtype: str) -> float:
    found = KV_TYPES.get(kv_dtype)
    if found is None:
        raise ConfigError(
            f"kv_dtype is {kv_dtype!r}; known are {', '.join(KV_TYPES)}.",
            "Choose one of them: bf16 is the usual one, fp8 takes half of it.",
            param="kv_dtype",
        )
    return found


def _gpu_sizes(setup: Setup) -> StepSizes:
    defaults = CudaBackend.defaults
    sequences = setup.max_sequences or max(defaults.max_sequences, setup.concurrency)
    return replace(
        defaults,
        max_batch_tokens=setup.max_batch_tokens or defaults.max_batch_tokens,
        max_sequences=sequences,
    )


def _held(
    shapes: DecoderWeights[layout.Size], precision: str, stage: Stage | None = None
) -> tuple[Weights, DecoderWeights[layout.Size]]:
    """As the CUDA backend packs them, to the byte; and the shapes of a stage."""
    parts: Counter[str] = Counter()
    tied = isinstance(shapes.head, layout.SharedSize)
    if stage is not None:
        shapes = replace(shapes, layers=shapes.layers[stage.first : stage.end])

    def add(role: str, size: layout.Size) -> None:
        table = _TABLES.get(role)
        if stage is not None and table and not stage.has_table(table, tied=tied):
            return
        scales = 0
        if isinstance(size, MatrixSize):
            scales = size.scale_total_bytes
            parts["scales"] += scales
        parts[_PARTS.get(role, "norms")] += size.bytes - scales

    shapes.map(add)
    return Weights(precision=precision, parts=_ordered(parts), is_exact=True), shapes


def _divided(whole: Weights, tp: int) -> Weights:
    """One rank's part; each has all norms."""
    parts = tuple((name, size if name == "norms" else -(-size // tp)) for name, size in whole.parts)
    return replace(whole, parts=parts, is_exact=False)


def _counted(spec: ModelSpec, setup: Setup, stage: Stage | None = None) -> Weights:
    """By the model's shapes and the precision's rules."""
    found = weight_bytes(spec, find_precision(setup.precision), tp=setup.tp, stage=stage)
    parts = {field.name: int(getattr(found, field.name)) for field in fields(found)}
    return Weights(precision=setup.precision, parts=_ordered(parts))


def _ordered(parts: Mapping[str, int]) -> tuple[tuple[str, int], ...]:
    order = ("embedding", "attention", "mlp", "experts", "router", "output", "norms", "scales")
    known = [(name, int(parts[name])) for name in order if parts.get(name)]
    return (*known, *((name, int(size)) for name, size in parts.items() if name not in order))


def _sequence_bytes(spec: ModelSpec, value_bytes: float, setup: Setup) -> Callable[[int], int]:
    if spec.stack or setup.keeps_windows:
        return partial(
            kv_bytes, spec, value_bytes=value_bytes, keeps_windows=setup.keeps_windows, tp=setup.tp
        )
    each = kv_bytes(spec, 1, value_bytes, keeps_windows=False, tp=setup.tp)
    return lambda tokens: tokens * each


def _activations(
    spec: ModelSpec,
    setup: Setup,
    sizes: StepSizes,
    shapes: DecoderWeights[layout.Size] | None,
    multiprocessors: int,
) -> Callable[[int, int], int]:
    if not spec.served:
        return partial(_rough_step_bytes, spec, setup.tp, sizes.max_sequences)
    rank = shard(spec, setup.tp)
    if shapes is None:
        shapes = layout.shape_weights(shaped_weights(rank), "none")
    return partial(layout.StepMemory.of(rank, shapes).bytes, sizes, multiprocessors)


def shard(spec: ModelSpec, tp: int) -> ModelSpec:
    """One rank's part of a served model: its heads and its part of the MLP."""
    if tp == 1:
        return spec
    attention = tuple(
        replace(a, heads=a.heads // tp, kv_heads=max(1, a.kv_heads // tp)) for a in spec.attention
    )
    return replace(spec, attention=attention, intermediate_size=spec.intermediate_size // tp)


def _rough_step_bytes(
    spec: ModelSpec, tp: int, max_sequences: int, max_batch_tokens: int, context_tokens: int
) -> int:
    """For models without kernels here: the residual, the widest layer's rows, and the logits."""
    widest = 0
    for layer in Counter(spec.layer_specs):
        rows = Counter[str]()
        for matrix in layer_matrices(layer, spec.hidden_size):
            active = 1
            if layer.experts is not None and matrix.copies > 1:
                active = layer.experts.active
            rows[matrix.part] += matrix.rows * active // (tp if matrix.split is Split.ROWS else 1)
        widest = max(widest, max(rows.values(), default=0))
    values = max_batch_tokens * (3 * spec.hidden_size + widest)
    logits = logit_rows(max_batch_tokens, max_sequences)
    results = max_batch_tokens + max_sequences
    draws = sampler_bytes(logits, results, max_sequences, spec.vocab_size)
    return layout.VALUE_BYTES * values + layout.LOGIT_BYTES * logits * spec.vocab_size + draws


def _note(spec: ModelSpec, setup: Setup) -> str:
    if not spec.served:
        return (
            f"Headrace has no kernels for {spec.family}: the ledger is what its shapes take, and "
            "activations are a rough estimate."
        )
    if setup.tp > 1 or setup.stage is not None:
        return (
            "The ledger is one rank's part. Headrace divides models too (--tensor-parallel, "
            "--pipeline-parallel), but was never run on several GPUs."
        )
    return (
        f"Headrace does not hold {setup.precision} weights on a GPU (a GGUF file is widened to "
        "bf16): the ledger is that of an engine that does."
    )


def demand_on_cpu(
    spec: ModelSpec, setup: Setup, *, weights: DecoderWeights[Weight] | None = None
) -> Demand:
    """What a model takes in a host's memory, by the CPU backend's formulas."""
    from headrace.backends.cpu import layout as cpu_layout
    from headrace.backends.cpu.backend import CpuBackend
    from headrace.backends.cpu.kv import KV_DTYPES, kv_bytes_per_token
    from headrace.backends.cpu.machine import choose_threads

    threads, _ = choose_threads(None)
    defaults = CpuBackend.defaults
    batch = setup.max_batch_tokens or defaults.max_batch_tokens
    sequences = setup.max_sequences or max(defaults.max_sequences, setup.concurrency)
    if setup.precision != _FILE:
        weights = None  # they would be converted
    if not spec.served:
        held = _counted(spec, setup)
        activations = partial(_rough_step_bytes, spec, 1, sequences)
    else:
        if weights is None and setup.precision in ("bf16", "fp16", "fp32"):
            weights = shaped_weights(spec)
        held = _counted(spec, setup) if weights is None else _packed(weights, setup.precision)
        shapes = shaped_weights(spec) if weights is None else weights
        activations = partial(cpu_layout.activation_bytes, spec, shapes, threads)
    sequence_bytes = _sequence_bytes(spec, kv_value_bytes(setup.kv_dtype), setup)
    if spec.served and setup.kv_dtype in KV_DTYPES:
        each = kv_bytes_per_token(spec, setup.kv_dtype)
        sequence_bytes = partial(mul, each)
    runtime = predict(
        spec,
        weight_bytes=0,
        activation_bytes=0,
        kv_bytes_per_token=0,
        kv_dtype=setup.kv_dtype,
        total_blocks=0,
        block_tokens=1,
        max_batch_tokens=batch,
    ).runtime_bytes
    return Demand(
        spec=spec,
        weights=held,
        work=work_of(spec, dict(held.parts)),
        kv=KvCost.of(spec, setup.kv_dtype, 0),
        sequence_bytes=sequence_bytes,
        state_bytes=state_bytes(spec),
        activation_bytes=activations,
        graphs_bytes=0,
        runtime_bytes=runtime,
        runtime_words="interpreter, tokenizer, code: an estimate",
        block_tokens=defaults.block_tokens,
        max_batch_tokens=batch,
        max_sequences=sequences,
        notes=() if spec.served else (_note(spec, setup),),
    )


def _packed(weights: DecoderWeights[Weight], precision: str) -> Weights:
    """As the CPU backend packs them; the embedding stays in the mapped file."""
    from headrace.backends.cpu import layout as cpu_layout

    parts: Counter[str] = Counter()
    formats: Counter[str] = Counter()

    def add(role: str, weight: Weight) -> None:
        if len(weight.parts[0].shape) == 1:
            parts["norms"] += 4 * weight.columns
        elif role != "embed":
            formats.update(part.format.name for part in weight.parts)
            bias = 4 * sum(part.values for part in weight.bias)
            parts[_PARTS[role]] += cpu_layout.matrix_bytes(weight.parts) + bias

    weights.map(add)
    if precision == "file":
        precision = " and ".join(name for name, _ in formats.most_common())
    return Weights(precision=precision, parts=_ordered(parts), is_exact=True)
