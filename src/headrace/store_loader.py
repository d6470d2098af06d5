"""Opens the prefix cache on disk that an engine's settings ask for, and says what it will hold.

Knows the model, the backend and the settings, which together say whose blocks these are; not the
files themselves (prefix_disk/).
"""

from __future__ import annotations

import hashlib
import json

from headrace.backends.backend import Backend
from headrace.core.block_store import BlockStore
from headrace.core.config import EngineConfig
from headrace.core.errors import ConfigError
from headrace.core.step import MovesBlocks, Runner
from headrace.core.version import headrace_version
from headrace.models.spec import ModelSpec
from headrace.plan.ledger import Ledger
from headrace.prefix_disk.open import open_store
from headrace.prefix_disk.outlook import check_disk, describe_disk
from headrace.weights.load import WeightsFile
from headrace.weights.model_hash import hash_model


def load_store(
    config: EngineConfig, backend: Backend, runner: Runner, file: WeightsFile, spec: ModelSpec
) -> BlockStore | None:
    """None: the settings ask for none."""
    if config.prefix_disk is None:
        return None
    if not isinstance(runner, MovesBlocks):
        raise ConfigError(
            f"prefix_disk is set; the {backend.name.value} device can't keep KV blocks elsewhere.",
            "Leave it out.",
            param="prefix_disk",
        )
    return open_store(config.prefix_disk, kv_identity(config, backend, runner, file, spec), runner)


def kv_identity(
    config: EngineConfig, backend: Backend, runner: MovesBlocks, file: WeightsFile, spec: ModelSpec
) -> bytes:
    """A hash of everything that the bits of a KV block depend on, besides its tokens: where it is
    equal, blocks may be exchanged. Narrower than a server's fingerprint, which also has settings
    that change answers and no block."""
    facts = {
        "headrace": headrace_version(),
        "model": hash_model(file, spec),
        "backend": backend.facts(config),
        "layout": runner.block_layout,
        "quantization": config.quantization.value,
        "batch_invariant": config.batch_invariant,
    }
    return hashlib.sha256(json.dumps(facts, sort_keys=True).encode()).digest()


def describe_store(config: EngineConfig, ledger: Ledger) -> list[str]:
    """Notes for a person."""
    if config.prefix_disk is None:
        return []
    return describe_disk(config.prefix_disk, _block_bytes(ledger), ledger.block_tokens)


def check_store(config: EngineConfig, ledger: Ledger) -> None:
    """Refuses what `load_store` would refuse, as far as that can be known without writing."""
    if config.prefix_disk is not None:
        check_disk(config.prefix_disk, _block_bytes(ledger))


def _block_bytes(ledger: Ledger) -> int:
    return ledger.kv.bytes_per_token * ledger.block_tokens
