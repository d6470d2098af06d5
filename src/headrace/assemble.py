"""Puts a model together: files, tokenizer, backend, engine. The only module that knows them all."""

from __future__ import annotations

import logging
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Literal, get_args

from headrace.core.config import EngineConfig
from headrace.core.errors import ConfigError, TemplateError
from headrace.core.sizes import show_bytes
from headrace.core.step import Runner
from headrace.engine.loop import Engine
from headrace.grammar import GrammarCompiler
from headrace.models.catalog import Progress, silent
from headrace.models.decoder import DecoderWeights
from headrace.models.resolve import resolve_model
from headrace.models.spec import ModelSpec
from headrace.plan.ledger import Allocated, Ledger
from headrace.plan.sizing import Footprint, Sizing, size_pool
from headrace.tokenizer.chat_template import ChatTemplate
from headrace.tokenizer.tokenizer import Tokenizer
from headrace.weights.describe import describe_file
from headrace.weights.gguf import GgufFile
from headrace.weights.load import OpenFile, WeightsFile, find_weights, open_weights
from headrace.weights.weight import Weight

BackendName = Literal["cpu", "reference"]

logger = logging.getLogger("headrace")


@dataclass(slots=True, kw_only=True)
class Assembled:
    """A model ready to run."""

    model_path: Path
    file: WeightsFile  # mapped for as long as the runner lives
    spec: ModelSpec
    tokenizer: Tokenizer
    chat_template: ChatTemplate | None
    grammars: GrammarCompiler
    config: EngineConfig
    runner: Runner
    engine: Engine
    ledger: Ledger  # predicted before anything was loaded
    allocated: Allocated | None  # as the backend counted; None: it does not count
    notes: tuple[str, ...]  # what a user might not expect

    def close(self) -> None:
        self.runner.close()
        self.file.close()


def assemble(
    model: str | None = None,
    *,
    backend: BackendName = "cpu",
    config: EngineConfig | None = None,
    offline: bool = False,
    progress: Progress = silent,
    **settings: Any,
) -> Assembled:
    """`settings` are the fields of EngineConfig, in the place of a `config`."""
    _check_backend(backend)
    config = _choose_config(config, settings)
    path = resolve_model(model, offline=offline, progress=progress)
    file = open_weights(path, config.load_format)
    try:
        spec, weights, sizing = plan_memory(file, backend=backend, config=config)
        tokenizer = read_tokenizer(file)
        runner, allocated = _load(file, spec, weights, sizing, backend=backend, config=config)
    except BaseException:
        file.close()
        raise
    notes = (*sizing.notes, *_compare(sizing.ledger, allocated))
    logger.info("memory\n%s", sizing.ledger.render(allocated))
    return Assembled(
        model_path=path,
        file=file,
        spec=spec,
        tokenizer=tokenizer,
        chat_template=read_chat_template(tokenizer),
        grammars=GrammarCompiler(tokenizer, spec.vocab_size),
        config=config,
        runner=runner,
        engine=Engine(runner, tokenizer.eos_ids, config),
        ledger=sizing.ledger,
        allocated=allocated,
        notes=notes,
    )


def plan_memory(
    file: OpenFile, *, backend: BackendName, config: EngineConfig
) -> tuple[ModelSpec, DecoderWeights[Weight], Sizing]:
    """What the model is and how it would lie in memory. Loads no weight."""
    from headrace.backends.cpu.machine import memory_bytes

    spec, refs = describe_file(file, config.context_tokens)
    weights = find_weights(refs, file)
    footprint = (
        _cpu_footprint(spec, weights, config)
        if backend == "cpu"
        else _reference_footprint(spec, weights)
    )
    _, available = memory_bytes()
    return spec, weights, size_pool(footprint, config, available or None)


def _cpu_footprint(
    spec: ModelSpec, weights: DecoderWeights[Weight], config: EngineConfig
) -> Footprint:
    from headrace.backends.cpu import layout
    from headrace.backends.cpu.kv import kv_bytes_per_token
    from headrace.backends.cpu.machine import choose_threads

    threads, _ = choose_threads(config.threads)
    layout.check_config(config)
    return Footprint(
        spec=spec,
        weight_bytes=layout.weight_bytes(weights),
        kv_dtype=config.kv_dtype,
        kv_bytes_per_token=kv_bytes_per_token(spec, config.kv_dtype),
        activation_bytes=partial(layout.activation_bytes, spec, weights, threads),
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
    backend: BackendName,
    config: EngineConfig,
) -> tuple[Runner, Allocated | None]:
    if backend == "reference":
        from headrace.backends.reference.runner import ReferenceRunner

        reference = ReferenceRunner(
            spec,
            weights,
            total_blocks=sizing.total_blocks,
            block_tokens=config.block_tokens,
            max_batch_tokens=config.max_batch_tokens,
            max_sequences=config.max_sequences,
            context_tokens=sizing.context_tokens,
            steps_in_flight=2 if config.overlap else 1,
        )
        return reference, None
    from headrace.backends.cpu.machine import choose_threads
    from headrace.backends.cpu.runner import CpuRunner

    runner = CpuRunner(
        spec,
        weights,
        total_blocks=sizing.total_blocks,
        max_batch_tokens=config.max_batch_tokens,
        max_sequences=config.max_sequences,
        context_tokens=sizing.context_tokens,
        threads=choose_threads(config.threads)[0],
        kv_dtype=config.kv_dtype,
        overlap=config.overlap,
        release=file.release,
    )
    return runner, Allocated(
        weights_bytes=runner.weight_bytes,
        kv_pool_bytes=runner.kv_bytes,
        activations_bytes=runner.activation_bytes,
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


def read_tokenizer(file: WeightsFile) -> Tokenizer:
    if isinstance(file, GgufFile):
        return Tokenizer.from_gguf(file.metadata)
    return Tokenizer.from_folder(file.path)


def read_chat_template(tokenizer: Tokenizer) -> ChatTemplate | None:
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


def _check_backend(backend: str) -> None:
    if backend not in get_args(BackendName):
        names = ", ".join(get_args(BackendName))
        raise ConfigError(
            f"backend is {backend!r}; expected one of {names}.", "Choose one.", param="backend"
        )
