"""What a token and a step of the loaded model take: what the use of a device is worked out from.

Matrix products only, as everyone counts a model's FLOPs. Knows a model's shapes and its ledger.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from headrace.plan.fit_work import work_of

if TYPE_CHECKING:  # the HTTP process reads the result only
    from headrace.models.spec import ModelSpec
    from headrace.plan.ledger import Ledger


def work_facts(spec: ModelSpec, ledger: Ledger) -> dict[str, float]:
    """token_flops: of one token. step_bytes: weights that every step reads; absent for a mixture of
    experts, whose steps read as many experts as their tokens choose. block_bytes: one KV block."""
    work = work_of(spec, {})
    found = {
        "token_flops": float(work.token_flops),
        "block_bytes": float(ledger.kv.bytes_per_token * ledger.block_tokens),
    }
    if all(layer.experts is None for layer in spec.layer_specs):
        values = sum(work.part_values.values())
        # An embedding table of its own is looked up, not read.
        looked_up = 0.0 if spec.tied_embeddings else work.part_values["embedding"] / values
        found["step_bytes"] = ledger.weights_bytes * (1 - looked_up)
    return found
