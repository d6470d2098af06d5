"""The first rows of a plan: one token for each sequence that is one token behind.

Nearly all rows of nearly all steps are these, so they are written a column at a time rather than a
row at a time. First every sequence that needs a block gets one, which may preempt others; then it
is known who is left, and the columns can be filled in. Knows plans and sequences; who may decode,
and where blocks come from, others decide.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable

from headrace.core.step import PREVIOUS
from headrace.engine.next_plan import NextPlan
from headrace.engine.sequence import Sequence, Status

# Gets blocks for a sequence's positions from..to; False: it was preempted itself.
MakeRoom = Callable[[Sequence, int, int, NextPlan], bool]

_RUNNING = Status.RUNNING  # looked up once, not with every row


def add_decoding(
    sequences: Iterable[Sequence], new: NextPlan, make_room: MakeRoom
) -> list[Sequence]:
    """Adds the rows of sequences that decode to a plan that has none. Returns the sequences that
    have more tokens to compute than one, or prompt tokens."""
    rows: list[Sequence] = []
    others: list[Sequence] = []
    has_extras = False
    for sequence in sequences:
        # As `Sequence.wanted_tokens`; a call for each row would be a tenth of the step.
        known, drawing = len(sequence.token_ids), sequence.draws_in_flight
        if drawing and (sequence.needs_last_token or known + 1 >= sequence.full_tokens):
            continue
        start = sequence.scheduled_tokens
        wanted = known + drawing - start
        if wanted != 1 or start < sequence.prompt_tokens:
            if wanted > 0:
                others.append(sequence)
            continue
        if sequence.status is not _RUNNING:  # preempted for an earlier row
            continue
        if start >= sequence.own_tokens and not make_room(sequence, start, start + 1, new):
            continue
        rows.append(sequence)
        if sequence.brings_extra:
            has_extras = True
    if new.has_lost:
        rows = [sequence for sequence in rows if sequence.status is _RUNNING]
    if rows:
        _fill(rows, new, has_extras)
    return others


def _fill(rows: list[Sequence], new: NextPlan, has_extras: bool) -> None:
    plan, count = new.plan, len(rows)
    plan.sequence_ids = [sequence.sequence_id for sequence in rows]
    plan.counts = [1] * count
    plan.starts = [sequence.scheduled_tokens for sequence in rows]
    plan.token_ids = [
        PREVIOUS if sequence.draws_in_flight else sequence.token_ids[-1] for sequence in rows
    ]
    plan.tables = [sequence.blocks for sequence in rows]
    plan.versions = [sequence.table_version for sequence in rows]
    plan.draws = [sequence.draws.params for sequence in rows]
    plan.uniforms = [
        sequence.next_uniform() if sequence.draws.params.temperature else 0.0 for sequence in rows
    ]
    if has_extras:
        plan.extras = {
            row: sequence.next_extra() for row, sequence in enumerate(rows) if sequence.brings_extra
        }
    new.sequences = dict(zip(plan.sequence_ids, rows, strict=True))
    new.prompt_budget -= count
    for sequence in rows:
        sequence.draws_in_flight += 1
        sequence.scheduled_tokens += 1
