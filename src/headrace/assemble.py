"""Puts a model together: files, tokenizer, backend, engine. The only module that knows them all."""

from __future__ import annotations

import logging
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple
from weakref import finalize

from headrace.backends.backend import Backend
from headrace.backends.registry import choose_backend
from headrace.core.block_store import BlockStore
from headrace.core.config import RENAMED, EngineConfig, LoadFormat
from headrace.core.drafter import Method, read_drafter
from headrace.core.errors import ConfigError, TemplateError
from headrace.core.sampling import DrawNumbers
from headrace.core.sizes import show_bytes
from headrace.core.speculation import Speculator
from headrace.core.step import Runner
from headrace.draft_loader import (
    DraftFiles,
    check_vocabulary,
    load_draft,
    open_draft,
    size_with_draft,
)
from headrace.engine.loop import Engine
from headrace.fetch.catalog import Progress, silent
from headrace.fetch.resolve import resolve_model
from headrace.fetch.verify import Checked, check_model
from headrace.models.decoder import DecoderWeights
from headrace.models.sharding import share_of
from headrace.models.spec import ModelSpec
from headrace.models.stages import stages_of
from headrace.parallel.leader import LeadingRunner
from headrace.parallel.team import Team, check_torch, size_of, with_size
from headrace.plan.ledger import Allocated, Ledger
from headrace.plan.sizing import Footprint, Sizing, size_pool
from headrace.store_loader import describe_store, load_store
from headrace.weights.describe import describe_file
from headrace.weights.dummy import DummyFolder
from headrace.weights.files.gguf import GgufFile
from headrace.weights.load import OpenFile, WeightsFile, find_weights, open_weights
from headrace.weights.model_hash import hash_model
from headrace.weights.sampling_defaults import read_sampling_defaults
from headrace.weights.shard import share_weights, stage_weights
from headrace.weights.weight import Weight

if TYPE_CHECKING:  # imported late: benchmarks with random weights run without these packages
    from headrace.grammar import GrammarCompiler
    from headrace.tokenizer.chat_template import ChatTemplate
    from headrace.tokenizer.tokenizer import Tokenizer

logger = logging.getLogger("headrace")


@dataclass(slots=True, kw_only=True, weakref_slot=True)
class Assembled:
    """A model ready to run, until `close()`, which also happens when this object is collected or
    the interpreter exits."""

    model_path: Path
    file: WeightsFile  # mapped for as long as the runner lives
    spec: ModelSpec
    read_tokenizer: Tokenizer | None  # None: dummy weights without a tokenizer
    chat_template: ChatTemplate | None
    sampling_defaults: DrawNumbers  # for parameters that a request does not set
    config: EngineConfig
    backend: Backend
    runner: Runner
    engine: Engine
    ledger: Ledger  # predicted before anything was loaded
    allocated: Allocated | None  # as measured by the backend; None: it does not measure
    notes: tuple[str, ...]  # what a user might not expect
    draft: Draft | None = None  # a second model, which guesses tokens
    speculator: Speculator | None = None  # the engine's
    store: BlockStore | None = None  # likewise: its prefix cache on disk
    _grammars: GrammarCompiler | None = field(default=None, repr=False)
    _closed: finalize[..., Assembled] = field(init=False, repr=False)

    def __post_init__(self) -> None:
        self._closed = finalize(self, _close, self.runner, self.file, self.draft, self.store)

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


class Draft(NamedTuple):
    runner: Runner
    files: DraftFiles


def _close(
    runner: Runner, file: WeightsFile, draft: Draft | None, store: BlockStore | None
) -> None:
    if store is not None:
        store.close()
    runner.close()
    file.close()
    if draft is not None:
        draft.runner.close()
        draft.files.file.close()


def assemble(
    model: str | None = None,
    *,
    config: EngineConfig | None = None,
    offline: bool = False,
    progress: Progress = silent,
    checked: Checked | None = None,
    **settings: Any,
) -> Assembled:
    """`settings` are fields of EngineConfig, in place of a `config`. `checked` is the result of
    checking the model's files, if the parent process has already done that."""
    config = _choose_config(config, settings)
    backend = choose_backend(config)
    config = replace(config, speculate=config.sizes(backend.defaults).speculate)
    path = resolve_model(model, offline=offline, progress=progress)
    if config.load_format is not LoadFormat.DUMMY:
        checked = check_model(path, again=config.verify, before=checked, progress=progress)
    with ExitStack() as undo:  # if anything fails
        file = open_weights(path, config.load_format)
        undo.callback(file.close)
        sampling_defaults = read_sampling_defaults(path, file, config.generation_config)
        draft_files = find_draft(config, backend, offline=offline, progress=progress)
        if draft_files is not None:
            undo.callback(draft_files.file.close)
        spec, weights, sizing = plan_memory(file, backend, config, draft_files)
        team = ranks = None
        if config.ranks > 1:
            check_torch()
            team = Team(path, config, backend.name, _hash_whole(file, config))
            undo.callback(team.close)
            size = team.agree(size_of(sizing))
            sizing = with_size(sizing, size)
            ranks = backend.join(config, 0, team.meeting)
            undo.callback(ranks.close)
        tokenizer = None if _lacks_tokenizer(file, config) else read_tokenizer(file)
        if draft_files is not None:
            check_draft(path, file, draft_files, config)
        release = file.release if ranks is None else lambda _: None
        runner, allocated = backend.load(spec, weights, sizing, config, release, ranks)
        if team is not None and ranks is not None:
            team.wait()
            runner = LeadingRunner(runner, team, ranks)
        undo.callback(runner.close)
        draft = None
        if draft_files is not None:
            draft = Draft(load_draft(draft_files, sizing, backend, config), draft_files)
            undo.callback(draft.runner.close)
        if checked is not None:
            checked.confirm()
        speculator = _speculator(config, runner, spec, draft)
        store = load_store(config, backend, runner, file, spec)
        undo.pop_all()
    notes = (
        *sizing.notes,
        *_compare(sizing.ledger, allocated),
        *describe_store(config, sizing.ledger),
    )
    logger.info("memory\n%s", sizing.ledger.render(allocated))
    eos_ids = frozenset[int]() if tokenizer is None else tokenizer.eos_ids
    paced = replace(config, max_step_growth=sizing.sizes.max_step_growth)
    return Assembled(
        model_path=path,
        file=file,
        spec=spec,
        read_tokenizer=tokenizer,
        chat_template=None if tokenizer is None else read_chat_template(tokenizer),
        sampling_defaults=sampling_defaults,
        config=config,
        backend=backend,
        runner=runner,
        engine=Engine(runner, eos_ids, paced, speculator=speculator, store=store),
        ledger=sizing.ledger,
        allocated=allocated,
        notes=notes,
        draft=draft,
        speculator=speculator,
        store=store,
    )


def _hash_whole(file: OpenFile, config: EngineConfig) -> str:
    whole, _ = describe_file(file, config.context_tokens)
    return hash_model(file, whole)


def plan_memory(
    file: OpenFile,
    backend: Backend,
    config: EngineConfig,
    draft: DraftFiles | None = None,
    available_bytes: int | None = None,
) -> tuple[ModelSpec, DecoderWeights[Weight], Sizing]:
    """The model and the memory it would take, of what is free now or of `available_bytes`. Loads
    no weight."""
    spec, weights, footprint = _share(file, backend, config, rank=0)
    if available_bytes is not None:
        footprint = replace(footprint, available_bytes=available_bytes)
    if draft is not None:
        return spec, weights, size_with_draft(footprint, draft, config)
    return spec, weights, size_pool(footprint, config)


def plan_share(
    file: OpenFile, backend: Backend, config: EngineConfig, rank: int
) -> tuple[ModelSpec, DecoderWeights[Weight], Sizing]:
    """The same for another of the ranks that compute the model together."""
    spec, weights, footprint = _share(file, backend, config, rank)
    return spec, weights, size_pool(footprint, config)


def _share(
    file: OpenFile, backend: Backend, config: EngineConfig, rank: int
) -> tuple[ModelSpec, DecoderWeights[Weight], Footprint]:
    whole, refs = describe_file(file, config.context_tokens)
    weights = find_weights(refs, file)
    ranks, stages = config.tensor_parallel, config.pipeline_parallel
    if stages > 1:  # the first ranks have the last stage: one of them draws
        stage = stages_of(whole.layers, stages)[stages - 1 - rank // ranks]
        whole, weights = stage.share_of(whole), stage_weights(weights, stage)
    spec = share_of(whole, ranks)
    weights = share_weights(whole, weights, rank % ranks, ranks)
    return spec, weights, backend.footprint(spec, weights, config)


def find_draft(
    config: EngineConfig,
    backend: Backend,
    *,
    offline: bool = False,
    progress: Progress = silent,
) -> DraftFiles | None:
    """The draft model that the settings ask for, described and not loaded."""
    drafter = read_drafter(config.speculate or Method.OFF, "speculate", ConfigError)
    if drafter.method is not Method.DRAFT:
        return None
    path = resolve_model(drafter.model, offline=offline, progress=progress)
    if config.load_format is not LoadFormat.DUMMY:
        check_model(path, again=config.verify, progress=progress)
    return open_draft(drafter.model, path, backend, config)


def check_draft(path: Path, file: WeightsFile, draft: DraftFiles, config: EngineConfig) -> None:
    """Refuses a draft model that does not have the model's vocabulary."""
    ours, theirs = (
        None if _lacks_tokenizer(each, config) else read_tokenizer(each)
        for each in (file, draft.file)
    )
    check_vocabulary(path.name, ours, draft.name, theirs)


def _speculator(
    config: EngineConfig, runner: Runner, spec: ModelSpec, draft: Draft | None
) -> Speculator | None:
    drafter = read_drafter(config.speculate or Method.OFF, "speculate", ConfigError)
    if drafter.method is Method.OFF:
        return None
    from headrace.speculate.draft_model import DraftModel
    from headrace.speculate.speculator import TimedSpeculator
    from headrace.speculate.synthetic import SyntheticDrafter

    model = synthetic = None
    if draft is not None:
        shared = min(spec.vocab_size, draft.files.spec.vocab_size)
        model = DraftModel(draft.runner, shared)
    if drafter.method is Method.SYNTHETIC:
        synthetic = SyntheticDrafter(drafter.rate)
    return TimedSpeculator(
        drafter.method, most_tokens=config.max_draft_tokens, model=model, synthetic=synthetic
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
    """Random weights may come without a tokenizer."""
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
    if config is None or settings.keys() & RENAMED:
        return EngineConfig.from_mapping(settings)  # raises for unknown and old names
    if settings:
        raise ConfigError(
            f"config and {', '.join(settings)} are given; expected one or the other.",
            "Put them into the config.",
            param="config",
        )
    return config
