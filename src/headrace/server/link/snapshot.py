"""The engine's counters at one moment, as its process sends them to the HTTP process.

Counts are since that engine started: a successor starts at 0 again, and `engine_pid` tells one from
the other where they are summed. Knows the engine's counters; not their public names.
"""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

import msgspec

if TYPE_CHECKING:  # the HTTP process does not need them, and starts faster without
    from headrace.engine.loop import Engine
    from headrace.plan.ledger import Allocated, Ledger
    from headrace.server.grammars.places import GrammarStats
    from headrace.server.handover.counts import HandoverCounts

_STATM_BYTES = os.sysconf("SC_PAGE_SIZE")


class TenantSnapshot(msgspec.Struct, frozen=True, kw_only=True):
    """One key's part of the counters."""

    running: int = 0  # sequences, now
    waiting: int = 0
    computed_tokens: int = 0  # since the engine started
    gave_way: int = 0


class PrefixDiskSnapshot(msgspec.Struct, frozen=True, kw_only=True):
    """See core/block_store.py."""

    stored_bytes: int  # now
    hits_tokens: int
    loaded_bytes: int
    written_bytes: int
    blocks: dict[str, int]  # by what became of them: loaded, written, dropped, evicted
    failures: dict[str, int]  # by kind: read, write, corrupt, late


class EngineSnapshot(msgspec.Struct, frozen=True, kw_only=True):
    engine_pid: int
    # Now.
    running_sequences: int
    waiting_sequences: int
    waiting_tokens: int
    free_blocks: int
    used_blocks: int
    cached_blocks: int
    resident_bytes: int
    # Since the engine started.
    steps: int
    computed_prompt_tokens: int  # recomputation counts again
    generated_tokens: int
    preemptions: int
    preempted_tokens: int
    cow_copies: int
    prefix_queries_tokens: int
    prefix_hits_tokens: int
    prefix_misses: dict[str, int]
    step_tokens: list[float]  # number of steps per bucket of core/histogram.py
    step_tokens_sum: float
    grammar_processes: int = 0
    grammar_bytes: int = 0
    grammar_outcomes: dict[str, int] = {}
    grammar_s: float = 0.0  # spent compiling and following grammars
    step_s: dict[str, float]  # by part: schedule, compute, sample, commit, publish
    tenants: dict[str, TenantSnapshot] = {}
    drafts: int = 0  # rows of steps that had guessed tokens
    draft_tokens: int = 0
    accepted_tokens: int = 0  # of them
    accepted_at: list[int] = []  # by place in the draft
    drafting_s: float = 0.0  # spent on guessing
    prefix_disk: PrefixDiskSnapshot | None = None  # None: there is none
    handovers: dict[str, int] = {}  # by outcome: "whole", or why blocks were missing
    handover_bytes: int = 0
    handover_s: float = 0.0
    handover_skipped: int = 0  # prompts too short to be fetched


def take_snapshot(
    engine: Engine,
    publish_s: float = 0.0,
    grammars: GrammarStats | None = None,
    handovers: HandoverCounts | None = None,
) -> EngineSnapshot:
    """May be called from another thread than the loop's: each number is read atomically, but the
    loop may move on between two of them."""
    stats, blocks, scheduler = engine.stats, engine.blocks, engine.scheduler
    return EngineSnapshot(
        engine_pid=os.getpid(),
        running_sequences=scheduler.running_sequences,
        waiting_sequences=scheduler.waiting_sequences,
        waiting_tokens=stats.waiting_prompt_tokens,
        free_blocks=blocks.free_blocks,
        used_blocks=blocks.used_blocks,
        cached_blocks=blocks.cached_blocks,
        resident_bytes=_resident_bytes(),
        steps=stats.steps,
        computed_prompt_tokens=stats.prompt_tokens,
        generated_tokens=stats.generated_tokens,
        preemptions=stats.preemptions,
        preempted_tokens=stats.preempted_tokens,
        cow_copies=stats.cow_copies,
        prefix_queries_tokens=stats.prefix_queries_tokens,
        prefix_hits_tokens=stats.prefix_hits_tokens,
        prefix_misses=dict(stats.prefix_misses),
        step_tokens=stats.step_tokens.counts,
        step_tokens_sum=stats.step_tokens.sum,
        grammar_processes=0 if grammars is None else grammars.processes,
        grammar_bytes=0 if grammars is None else grammars.bytes,
        grammar_outcomes={} if grammars is None else dict(grammars.outcomes),
        grammar_s=0.0 if grammars is None else grammars.seconds,
        step_s={
            "schedule": stats.schedule_s,
            "compute": stats.compute_s,
            "sample": stats.sample_s,
            "commit": stats.commit_s,
            "publish": publish_s,
        },
        tenants={
            turn.tenant: TenantSnapshot(
                running=turn.running,
                waiting=stats.waiting.count(turn.tenant),
                computed_tokens=turn.tokens,
                gave_way=turn.gave_way,
            )
            for turn in stats.turns.known
        },
        drafts=stats.drafts.drafts,
        draft_tokens=stats.drafts.draft_tokens,
        accepted_tokens=stats.drafts.accepted_tokens,
        accepted_at=list(stats.drafts.accepted_at),
        drafting_s=stats.drafts.drafting_s,
        prefix_disk=_disk_snapshot(engine),
        handovers={} if handovers is None else dict(handovers.outcomes),
        handover_bytes=0 if handovers is None else handovers.bytes,
        handover_s=0.0 if handovers is None else handovers.seconds,
        handover_skipped=0 if handovers is None else handovers.skipped,
    )


def _disk_snapshot(engine: Engine) -> PrefixDiskSnapshot | None:
    if engine.scheduler.fetching is None:
        return None
    stats = engine.scheduler.fetching.store.stats
    return PrefixDiskSnapshot(
        stored_bytes=stats.stored_bytes,
        hits_tokens=stats.hits_tokens,
        loaded_bytes=stats.loaded_bytes,
        written_bytes=stats.written_bytes,
        blocks={
            "loaded": stats.loaded_blocks,
            "written": stats.written_blocks,
            "dropped": stats.dropped_blocks,
            "evicted": stats.evicted_blocks,
        },
        failures={**stats.errors, "late": stats.late_loads},
    )


def ledger_parts(ledger: Ledger, allocated: Allocated | None) -> dict[str, dict[str, int]]:
    """The engine's memory as predicted, and as allocated where that was measured: kind -> part ->
    bytes."""
    predicted = {
        "weights": ledger.weights_bytes,
        "kv_pool": ledger.kv_pool_bytes,
        "activations": ledger.activations_bytes,
        "runtime": ledger.runtime_bytes,
        **({"graphs": ledger.graphs_bytes} if ledger.graphs_bytes else {}),
        **({"draft_model": ledger.draft_bytes} if ledger.draft_bytes else {}),
        **({"answers": ledger.answers_bytes} if ledger.answers_bytes else {}),
    }
    if allocated is None:
        return {"predicted": predicted}
    return {
        "predicted": predicted,
        "allocated": {
            "weights": allocated.weights_bytes,
            "kv_pool": allocated.kv_pool_bytes,
            "activations": allocated.activations_bytes,
            **({} if allocated.graphs_bytes is None else {"graphs": allocated.graphs_bytes}),
        },
    }


def _resident_bytes() -> int:
    try:
        with open("/proc/self/statm", "rb") as file:
            return int(file.read().split()[1]) * _STATM_BYTES
    except (OSError, ValueError, IndexError):
        return 0  # not Linux
