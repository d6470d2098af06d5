"""Plans and results for tests, a row at a time: `plan_of(Row(...), ...)` and `rows_of(result)`.

A `Draw` says all that one draw needs in one place; the columns that it goes to are core/step.py's.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from headrace.backends.reference import sampling
from headrace.core.sampling import FILTERS, PENALTIES, DrawNumbers
from headrace.core.step import (
    Drafts,
    DrawParams,
    FlatBias,
    RowExtra,
    RowResult,
    StepPlan,
    StepResult,
    TopLogprobs,
)

_TABLES: list[list[int]] = []  # held, so that no other list can take the identity of one


@dataclass(frozen=True, slots=True, kw_only=True)
class Draw(DrawNumbers):
    bias: Mapping[int, float] = field(default_factory=dict)
    allowed: Collection[int] | None = None
    history: Sequence[int] = ()
    prompt_tokens: int = 0
    banned: Collection[int] = ()
    mask: bytes | None = None
    uniform: float = 0.0

    @property
    def params(self) -> DrawParams:
        return DrawParams(
            **{name: getattr(self, name) for name in (*FILTERS, *PENALTIES)},
            bias=self.bias if isinstance(self.bias, FlatBias) else FlatBias(self.bias),
            allowed=self.allowed,
        )

    @property
    def extra(self) -> RowExtra:
        return RowExtra(
            banned=self.banned,
            mask=self.mask,
            history=self.history,
            prompt_tokens=self.prompt_tokens,
        )

    @property
    def has_extra(self) -> bool:
        return bool(len(self.banned) or self.mask is not None or self.params.penalizes)


@dataclass(slots=True, kw_only=True)
class Row:
    """One sequence's share of a step. A table that is the very list of an earlier row has its
    version; any other list is another version."""

    sequence_id: int
    token_ids: list[int]
    start: int
    block_table: list[int]
    draw: Draw | None = None
    targets: list[int] | None = None
    top_logprobs: int = 0
    pool: bool = False
    drafts: Drafts | None = None


def plan_of(*rows: Row, copies: Sequence[tuple[int, int]] = ()) -> StepPlan:
    plan = StepPlan(copies=list(copies))
    for row in rows:
        draw = row.draw
        extra = None if draw is None or not draw.has_extra else draw.extra
        if row.targets is not None or row.top_logprobs or row.pool:
            extra = extra or RowExtra()
            extra.targets, extra.top_logprobs, extra.pool = row.targets, row.top_logprobs, row.pool
        _TABLES.append(row.block_table)
        plan.add(
            row.sequence_id,
            row.token_ids,
            row.start,
            row.block_table,
            id(row.block_table),
            None if draw is None else draw.params,
            0.0 if draw is None else draw.uniform,
            extra,
            row.drafts,
        )
    return plan


@dataclass(slots=True, kw_only=True)
class Found:
    """A row's result."""

    token_id: int | None = None
    logprob: float = 0.0
    top: TopLogprobs = ()
    target_logprobs: Sequence[float] = ()
    target_top: Sequence[TopLogprobs] = ()
    pooled: list[float] | None = None
    error: str | None = None
    is_own_fault: bool = False


def rows_of(result: StepResult) -> list[Found]:
    rows = []
    for row, (tokens, logprobs) in enumerate(zip(result.tokens, result.logprobs, strict=True)):
        assert len(tokens) == len(logprobs) <= 1
        extra = result.extras.get(row, RowResult())
        rows.append(
            Found(
                token_id=tokens[0] if tokens else None,
                logprob=logprobs[0] if logprobs else 0.0,
                top=extra.tops[0] if extra.tops else (),
                target_logprobs=extra.target_logprobs,
                target_top=extra.target_tops,
                pooled=extra.pooled,
                error=extra.error,
                is_own_fault=extra.is_own_fault,
            )
        )
    return rows


def reference_draw(logits: NDArray[np.floating], how: Draw) -> tuple[int, float]:
    return sampling.draw(logits, how.params, how.uniform, how.extra)


def reference_adjust(logits: NDArray[np.floating], how: Draw) -> NDArray[np.floating]:
    return sampling.adjust(logits, how.params, how.extra)
