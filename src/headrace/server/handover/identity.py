"""A hash of everything that the contents of KV blocks depend on.

Engines with the same one compute the same blocks for the same tokens, and can exchange them.
Narrower than a server's fingerprint (server/start/fingerprint.py): the two sides may have other
pools, limits and templates. Knows the assembled engine.
"""

from __future__ import annotations

import hashlib
import json
from dataclasses import asdict
from typing import TYPE_CHECKING

from headrace.core.version import headrace_version
from headrace.weights.sampled import hash_tensors

if TYPE_CHECKING:
    from headrace.assemble import Assembled


def kv_fingerprint(assembled: Assembled) -> str:
    moves = assembled.engine.moves
    facts = {
        "headrace": headrace_version(),
        "spec": asdict(assembled.spec),
        "tensors": hash_tensors(assembled.file),
        "backend": assembled.backend.facts(assembled.config),
        "layout": None if moves is None else moves.block_layout,
    }
    text = json.dumps(facts, sort_keys=True, default=str)
    return f"kv-{hashlib.sha256(text.encode()).hexdigest()[:16]}"
