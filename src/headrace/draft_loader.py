"""A draft model beside the model that answers: the same vocabulary, its memory counted, loaded.

Both KV pools hold the same number of tokens, so that no sequence outgrows the draft model's. Used
by assemble.py; knows files, backends and memory, and nothing of what drafts are for.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

from headrace.backends.backend import Backend
from headrace.core.config import EngineConfig
from headrace.core.errors import ConfigError, MemoryFitError
from headrace.core.sizes import show_bytes
from headrace.core.step import Runner
from headrace.models.decoder import DecoderWeights
from headrace.models.spec import ModelSpec
from headrace.plan.ledger import KvCost, predict
from headrace.plan.sizing import Footprint, Sizing, size_pool
from headrace.weights.describe import describe_file
from headrace.weights.load import WeightsFile, find_weights, open_weights
from headrace.weights.weight import Weight

if TYPE_CHECKING:
    from headrace.tokenizer.tokenizer import Tokenizer


@dataclass(slots=True, kw_only=True)
class DraftFiles:
    """A draft model that is described and not loaded."""

    name: str
    file: WeightsFile
    spec: ModelSpec
    weights: DecoderWeights[Weight]
    footprint: Footprint

    @property
    def fixed_bytes(self) -> int:
        """Weights, and the activations of its largest step."""
        sizes = self.footprint.sizes
        return self.footprint.weight_bytes + self.footprint.activation_bytes(
            sizes.max_batch_tokens, self.spec.context_tokens
        )


def open_draft(name: str, path: Path, backend: Backend, config: EngineConfig) -> DraftFiles:
    own = replace(config, context_tokens=None)
    file = open_weights(path, config.load_format)
    try:
        spec, refs = describe_file(file, None)
        weights = find_weights(refs, file)
        footprint = backend.footprint(spec, weights, own)
    except BaseException:
        file.close()
        raise
    return DraftFiles(name=name, file=file, spec=spec, weights=weights, footprint=footprint)


def check_vocabulary(
    model: str, tokenizer: Tokenizer | None, draft: str, theirs: Tokenizer | None
) -> None:
    """Refuses a draft model whose tokens are not the model's. Rows without a token, which some
    models have at the end of their vocabulary, may differ in number."""
    if tokenizer is None or theirs is None:
        if tokenizer is theirs:
            return
        which = model if tokenizer is None else draft
        raise _mismatch(model, draft, f"{which} has no tokenizer")
    if tokenizer.vocab_size != theirs.vocab_size:
        found = f"{tokenizer.vocab_size:,} and {theirs.vocab_size:,} tokens"
        raise _mismatch(model, draft, found)
    for token in range(tokenizer.vocab_size):
        if tokenizer.piece(token) != theirs.piece(token):
            found = f"token {token} is {tokenizer.piece(token)!r} and {theirs.piece(token)!r}"
            raise _mismatch(model, draft, found)


def _mismatch(model: str, draft: str, found: str) -> ConfigError:
    return ConfigError(
        f"The draft model {draft} does not have the vocabulary of {model}: {found}.",
        "Choose a smaller model of the same family, or speculate without one: --speculate suffix.",
        param="speculate",
    )


def size_with_draft(footprint: Footprint, draft: DraftFiles, config: EngineConfig) -> Sizing:
    """Blocks for a model beside its draft model; the ledger has a row for the latter."""
    each, theirs = footprint.kv_bytes_per_token, draft.footprint.kv_bytes_per_token
    available = footprint.available_bytes
    both = replace(
        footprint,
        kv_bytes_per_token=each + theirs,
        available_bytes=None if available is None else max(0, available - draft.fixed_bytes),
    )
    try:
        sizing = size_pool(both, config)
    except MemoryFitError as error:
        raise MemoryFitError(
            f"With the draft model {draft.name} ({show_bytes(draft.fixed_bytes)} without its KV "
            f"pool): {error.cause}",
            f"{error.remedy} Or leave the draft model out: --speculate suffix.",
            param="speculate",
            detail=error.detail,
        ) from error
    tokens = sizing.total_blocks * sizing.sizes.block_tokens
    ledger = replace(
        sizing.ledger,
        kv_pool_bytes=tokens * each,
        kv=KvCost.of(footprint.spec, footprint.kv_dtype, each),
        draft_bytes=draft.fixed_bytes + tokens * theirs,
        available_bytes=available,
    )
    return replace(sizing, ledger=ledger)


def load_draft(draft: DraftFiles, sizing: Sizing, backend: Backend, config: EngineConfig) -> Runner:
    """The draft model ready to compute; as many tokens of KV as the model has."""
    context = min(sizing.context_tokens, draft.spec.context_tokens)
    footprint, sizes = draft.footprint, sizing.sizes
    ledger = predict(
        draft.spec,
        weight_bytes=footprint.weight_bytes,
        activation_bytes=footprint.activation_bytes(sizes.max_batch_tokens, context),
        kv_bytes_per_token=footprint.kv_bytes_per_token,
        kv_dtype=footprint.kv_dtype,
        total_blocks=sizing.total_blocks,
        block_tokens=sizes.block_tokens,
        max_batch_tokens=sizes.max_batch_tokens,
        graphs_bytes=footprint.graphs_bytes,
        runtime_bytes=0,  # shared
    )
    own = replace(sizing, context_tokens=context, ledger=ledger, notes=())
    runner, _ = backend.load(draft.spec, draft.weights, own, config, draft.file.release)
    return runner
