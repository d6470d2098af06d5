"""Which engines may exchange KV blocks: those with the same hash of everything that the contents
depend on (store_loader.py). The two sides may have other pools, limits and templates. Knows the
assembled engine.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from headrace.store_loader import kv_identity

if TYPE_CHECKING:
    from headrace.assemble import Assembled


def kv_fingerprint(assembled: Assembled) -> str:
    """Empty: its blocks can't be taken out."""
    moves = assembled.engine.moves
    if moves is None:
        return ""
    identity = kv_identity(
        assembled.config, assembled.backend, moves, assembled.file, assembled.spec
    )
    return f"kv-{identity.hex()[:16]}"
