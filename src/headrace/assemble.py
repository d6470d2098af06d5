"""Puts a model together: files, tokenizer, backend, engine. The only module that knows them all."""

from __future__ import annotations

import logging
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, cast, get_args
from weakref import finalize

from headrace.core.config import Device, EngineConfig, LoadFormat
from headrace.core.errors import ConfigError, TemplateError
from headrace.core.sampling import DrawNumbers
from headrace.core.sizes import show_bytes
from headrace.core.step import Runner
from headrace.engine.loop import Engine
from headrace.fetch.catalog import Progress, silent
from headrace.fetch.resolve import resolve_model
from headrace.fetch.verify import Checked, check_model
from headrace.models.decoder import DecoderWeights
from headrace.models.spec import ModelSpec
from headrace.plan.ledger import Allocated, Ledger
from headrace.plan.sizing import Footprint, Sizing, size_pool
from headrace.weights.describe import describe_file
from headrace.weights.dummy import DummyFolder
from headrace.weights.files.gguf import GgufFile
from headrace.weights.load import OpenFile, WeightsFile, find_weights, open_weights
from headrace.weights.sampling_defaults import read_sampling_defaults
from headrace.weights.weight import Weight

if TYPE_CHECKING:  # late: random weights are measured where none of what these need is installed
    from headrace.backends.cuda.device import Gpu
    from headrace.grammar import GrammarCompiler
    from headrace.tokenizer.chat_template import ChatTemplate
    from headrace.tokenizer.tokenizer import Tokenizer

BackendName = Literal["auto", "cpu", "reference"]  # auto: what the config's device says
ChosenBackend = Literal["cpu", "reference", "cuda"]

logger = logging.getLogger("headrace")


@dataclass(slots=True, kw_only=True, weakref_slot=True)
class Assembled:
    """A model ready to run, until `close()`: which comes by itself when this is garbage, or the
    interpreter ends."""

    model_path: Path
    file: WeightsFile  # mapped for as long as the runner lives
    spec: ModelSpec
    read_tokenizer: Tokenizer | None  # None: dummy weights, and no tokenizer beside them
    chat_template: ChatTemplate | None
    sampling_defaults: DrawNumbers  # for what a request leaves open
    config: EngineConfig
    runner: Runner
    engine: Engine
    ledger: Ledger  # predicted before anything was loaded
    allocated: Allocated | None  # as the backend counted; None: it does not count
    notes: tuple[str, ...]  # what a user might not expect
    _grammars: GrammarCompiler | None = field(default=None, repr=False)
    _closed: finalize[..., Assembled] = field(init=False, repr=False)

    def __post_init__(self) -> None:
        self._closed = finalize(self, _close, self.runner, self.file)

    @property
    def tokenizer(self) -> Tokenizer:
        if self.read_tokenizer is None:
            raise ConfigError(
                f"{self.model_path} has no tokenizer; expected one beside config.json.",
                "Put one there, or give prompts as token ids.",
                param="model",
            )
        return self.read_tokenizer

    @property
    def grammars(self) -> GrammarCompiler:
        if self._grammars is None:
            from headrace.grammar import GrammarCompiler

            self._grammars = GrammarCompiler(self.tokenizer, self.spec.vocab_size)
        return self._grammars

    def close(self) -> None:
        self._closed()  # once, however often it is called


def _close(runner: Runner, file: WeightsFile) -> None:
    runner.close()
    file.close()


def assemble(
    model: str | None = None,
    *,
    backend: BackendName = "auto",
    config: EngineConfig | None = None,
    offline: bool = False,
    progress: Progress = silent,
    checked: Checked | None = None,
    **settings: Any,
) -> Assembled:
    """`settings` are the fields of EngineConfig, in the place of a `config`. `checked` is what
    whoever starts this process has found the model's files to be."""
    config = _choose_config(config, settings)
    chosen = choose_backend(backend, config)
    path = resolve_model(model, offline=offline, progress=progress)
    if config.load_format is not LoadFormat.DUMMY:
        checked = check_model(path, again=config.verify, before=checked, progress=progress)
    file = open_weights(path, config.load_format)
    try:
        sampling_defaults = read_sampling_defaults(path, file, config.generation_config)
        spec, weights, sizing = plan_memory(file, backend=chosen, config=config)
        tokenizer = None if _lacks_tokenizer(file, config) else read_tokenizer(file)
        runner, allocated = _load(file, spec, weights, sizing, backend=chosen, config=config)
    except BaseException:
        file.close()
        raise
    try:
        if checked is not None:
            checked.confirm()
    except BaseException:
        _close(runner, file)
        raise
    notes = (*sizing.notes, *_compare(sizing.ledger, allocated))
    logger.info("memory\n%s", sizing.ledger.render(allocated))
    eos_ids = frozenset[int]() if tokenizer is None else tokenizer.eos_ids
    device = Device.CUDA if chosen == "cuda" else Device.CPU
    paced = replace(config, max_step_growth=config.sizes(device).max_step_growth)
    return Assembled(
        model_path=path,
        file=file,
        spec=spec,
        read_tokenizer=tokenizer,
        chat_template=None if tokenizer is None else read_chat_template(tokenizer),
        sampling_defaults=sampling_defaults,
        config=config,
        runner=runner,
        engine=Engine(runner, eos_ids, paced),
        ledger=sizing.ledger,
        allocated=allocated,
        notes=notes,
    )


def choose_backend(backend: str, config: EngineConfig) -> ChosenBackend:
    """What computes. A GPU is looked for only where it may be used."""
    if backend not in get_args(BackendName):
        names = ", ".join(get_args(BackendName))
        raise ConfigError(
            f"backend is {backend!r}; expected one of {names}.", "Choose one.", param="backend"
        )
    if backend != "auto":
        if config.device is Device.CUDA:
            raise ConfigError(
                f"backend is {backend!r} and device is 'cuda'; expected one or the other.",
                "Leave out --backend.",
                param="backend",
            )
        return cast("ChosenBackend", backend)
    if config.device is Device.AUTO:
        from headrace.backends.cuda.device import is_usable

        return "cuda" if is_usable() else "cpu"
    return "cuda" if config.device is Device.CUDA else "cpu"


def plan_memory(
    file: OpenFile, *, backend: ChosenBackend, config: EngineConfig
) -> tuple[ModelSpec, DecoderWeights[Weight], Sizing]:
    """What the model is and how it would lie in memory. Loads no weight."""
    spec, refs = describe_file(file, config.context_tokens)
    weights = find_weights(refs, file)
    if backend == "cuda":
        from headrace.backends.cuda.device import budget_bytes, find_gpu

        gpu = find_gpu()  # first: it says what is missing where torch is
        taken = _cuda_footprint(spec, weights, config, gpu)
        return spec, weights, size_pool(taken, config, budget_bytes(gpu, config.gpu_memory))
    from headrace.backends.cpu.machine import memory_bytes

    taken = (
        _cpu_footprint(spec, weights, config)
        if backend == "cpu"
        else _reference_footprint(spec, weights)
    )
    _, available = memory_bytes()
    return spec, weights, size_pool(taken, config, available or None)


def _cpu_footprint(
    spec: ModelSpec, weights: DecoderWeights[Weight], config: EngineConfig
) -> Footprint:
    from headrace.backends.cpu import layout
    from headrace.backends.cpu.kv import kv_bytes_per_token
    from headrace.backends.cpu.machine import choose_threads

    threads, _ = choose_threads(config.threads)
    layout.check_config(config)
    kv_dtype = config.sizes(Device.CPU).kv_dtype
    return Footprint(
        spec=spec,
        weight_bytes=layout.weight_bytes(weights),
        kv_dtype=kv_dtype,
        kv_bytes_per_token=kv_bytes_per_token(spec, kv_dtype),
        activation_bytes=partial(layout.activation_bytes, spec, weights, threads),
    )


def _cuda_footprint(
    spec: ModelSpec, weights: DecoderWeights[Weight], config: EngineConfig, gpu: Gpu
) -> Footprint:
    from headrace.backends.cuda import layout
    from headrace.backends.cuda.kv import kv_bytes_per_token
    from headrace.backends.cuda.loading import prepared_bytes

    sizes = config.sizes(Device.CUDA)
    layout.check_sizes(sizes)
    shapes = layout.shape_weights(weights, config.quantization)
    layout.check_fp8(gpu, shapes, sizes.kv_dtype)
    return Footprint(
        spec=spec,
        weight_bytes=prepared_bytes(shapes),
        kv_dtype=sizes.kv_dtype,
        kv_bytes_per_token=kv_bytes_per_token(spec, sizes.kv_dtype),
        activation_bytes=partial(
            layout.activation_bytes,
            spec,
            shapes,
            sizes,
            gpu.multiprocessors,
            batch_invariant=config.batch_invariant,
        ),
        device=Device.CUDA,
        graphs_bytes=layout.graph_bytes(spec, config),
        runtime_bytes=layout.scratch_bytes(spec, sizes.max_sequences),
        kv_fraction=1.0,  # nobody else wants what is left of the budget
    )


def _reference_footprint(spec: ModelSpec, weights: DecoderWeights[Weight]) -> Footprint:
    """Everything in float32; of a step, roughly: the widest rows, and scores of every head."""
    width = 3 * spec.hidden_size + 3 * spec.intermediate_size + 2 * spec.attention[0].qkv_width
    heads = max(a.heads for a in spec.attention)
    return Footprint(
        spec=spec,
        weight_bytes=4 * spec.parameters,
        kv_dtype="f32",
        kv_bytes_per_token=spec.kv_bytes_per_token(4),
        activation_bytes=lambda tokens, context: 4 * tokens * (width + heads * context),
    )


def _load(
    file: WeightsFile,
    spec: ModelSpec,
    weights: DecoderWeights[Weight],
    sizing: Sizing,
    *,
    backend: ChosenBackend,
    config: EngineConfig,
) -> tuple[Runner, Allocated | None]:
    if backend == "cuda":
        return _load_cuda(file, spec, weights, sizing, config)
    sizes = config.sizes(Device.CPU)
    if backend == "reference":
        from headrace.backends.reference.runner import ReferenceRunner

        reference = ReferenceRunner(
            spec,
            weights,
            total_blocks=sizing.total_blocks,
            block_tokens=sizes.block_tokens,
            max_batch_tokens=sizes.max_batch_tokens,
            max_sequences=sizes.max_sequences,
            context_tokens=sizing.context_tokens,
            steps_in_flight=2 if sizes.overlap else 1,
        )
        return reference, None
    from headrace.backends.cpu.machine import choose_threads
    from headrace.backends.cpu.runner import CpuRunner

    threads, why = choose_threads(config.threads)
    if config.threads is not None and threads < config.threads:
        logger.warning("threads: computing with %d: %s", threads, why)
    runner = CpuRunner(
        spec,
        weights,
        total_blocks=sizing.total_blocks,
        max_batch_tokens=sizes.max_batch_tokens,
        max_sequences=sizes.max_sequences,
        context_tokens=sizing.context_tokens,
        threads=threads,
        kv_dtype=sizes.kv_dtype,
        overlap=sizes.overlap,
        release=file.release,
    )
    return runner, Allocated(
        weights_bytes=runner.weight_bytes,
        kv_pool_bytes=runner.kv_bytes,
        activations_bytes=runner.activation_bytes,
    )


def _load_cuda(
    file: WeightsFile,
    spec: ModelSpec,
    weights: DecoderWeights[Weight],
    sizing: Sizing,
    config: EngineConfig,
) -> tuple[Runner, Allocated]:
    from headrace.backends.cuda.runner import CudaRunner

    sizes = config.sizes(Device.CUDA)
    runner = CudaRunner(
        spec,
        weights,
        total_blocks=sizing.total_blocks,
        block_tokens=sizes.block_tokens,
        max_batch_tokens=sizes.max_batch_tokens,
        max_sequences=sizes.max_sequences,
        context_tokens=sizing.context_tokens,
        kv_dtype=sizes.kv_dtype,
        quantization=config.quantization,
        overlap=sizes.overlap,
        graphs=config.graphs,
        batch_invariant=config.batch_invariant,
        dependent=True,
        release=file.release,
    )
    return runner, Allocated(
        weights_bytes=runner.weight_bytes,
        kv_pool_bytes=runner.kv_bytes,
        activations_bytes=runner.activation_bytes,
        graphs_bytes=runner.graph_bytes,
    )


def _compare(ledger: Ledger, allocated: Allocated | None) -> list[str]:
    if allocated is None:
        return []
    return [
        f"the ledger is wrong about {row.name}: predicted {show_bytes(row.predicted_bytes)}, "
        f"allocated {show_bytes(row.allocated_bytes)}; please report it"
        for row in ledger.compare(allocated)
        if not row.agrees
    ]


def _lacks_tokenizer(file: WeightsFile, config: EngineConfig) -> bool:
    """Random weights are measured without one."""
    dummy = config.load_format is LoadFormat.DUMMY and isinstance(file, DummyFolder)
    return dummy and not (file.path / "tokenizer.json").exists()


def read_tokenizer(file: WeightsFile) -> Tokenizer:
    from headrace.tokenizer.tokenizer import Tokenizer

    if isinstance(file, GgufFile):
        return Tokenizer.from_gguf(file.metadata)
    return Tokenizer.from_folder(file.path)


def read_chat_template(tokenizer: Tokenizer) -> ChatTemplate | None:
    from headrace.tokenizer.chat_template import ChatTemplate

    try:
        return ChatTemplate(tokenizer.chat_template, tokenizer)
    except TemplateError:
        # A model without a template, or with a broken one, still completes plain prompts.
        if tokenizer.chat_template:
            raise
        return None


def _choose_config(config: EngineConfig | None, settings: dict[str, Any]) -> EngineConfig:
    if config is None:
        return EngineConfig.from_mapping(settings)
    if settings:
        raise ConfigError(
            f"config and {', '.join(settings)} are given; expected one or the other.",
            "Put them into the config.",
            param="config",
        )
    return config
