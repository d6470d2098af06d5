"""Puts a model together: files, tokenizer, backend, engine. The only module that knows them all."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Literal, get_args

from headrace.core.config import SchedulerConfig
from headrace.core.errors import ConfigError, TemplateError
from headrace.core.step import Runner
from headrace.engine.loop import Engine
from headrace.models.catalog import Progress, silent
from headrace.models.resolve import resolve_model
from headrace.models.spec import ModelSpec
from headrace.tokenizer.chat_template import ChatTemplate
from headrace.tokenizer.tokenizer import Tokenizer
from headrace.weights.describe import describe_file
from headrace.weights.gguf import GgufFile
from headrace.weights.load import WeightsFile, find_weights, open_weights

BackendName = Literal["cpu", "reference"]

BLOCK_TOKENS = 16
# Of the memory that is free at start: what the KV pool may grow to. Until there is a ledger.
KV_MEMORY_FRACTION = 0.5


@dataclass(slots=True, kw_only=True)
class Assembled:
    """A model ready to run."""

    model_path: Path
    file: WeightsFile  # mapped for as long as the runner lives
    spec: ModelSpec
    tokenizer: Tokenizer
    chat_template: ChatTemplate | None
    runner: Runner
    engine: Engine

    def close(self) -> None:
        self.file.close()


def assemble(
    model: str | None = None,
    *,
    backend: BackendName = "cpu",
    threads: int | None = None,
    context_tokens: int | None = None,
    offline: bool = False,
    progress: Progress = silent,
    scheduler: SchedulerConfig | None = None,
) -> Assembled:
    _check_options(backend, threads, context_tokens)
    path = resolve_model(model, offline=offline, progress=progress)
    file = open_weights(path)
    try:
        spec, refs = describe_file(file, context_tokens)
        context = _choose_context(spec, context_tokens, backend)
        weights = find_weights(refs, file)
        tokenizer = read_tokenizer(file)
        blocks = -(-context // BLOCK_TOKENS)
        runner: Runner
        if backend == "cpu":
            from headrace.backends.cpu.machine import choose_threads
            from headrace.backends.cpu.runner import CpuRunner

            runner = CpuRunner(
                spec,
                weights,
                total_blocks=blocks,
                context_tokens=context,
                threads=choose_threads(threads)[0],
                release=file.release,
            )
        else:
            from headrace.backends.reference.runner import ReferenceRunner

            runner = ReferenceRunner(spec, weights, total_blocks=blocks, context_tokens=context)
    except BaseException:
        file.close()
        raise
    return Assembled(
        model_path=path,
        file=file,
        spec=spec,
        tokenizer=tokenizer,
        chat_template=_chat_template(tokenizer),
        runner=runner,
        engine=Engine(runner, tokenizer.eos_ids, scheduler),
    )


def read_tokenizer(file: WeightsFile) -> Tokenizer:
    if isinstance(file, GgufFile):
        return Tokenizer.from_gguf(file.metadata)
    return Tokenizer.from_folder(file.path)


def _chat_template(tokenizer: Tokenizer) -> ChatTemplate | None:
    try:
        return ChatTemplate(tokenizer.chat_template, tokenizer)
    except TemplateError:
        # A model without a template, or with a broken one, still completes plain prompts.
        if tokenizer.chat_template:
            raise
        return None


def _check_options(backend: str, threads: int | None, context_tokens: int | None) -> None:
    if backend not in get_args(BackendName):
        names = ", ".join(get_args(BackendName))
        raise ConfigError(
            f"backend is {backend!r}; expected one of {names}.", "Choose one.", param="backend"
        )
    for name, value in (("threads", threads), ("context_tokens", context_tokens)):
        if value is not None and (isinstance(value, bool) or value < 1):
            raise ConfigError(
                f"{name} is {value!r}; expected 1 or more.", f"Set {name} accordingly.", param=name
            )


def _choose_context(spec: ModelSpec, asked: int | None, backend: BackendName) -> int:
    """What was asked for, or as much of the model's context as memory is likely to hold."""
    if asked is not None:
        if asked > spec.context_tokens:
            raise ConfigError(
                f"context_tokens is {asked}; the model's context is {spec.context_tokens}.",
                f"Set context_tokens to {spec.context_tokens} or less.",
                param="context_tokens",
            )
        return asked
    from headrace.backends.cpu.machine import memory_bytes

    _, available = memory_bytes()
    if not available:
        return spec.context_tokens
    per_token = spec.kv_bytes_per_token(2 if backend == "cpu" else 4)
    fits = int(available * KV_MEMORY_FRACTION) // per_token
    return max(BLOCK_TOKENS, min(spec.context_tokens, fits // BLOCK_TOKENS * BLOCK_TOKENS))
