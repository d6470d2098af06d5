"""The winner as a deployment that dialects/ can write for an engine. Knows no flags."""

from __future__ import annotations

from headrace.dialects.deployment import Deployment
from headrace.search.answer import Row
from headrace.search.machine import MEMORY_SHARE
from headrace.search.models import PlannedModel
from headrace.search.question import Question

_CONTEXT_STEP = 256


def deployment_of(row: Row, model: PlannedModel, question: Question) -> Deployment:
    """With a context that holds the longest request, so that the KV pool is what was planned."""
    one = row.candidate
    longest = -(-question.lengths.longest_tokens // _CONTEXT_STEP) * _CONTEXT_STEP
    return Deployment(
        model=one.model,
        tensor_parallel=one.tp,
        replicas=row.replicas,
        context_tokens=min(longest, model.spec.context_tokens),
        max_sequences=one.max_sequences,
        max_batch_tokens=one.batch_tokens,
        quantization=None if one.precision == model.precision else one.precision,
        kv_dtype=one.kv_dtype,
        gpu_memory=MEMORY_SHARE,
        prefix_cache=one.prefix_cache,
    )
