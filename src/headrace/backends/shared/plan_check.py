"""Checks that a runner can compute a plan, before it changes anything.

`check_plan` is fast enough for every step: it looks at columns, not at block tables. Runners
that do not check tables and the ids in draws where they read them also call `check_blocks` and
`check_draws`. A wrong plan is always a bug in Headrace.
"""

from __future__ import annotations

from itertools import chain
from operator import add

from headrace.core.errors import HeadraceError
from headrace.core.step import PREVIOUS, RunnerLimits, StepPlan


def mistaken(found: str, expected: str) -> HeadraceError:
    return HeadraceError(
        f"The step plan has {found}; expected {expected}.",
        "This is a mistake in Headrace: please report it.",
    )


def check_plan(plan: StepPlan, limits: RunnerLimits, vocab_size: int) -> bool:
    """Whether there is a PREVIOUS among its tokens."""
    for pair in plan.copies:
        if not all(0 <= block < limits.total_blocks for block in pair):
            raise mistaken(f"a copy of blocks {pair}", f"0 to {limits.total_blocks - 1}")
    rows, tokens = len(plan), plan.token_ids
    columns = (plan.counts, plan.starts, plan.tables, plan.versions, plan.draws, plan.uniforms)
    if {rows} != {len(column) for column in columns}:
        raise mistaken("columns of different lengths", f"{rows} rows")
    if not rows:
        return False
    if len(tokens) > limits.max_batch_tokens:
        raise mistaken(f"{len(tokens)} tokens", f"at most {limits.max_batch_tokens}")
    if rows > limits.max_sequences:
        raise mistaken(f"{rows} rows", f"at most {limits.max_sequences}")
    if len(set(plan.sequence_ids)) != rows:
        raise mistaken("a sequence in more than one row", "one row per sequence")
    if min(plan.counts) < 1 or sum(plan.counts) != len(tokens):
        raise mistaken(f"{len(tokens)} tokens for counts of {plan.counts}", "1 or more per row")
    last = max(plan.starts) if len(tokens) == rows else max(map(add, plan.starts, plan.counts)) - 1
    if min(plan.starts) < 0 or last >= limits.context_tokens:
        raise mistaken(
            f"tokens at positions {min(plan.starts)} to {last}",
            f"positions within the context of {limits.context_tokens}",
        )
    least = min(tokens)
    if least < PREVIOUS or max(tokens) >= vocab_size:
        raise mistaken("a token outside the vocabulary", f"0 to {vocab_size - 1}")
    if plan.extras:
        _check_extras(plan, vocab_size)
    if plan.drafts:
        _check_drafts(plan, limits)
    return least == PREVIOUS


def _check_extras(plan: StepPlan, vocab_size: int) -> None:
    for row, extra in plan.extras.items():
        if not 0 <= row < len(plan):
            raise mistaken(f"extras for row {row}", f"rows 0 to {len(plan) - 1}")
        who = f"sequence {plan.sequence_ids[row]}"
        if extra.targets is not None:
            if len(extra.targets) != plan.counts[row]:
                raise mistaken(f"{who} with {len(extra.targets)} targets", f"{plan.counts[row]}")
            if min(extra.targets) < 0 or max(extra.targets) >= vocab_size:
                raise mistaken(
                    f"{who} with a target outside the vocabulary", f"0 to {vocab_size - 1}"
                )
        if not 0 <= extra.top_logprobs <= vocab_size:
            raise mistaken(f"{who} with {extra.top_logprobs} top_logprobs", f"0 to {vocab_size}")


def _check_drafts(plan: StepPlan, limits: RunnerLimits) -> None:
    if not limits.draws_drafts:
        raise mistaken(f"drafts in {len(plan.drafts)} rows", "none, as this runner draws none")
    for row, drafts in plan.drafts.items():
        if not 0 <= row < len(plan):
            raise mistaken(f"drafts for row {row}", f"rows 0 to {len(plan) - 1}")
        who, extra = f"sequence {plan.sequence_ids[row]}", plan.extras.get(row)
        if not 1 <= len(drafts) < plan.counts[row]:
            raise mistaken(
                f"{who} with {len(drafts)} drafts among {plan.counts[row]} tokens",
                "1 or more, after a known token",
            )
        if {len(drafts.banned), len(drafts.masks)} - {0, len(drafts)}:
            raise mistaken(f"{who} with limits for other than {len(drafts)} drafts", "one for each")
        if plan.draws[row] is None or (extra is not None and extra.targets is not None):
            raise mistaken(f"{who} with drafts that are not drawn after, or scored", "a draw only")


def short_table(sequence_id: int, blocks: int, end: int, limits: RunnerLimits) -> HeadraceError:
    """Of a table that does not cover its row's tokens."""
    return mistaken(
        f"sequence {sequence_id} with {blocks} blocks of {limits.block_tokens} tokens",
        f"enough for {end} tokens",
    )


def check_blocks(plan: StepPlan, limits: RunnerLimits) -> None:
    """Every table covers its row's tokens, with blocks of the pool."""
    ends = map(add, plan.starts, plan.counts)
    for sequence_id, table, end in zip(plan.sequence_ids, plan.tables, ends, strict=True):
        if len(table) * limits.block_tokens < end:
            raise short_table(sequence_id, len(table), end, limits)
        if min(table) < 0 or max(table) >= limits.total_blocks:
            raise mistaken(
                f"sequence {sequence_id} with blocks {table}", f"0 to {limits.total_blocks - 1}"
            )


def check_draws(plan: StepPlan, vocab_size: int) -> None:
    """Every token that a draw names is in the vocabulary."""
    for row, draw in enumerate(plan.draws):
        extra, drafts = plan.extras.get(row), plan.drafts.get(row)
        if draw is None or not (draw.adjusts or extra is not None or drafts is not None):
            continue
        named = chain(draw.bias, draw.allowed or ())
        if extra is not None:
            named = chain(named, extra.banned, extra.history)
        if drafts is not None:
            named = chain(named, *drafts.banned)
        if not all(0 <= token < vocab_size for token in named):
            raise mistaken(
                f"sequence {plan.sequence_ids[row]} with a draw that names a token outside the "
                "vocabulary",
                f"0 to {vocab_size - 1}",
            )
